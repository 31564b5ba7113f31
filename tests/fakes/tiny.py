"""Tiny random checkpoints for end-to-end tests: a target, a noisy copy of it as draft model, a bad draft model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 61


@dataclass(frozen=True)
class TinyModels:
    """Folders. ``near``: the target with noise on its weights, so that some drafts are accepted and some are not;
    ``far``: another random model, hardly ever right; ``other_vocab``: refused."""

    target: str
    near: str
    far: str
    other_vocab: str


def save_llama(folder: Path, seed: int, noise: float = 0.0, noise_seed: int = 0, **settings: Any) -> str:
    import transformers

    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(base | settings))).eval()
    if noise:
        generator = torch.Generator().manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    model.save_pretrained(folder)
    return str(folder)


def make_tiny_models(root: Path) -> TinyModels:
    return TinyModels(
        target=save_llama(root / "target", seed=3),
        near=save_llama(root / "near", seed=3, noise=0.02),
        far=save_llama(root / "far", seed=4, num_hidden_layers=1),
        other_vocab=save_llama(root / "other", seed=5, vocab_size=VOCAB + 3, num_hidden_layers=1),
    )

"""Tiny random checkpoints made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.helpers import VOCAB, MakeModel


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make(family, **config)`` -> (Transformers model, folder with its checkpoint); made once per setting."""
    made: dict[str, tuple[Any, Path]] = {}

    def make(family: str, **settings: Any) -> tuple[Any, Path]:
        import transformers

        key = f"{family} {sorted(settings.items())}"
        if key in made:
            return made[key]
        base: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
            "initializer_range": 0.15,  # wide enough that logits differ by tokens, positions and masks
        }
        config = getattr(transformers, f"{family}Config")(**(base | settings))
        config._attn_implementation = "eager"
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # zeros as made: a forgotten bias would not show
                    parameter.normal_(0, 0.3)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
        folder = tmp_path_factory.mktemp(family.lower())
        model.save_pretrained(folder)
        made[key] = (model, folder)
        return made[key]

    return make

"""A target as far as draft heads look at it: random weights, and what it computed for a random text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from draftwise.config import SpeculativeConfig
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.models.base import SharedWeights
from draftwise.propose.base import ProposerContext

TOKENS = 23


class Target:
    """As much of a target as its heads ask for."""

    def __init__(self, ops: Ops, hidden: int = 32, vocab: int = 61, layers: int = 2) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(vocab, hidden, generator=generator)
        self.output = torch.randn(vocab, hidden, generator=generator)
        self.hidden = torch.randn(TOKENS, hidden, generator=generator)
        self.tokens: list[int] = torch.randint(0, vocab, (TOKENS,), generator=generator).tolist()
        self.config = _Sizes(vocab, hidden, layers)
        self._ops = ops
        self._head: Linear = ops.pack_head(self.output.clone())

    def shared_weights(self) -> SharedWeights:
        return SharedWeights(self.embedding, self._head, self._ops)

    def context(
        self, method: str, model: str | None, *, parallel: bool = False, **more: Any
    ) -> ProposerContext:
        fake: Any = self
        return ProposerContext(
            speculative=SpeculativeConfig(method=method, model=model, parallel_drafting=parallel),
            target_config=fake.config,
            target_model=fake,
            block_size=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=64,
            max_num_seqs=4,
            vocab_size=self.config.vocab_size,
            **more,
        )


class _Sizes:
    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        self.vocab_size, self.hidden_size, self.num_layers = vocab, hidden, layers


def as_speculator(folder: str, verifier: str = "target", **outer: Any) -> None:
    """Rewrite the config of an EAGLE-3 head's folder in the format of the speculators project; ``outer`` replaces
    settings."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    mine = {
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "eagle_aux_hidden_state_layer_ids",
    }
    settings = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }
    new: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": settings,
        **{name: value for name, value in config.items() if name in mine},
        "transformer_layer_config": {name: value for name, value in config.items() if name not in mine},
    }
    path.write_text(json.dumps(new | outer))

"""The low-rank parts of an adapter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The addition to one linear layer: ``y += scale * B (A x)``."""

    down: Tensor  # A [r, inputs], as stored
    up: Tensor  # B [outputs, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

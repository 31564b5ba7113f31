"""How the rows of a ragged batch become calls of a Transformers model's body.

Two ways are known. `Interface` (here) computes all rows as one sequence, in one call, and takes every layer's
attention. `general/cached.py` leaves attention to the model and hands it a cache: one call per length of past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.general.attention import LayerCall, Paged, Taker
from draftwise.types import StepInput


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a batch that the body computes in one call.

    ``rows``: for each result that counts, whose row of the batch it is, and ``places``: where it stands among the B * n
    that the call gives. None: all, in order.
    """

    token_ids: Tensor  # [B, n] int64
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones of the call
    taker: Taker | None = None  # of its attention calls
    positions: Tensor | None = None  # [T] int64, for tables of positions that are told none
    rows: Tensor | None = None  # int64
    places: Tensor | None = None  # int64


class Way(Protocol):
    """One for each loaded model."""

    name: str  # for logs and tables
    cost: str  # for logs: what users should know of it

    @property
    def layout(self) -> tuple[KVLayerSpec, ...]:
        """The storage of each layer per token."""

    def parts(self, batch: StepInput, kv: KVStorage) -> Sequence[Part]:
        """Every row of the batch is in one of them, once."""


class Interface:
    """All rows in one sequence: its positions are told, and what tells requests apart is in attention."""

    name = "attention on own kernels"
    cost = ""

    def __init__(self, calls: Sequence[LayerCall], ops: Ops, first_position: int) -> None:
        """
        Args:
            calls: of the attention layers, in order.
            first_position: what the model calls the position of a sequence's first token.
        """
        self.calls, self._ops, self._first = tuple(calls), ops, first_position

    @property
    def layout(self) -> tuple[KVLayerSpec, ...]:
        return tuple(call.spec for call in self.calls)

    def parts(self, batch: StepInput, kv: KVStorage) -> Sequence[Part]:
        return [self.part(batch.token_ids, batch.positions, Paged(self.calls, self._ops, batch, kv))]

    def part(self, token_ids: Tensor, positions: Tensor, taker: Taker) -> Part:
        """Rows [T] at their positions [T] int64."""
        told = positions + self._first if self._first else positions
        return Part(token_ids[None], {"position_ids": told[None], "use_cache": False}, taker, positions)

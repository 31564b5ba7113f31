"""Layers of which each rank has a part, and operations that know them.

A rank's part of a layer is packed as any layer is, and wrapped in a handle that says what is missing (`Summed`,
`SplitHead`, `SummedExperts`). `SplitOps` takes such handles where `Ops` takes plain ones: models and draft heads are
written as if they were alone.
"""

from __future__ import annotations

from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Experts, Linear
from draftwise.kernels.ranks import Part, Ranks, vocabulary_step


class Summed(Linear):
    """Part of a linear layer's inputs: what it gives is one term of a sum over ranks."""

    __slots__ = ("inner",)

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes


class SummedExperts(Experts):
    """Part of each expert, or some of the experts: one term of a sum over ranks."""

    __slots__ = ("inner",)

    def __init__(self, inner: Experts) -> None:
        self.inner = inner

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes


class SplitHead(Linear):
    """Some rows of an output layer of ``total`` tokens."""

    __slots__ = ("inner", "total")

    def __init__(self, inner: Linear, total: int) -> None:
        self.inner = inner
        self.total = total

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes


class SplitOps(Ops):
    """Comes before the class of some kernels: ``class SplitNativeOps(SplitOps, NativeOps)``.

    `join` is called once, before anything is packed.
    """

    ranks: Ranks

    def join(self, ranks: Ranks) -> None:
        """Work with these."""
        self.ranks = ranks

    # ------------------------------------------------------------------------------------------- operations

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        known = self.ranks.tables.get(table.data_ptr())
        if known is None:
            return super().embedding(token_ids, table, out)  # type: ignore[safe-super]
        first = self.ranks.part.rank * vocabulary_step(known[1], self.ranks.part.size)
        rows = self.sum_ranks(self.part_rows(token_ids, table, first))
        return rows if out is None else out.copy_(rows)

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(weight, Summed):
            return self.sum_ranks(super().linear(x, weight.inner, out))  # type: ignore[safe-super]
        return super().linear(x, weight, out)  # type: ignore[safe-super]

    def experts(self, x: Tensor, scores: Tensor, experts: Experts, out: Tensor | None = None) -> Tensor:
        if isinstance(experts, SummedExperts):
            return self.sum_ranks(super().experts(x, scores, experts.inner, out))
        return super().experts(x, scores, experts, out)

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(experts, SummedExperts):
            return self.sum_ranks(super().mix_experts(x, chosen, weights, experts.inner, out))
        return super().mix_experts(x, chosen, weights, experts, out)

    def logits(self, hidden: Tensor, head: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(head, SplitHead):
            part = super().logits(hidden, head.inner)  # type: ignore[safe-super]
            return self.gather_ranks(part, head.total, out)
        return super().logits(hidden, head, out)  # type: ignore[safe-super]

    # ---------------------------------------------------------------------------------------- between ranks

    def sum_ranks(self, x: Tensor) -> Tensor:
        """``x`` [T, H] becomes the sum over all ranks, in place; returns it."""
        return self.ranks.sum(x)

    def gather_ranks(self, x: Tensor, total: int, out: Tensor | None = None) -> Tensor:
        """``x`` [T, own columns] float32 -> [T, total], columns of all ranks."""
        return self.ranks.gather(x, total, out)

    def part_rows(self, token_ids: Tensor, table: Tensor, first: int) -> Tensor:
        """``token_ids`` [T] -> [T, H]: rows of a table that this rank has from row ``first`` on, zeros for others."""
        own = token_ids - first
        there = (own >= 0) & (own < table.shape[0])
        rows = table.index_select(0, own.clamp(0, table.shape[0] - 1))
        return rows.masked_fill_(~there[:, None], 0.0)


def summed(part: Part, layer: Linear) -> Linear:
    """The handle of a layer that is divided by inputs."""
    return Summed(layer) if part.size > 1 else layer


def summed_experts(part: Part, experts: Experts) -> Experts:
    """The handle of experts whose results are terms of a sum."""
    return SummedExperts(experts) if part.size > 1 else experts


def packed_head(part: Part, ops: Ops, weight: Tensor, total: int) -> Linear:
    """The output layer of ``total`` tokens, of which ``weight`` [rows, H] is the rank's part."""
    packed = ops.pack_head(weight)
    return SplitHead(packed, total) if part.size > 1 else packed


def packed_tied_head(part: Part, ops: Ops, table: Tensor, total: int) -> Linear:
    """The same of the embedding table."""
    packed = ops.pack_tied_head(table)
    return SplitHead(packed, total) if part.size > 1 else packed


def known_table(part: Part, ops: Ops, table: Tensor, total: int) -> None:
    """Let operations know that ``table`` [rows, H] is the rank's part of one of ``total`` rows."""
    if part.size > 1:
        assert isinstance(ops, SplitOps), "a part of a model runs on operations that know of ranks"
        ops.ranks.tables[table.data_ptr()] = (table, total)


def ranks_of(ops: Ops) -> Ranks | None:
    """The ranks that operations work with; None: none."""
    return ops.ranks if isinstance(ops, SplitOps) else None

"""Arbitrary drafts, for benchmarks of the engine and for tests: a drafter that costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from draftwise.propose.base import DraftRow, Proposer, ProposerContext
from draftwise.types import Proposal, chain

_MASK = (1 << 64) - 1


def synthetic_token(rid: int, position: int, rank: int, vocab_size: int) -> int:
    """The token proposed for a position: a hash of (rid, position), plus the rank; below ``vocab_size``.

    Ranks 0..vocab_size-1 of one position give different tokens.
    """
    x = (rid * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 1) & _MASK
    x = ((x ^ (x >> 31)) * 0x94D049BB133111EB) & _MASK
    return ((x >> 32) + rank) % vocab_size


class SyntheticProposer(Proposer):
    """Proposes tokens that depend only on request, position and rank: a chain, or the request's tree.

    The acceptance rule ``synthetic`` gives them any acceptance; under the lossless rules nearly none is accepted.
    """

    name: ClassVar[str] = "synthetic"
    drafts_trees: ClassVar[bool] = True

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        return cls(context.vocab_size)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._chain(row) if row.speculation.tree is None else self._tree(row) for row in rows]

    def _chain(self, row: DraftRow) -> Proposal:
        n, rid, vocab = row.num_tokens, row.rid, self.vocab_size
        length = min(row.budget, row.max_depth)
        return chain([synthetic_token(rid, n + i, 0, vocab) for i in range(length)], self.name)

    def _tree(self, row: DraftRow) -> Proposal:
        """The request's static tree, without nodes that are too deep, cut to the budget.

        Example: parents (-1, 0, 1, -1, 3) with max_depth 2 loses node 2 and becomes (-1, 0, -1, 2).
        """
        spec_parents, ranks = row.speculation.tree, row.speculation.tree_ranks
        assert spec_parents is not None
        if ranks is None:
            ranks = _sibling_order(spec_parents)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        index: dict[int, int] = {-1: -1}  # node of the static tree -> node of the proposal
        for i, parent in enumerate(spec_parents):
            if len(tokens) == row.budget:
                break
            above = index.get(parent)
            if above is None:
                continue
            depth = 1 if above < 0 else depths[above] + 1
            if depth > row.max_depth:
                continue
            index[i] = len(tokens)
            tokens.append(synthetic_token(row.rid, row.num_tokens - 1 + depth, ranks[i], self.vocab_size))
            parents.append(above)
            depths.append(depth)
        return Proposal(tuple(tokens), tuple(parents), self.name)


def _sibling_order(parents: Sequence[int]) -> tuple[int, ...]:
    """Rank of each node among its siblings, for trees given by parents alone."""
    seen: dict[int, int] = {}
    out = []
    for parent in parents:
        out.append(seen.get(parent, 0))
        seen[parent] = out[-1] + 1
    return tuple(out)

"""One rank drafts for all: it sends the others its drafts and their distributions.

The drafter's weights and caches are on that rank alone. All ranks must come to the same result in every step, also if
the drafter fails. An error in a hook that the others do not see is kept until the next drafts and sent with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from draftwise.kernels.ranks import Ranks
from draftwise.propose.base import Committed, DraftRow, Proposer
from draftwise.propose.delegating import DelegatingProposer
from draftwise.types import IntArray, Proposal, StepInput, TargetOutput

T = TypeVar("T")


class LeadingProposer(DelegatingProposer):
    """The drafter's own rank: rank 0."""

    name: ClassVar[str] = "leading"

    def __init__(self, inner: Proposer, ranks: Ranks) -> None:
        super().__init__(inner)
        self._ranks = ranks
        self._failed: dict[int, Exception] = {}  # request -> what a hook raised

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        try:
            for row in rows:
                if row.rid in self._failed:
                    raise self._failed[row.rid]
            found = list(self.inner.propose(rows))
            answer: Any = _packed(found)
        except Exception as error:
            self._ranks.told(f"{type(error).__name__}: {error}")
            raise
        self._ranks.told(answer)
        return found

    def _quietly(self, rids: Sequence[int], call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self._failed.update(dict.fromkeys(rids, error))
            return otherwise

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:
        self._quietly(rids, lambda: self.inner.observe(rids, batch, output), None)

    def committed(self, parts: Sequence[Committed]) -> Sequence[int] | None:
        return self._quietly([p.rid for p in parts], lambda: self.inner.committed(parts), None)

    def filled_after(self, row: DraftRow) -> int:
        return self._quietly([row.rid], lambda: self.inner.filled_after(row), row.filled)

    def drafts_stored(self, row: DraftRow) -> int:
        return self._quietly([row.rid], lambda: self.inner.drafts_stored(row), 0)

    def stored_after(self, rows: Sequence[DraftRow]) -> tuple[Sequence[int], Sequence[int]] | None:
        return self._quietly([row.rid for row in rows], lambda: self.inner.stored_after(rows), None)

    def trimmed(self, rid: int, num_tokens: int) -> None:
        self._quietly([rid], lambda: self.inner.trimmed(rid, num_tokens), None)

    def settle(self, rid: int, token_ids_np: IntArray, block_table_np: IntArray) -> int:
        return self._quietly([rid], lambda: self.inner.settle(rid, token_ids_np, block_table_np), 0)

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:
        self._quietly([rid], lambda: self.inner.leaving(rid, token_ids_np), None)

    def remove(self, rid: int) -> None:
        self._quietly([rid], lambda: self.inner.remove(rid), None)
        self._failed.pop(rid, None)  # a request that comes back is another one to the drafter


class FollowingProposer(Proposer):
    """On the other ranks: returns the drafts of rank 0."""

    name: ClassVar[str] = "following"

    def __init__(self, drafter: type[Proposer], ranks: Ranks) -> None:
        """``drafter``: the class of what rank 0 drafts with."""
        self._ranks = ranks
        self.drafts_trees = drafter.drafts_trees  # type: ignore[misc]  # of this one
        self.drafts_dynamic_trees = drafter.drafts_dynamic_trees  # type: ignore[misc]
        self.evident = drafter.evident  # type: ignore[misc]

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        answer = self._ranks.told(None)
        if isinstance(answer, str):
            raise RuntimeError(f"rank 0 could not draft: {answer}")
        return _unpacked(*answer)


def _packed(proposals: Sequence[Proposal]) -> tuple[list[tuple[Any, ...]], list[np.ndarray[Any, Any]]]:
    """Proposals without their distributions, each with the number of its own, and the distributions, each once:
    several proposals may be rows of one, and one may be a view of something larger."""
    numbers: dict[int, int] = {}
    distributions: list[np.ndarray[Any, Any]] = []
    said = []
    for p in proposals:
        number = -1
        if p.q is not None:
            number = numbers.setdefault(id(p.q), len(numbers))
            if number == len(distributions):
                distributions.append(p.q.contiguous().cpu().numpy())
        said.append((p.tokens, p.parents, p.method, p.draw, number, p.q_rows))
    return said, distributions


def _unpacked(said: list[tuple[Any, ...]], distributions: list[np.ndarray[Any, Any]]) -> list[Proposal]:
    found = [torch.from_numpy(np.array(one)) for one in distributions]
    return [
        Proposal(tokens, parents, method, draw, None if number < 0 else found[number], q_rows)
        for tokens, parents, method, draw, number, q_rows in said
    ]

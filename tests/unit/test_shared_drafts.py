"""One rank drafts for all: what it drafts and how it fails is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from tests.fakes.ranks import on_ranks

from draftwise.kernels.ranks import Ranks
from draftwise.propose.base import DraftRow, Proposer
from draftwise.propose.shared import FollowingProposer, LeadingProposer
from draftwise.types import Proposal, chain


class Inner(Proposer):
    """Drafts one token per request from a distribution that all share; fails for request 3, and when it is told of the
    tokens of request 4."""

    name: ClassVar[str] = "inner"
    has_storage: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        if any(row.rid == 3 for row in rows):
            raise ValueError("not this one")
        q = torch.arange(12.0).view(4, 3)[1:]  # a view of something larger
        return [chain([row.rid], "inner", q, "independent", i) for i, row in enumerate(rows)]

    def trimmed(self, rid: int, num_tokens: int) -> None:
        if rid == 4:
            raise ValueError("gone")


def row(rid: int) -> Any:
    class Row:
        pass

    found: Any = Row()
    found.rid = rid
    return found


def proposer_of(ranks: Ranks) -> Proposer:
    return FollowingProposer(Inner, ranks) if ranks.part.rank else LeadingProposer(Inner(), ranks)


def test_all_ranks_have_the_same_drafts() -> None:
    def work(ranks: Ranks) -> tuple[Sequence[Proposal], bool]:
        proposer = proposer_of(ranks)
        return proposer.propose([row(1), row(2)]), proposer.drafts_trees

    answers = on_ranks(3, work)
    for proposals, trees in answers:
        assert trees
        assert [(p.tokens, p.parents, p.draw, p.q_rows) for p in proposals] == [
            ((1,), (-1,), "independent", (0,)),
            ((2,), (-1,), "independent", (1,)),
        ]
        first, second = (p.q for p in proposals)
        assert first is second and torch.equal(first, torch.arange(3.0, 12.0).view(3, 3))  # type: ignore[arg-type]


def test_failures_are_the_same_on_all_ranks() -> None:
    def work(ranks: Ranks) -> list[str]:
        proposer = proposer_of(ranks)
        said = []
        for rid in (3, 4, 5):
            if rid == 4:
                proposer.trimmed(4, 0)  # the others know nothing of it
            try:
                proposer.propose([row(rid)])
                said.append("drafts")
            except Exception as error:
                said.append(str(error))
        proposer.remove(4)
        said.append(str(proposer.propose([row(4)])[0].tokens))
        return said

    first, *others = on_ranks(3, work)
    assert first == ["not this one", "gone", "drafts", "(4,)"]
    for other in others:
        assert other == [
            "rank 0 could not draft: ValueError: not this one",
            "rank 0 could not draft: ValueError: gone",
            "drafts",
            "(4,)",
        ]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_keeps_anything(rank: int) -> None:
    found = on_ranks(2, lambda ranks: proposer_of(ranks).has_storage)
    assert found[rank] == (rank == 0)

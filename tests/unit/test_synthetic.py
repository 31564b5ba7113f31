"""Arbitrary drafts of the right shape."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.propose.base import DraftRow
from draftwise.propose.synthetic import SyntheticProposer, synthetic_token
from draftwise.types import Speculation


def row(rid: int = 3, n: int = 10, budget: int = 4, max_depth: int = 100, **speculation: Any) -> DraftRow:
    return DraftRow(
        rid=rid,
        token_ids_np=np.zeros(n, np.int32),
        num_prompt=1,
        budget=budget,
        max_depth=max_depth,
        speculation=Speculation(method="synthetic", **speculation),
        sampling=None,  # type: ignore[arg-type]
        block_table_np=np.zeros(0, np.int32),
        filled=0,
    )


def test_a_chain_fills_the_budget_up_to_the_depth() -> None:
    proposer = SyntheticProposer(100)
    for budget, max_depth in ((4, 100), (4, 2), (1, 1)):
        (proposal,) = proposer.propose([row(budget=budget, max_depth=max_depth)])
        assert len(proposal) == min(budget, max_depth) and proposal.is_chain
        assert proposal.method == "synthetic" and proposal.q is None
        assert all(0 <= token < 100 for token in proposal.tokens)


def test_tokens_depend_on_request_and_position_alone() -> None:
    a, b = SyntheticProposer(50_000), SyntheticProposer(50_000)
    first = a.propose([row(n=10), row(rid=4, n=10)])
    again = b.propose([row(rid=4, n=10), row(n=11)])
    assert first[1] == again[0]
    assert first[0].tokens[1:] == again[1].tokens[:-1], "position 11 is position 11"
    assert first[0] != first[1]


def test_tokens_spread_over_the_vocabulary() -> None:
    counts = np.bincount([synthetic_token(r, p, 0, 7) for r in range(70) for p in range(100)], minlength=7)
    assert counts.min() > 850 and counts.max() < 1150, counts


def test_a_tree_has_the_request_s_shape_and_distinct_siblings() -> None:
    parents, ranks = (-1, -1, -1, 0, 0, 3), (0, 1, 2, 0, 1, 0)
    (proposal,) = SyntheticProposer(3).propose([row(budget=9, tree=parents, tree_ranks=ranks)])
    assert proposal.parents == parents
    assert len(set(proposal.tokens[:3])) == 3 and proposal.tokens[3] != proposal.tokens[4]
    (without,) = SyntheticProposer(3).propose([row(budget=9, tree=parents)])
    assert without == proposal


@pytest.mark.parametrize(
    ("budget", "max_depth", "parents"),
    [(5, 9, (-1, 0, 1, -1, 3)), (5, 2, (-1, 0, -1, 2)), (5, 1, (-1, -1)), (2, 9, (-1, 0)), (2, 1, (-1, -1))],
)
def test_a_tree_is_cut_to_budget_and_depth(budget: int, max_depth: int, parents: Sequence[int]) -> None:
    proposer = SyntheticProposer(100)
    (proposal,) = proposer.propose([row(budget=budget, max_depth=max_depth, tree=(-1, 0, 1, -1, 3))])
    assert proposal.parents == tuple(parents)


@given(st.lists(st.integers(-1, 20), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 10))
def test_any_tree_stays_a_valid_one(choices: list[int], budget: int, max_depth: int) -> None:
    parents = tuple(min(c, i - 1) for i, c in enumerate(choices))
    (proposal,) = SyntheticProposer(1000).propose([row(budget=budget, max_depth=max_depth, tree=parents)])
    assert 1 <= len(proposal) <= budget
    assert all(-1 <= p < i for i, p in enumerate(proposal.parents))
    assert max(proposal.depths()) <= max_depth
    for i, parent in enumerate(proposal.parents):
        siblings = [t for t, p in zip(proposal.tokens, proposal.parents, strict=True) if p == parent]
        assert len(set(siblings)) == len(siblings), i


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        SyntheticProposer(0)

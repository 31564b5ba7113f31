"""What control fixes before a step of several rounds: how much of proposals they verify."""

from __future__ import annotations

import itertools

import pytest

from draftwise.adapt.acceptance import ALL, ANY, NOTHING, SOME, TREE, after
from draftwise.adapt.choice import Drafter, Group
from draftwise.names import MAX_TREE_NODES

SIZES = range(MAX_TREE_NODES + 1)


@pytest.mark.parametrize("limits", [(), (0,), (3,), (0, 5, 63), (7, 2, 1, 4)])
@pytest.mark.parametrize(
    ("evident", "trees", "kinds"),
    [
        (True, False, (1, 2, 3, 4)),
        (True, True, (TREE,)),
        (False, False, (ANY, after(SOME), after(ALL), after(NOTHING))),
        (False, True, (TREE,)),
    ],
)
@pytest.mark.parametrize("cuts", [True, False])
def test_a_table_says_what_cut_says(
    limits: tuple[int, ...], evident: bool, trees: bool, kinds: tuple[int, ...], cuts: bool
) -> None:
    group = Group("suffix", "greedy", evident, cuts)
    drafter = Drafter(group, asked=8, most=8, budget=8)
    assert drafter.cut_table() == 4 * bytes(SIZES), "before any choice"
    group.trees = trees
    for chosen in itertools.permutations(kinds, min(len(kinds), len(limits))):
        drafter.cuts = dict(zip(chosen, limits, strict=False))
        expected = []
        for before in (NOTHING, SOME, ALL, None):
            drafter.before = before
            expected += [drafter.cut(n) if cuts else n for n in SIZES]
        drafter.before = SOME
        assert drafter.cut_table() == bytes(expected)

"""Acceptance is estimated from what was accepted, and forgotten slowly."""

from __future__ import annotations

import pytest

from draftwise.adapt.acceptance import (
    ALL,
    ANY,
    NOTHING,
    SOME,
    TREE,
    Counts,
    GroupAcceptance,
    RequestAcceptance,
    after,
    expected,
    outcome,
    size_class,
)
from draftwise.adapt.choice import Drafter, Group, Prices, cuts_of, make_option
from draftwise.adapt.performance import PerformanceModel


def test_a_chain_tries_a_position_only_behind_an_accepted_one() -> None:
    counts = Counts(1000)
    for accepted in (2, 2, 0, 4):
        counts.add_chain(ANY, 4, accepted)
    trials, hits, fresh = counts.get(ANY)
    assert (list(trials), list(hits), fresh) == ([4, 3, 3, 1], [3, 3, 1, 1], True)
    assert counts.get(ANY)[2] is False


def test_every_node_of_a_tree_is_tried() -> None:
    counts = Counts(1000)
    counts.add_tree(4, (1, 3))
    counts.add_tree(2, (0,))
    trials, hits, _ = counts.get(TREE)
    assert (list(trials), list(hits)) == ([2, 2, 1, 1], [1, 1, 0, 1])


def test_expected_accepted_drafts() -> None:
    assert expected([0.5, 0.5, 0.0], ANY) == [0.0, 0.5, 0.75, 0.75]
    assert expected([0.5, 0.5, 0.25], TREE) == [0.0, 0.5, 1.0, 1.25]


def test_a_full_window_counts_for_half() -> None:
    counts = Counts(8)
    for _ in range(8):
        counts.add_chain(ANY, 1, 1)
        counts.get(ANY)
    counts.add_chain(ANY, 1, 0)
    trials, hits, _ = counts.get(ANY)
    assert (list(trials), list(hits)) == ([5], [4])


def test_positions_beyond_what_was_drafted_go_on_like_the_last() -> None:
    group = GroupAcceptance()
    for _ in range(100):
        group.counts.add_chain(ANY, 1, 1)
    rates = group.rates(ANY, 4)
    assert len(rates) == 4 and min(rates) > 0.98
    for _ in range(200):
        group.counts.add_chain(ANY, 1, 0)
    assert group.rates(ANY, 4)[3] < 0.5
    # expected() follows the rates: sum of products.
    a = group.rates(ANY, 4)
    assert group.expected(ANY, 4)[2] == pytest.approx(a[0] + a[0] * a[1])


def test_a_request_starts_like_its_group_and_becomes_itself() -> None:
    group = GroupAcceptance()
    for i in range(200):
        group.counts.add_chain(ANY, 2, i % 2)
    request = RequestAcceptance()
    assert request.expected(group, ANY, 2) == group.expected(ANY, 2)
    for _ in range(16):
        request.counts.add_chain(ANY, 2, 2)
    own = request.expected(group, ANY, 2)
    assert own[1] > 0.85 > 0.6 > group.expected(ANY, 2)[1]
    other = RequestAcceptance()
    assert other.expected(group, ANY, 2) == group.expected(ANY, 2)
    request.counts.fade(0.0)
    assert request.expected(group, ANY, 2) == pytest.approx(group.expected(ANY, 2))


def test_sizes_of_evident_proposals() -> None:
    assert [size_class(n) for n in (1, 2, 3, 6, 7, 14, 15, 63)] == [1, 1, 2, 2, 3, 3, 4, 6]
    group = GroupAcceptance()
    for n in (0, 0, 5, 4):
        group.add_size(n)
    assert group.sizes == {0: (2.0, 0.0), 2: (2.0, 9.0)}
    for _ in range(300):
        group.add_size(0)
    assert group.sizes[0][0] < 260 and group.sizes[2][0] <= 1.0


# ------------------------------------------------------------------------------------------ the proposal before


def test_what_came_of_a_proposal() -> None:
    assert [outcome(4, n) for n in range(5)] == [NOTHING, SOME, SOME, SOME, ALL]
    assert outcome(1, 1) == ALL


def in_runs(group: Group, steps: int = 400) -> None:
    """A text of which stretches of 20 proposals are accepted whole, and as many not at all."""
    before = None
    for step in range(steps):
        accepted = 4 if step // 20 % 2 else 0
        group.acceptance.counts.add_chain(ANY, 4, accepted)
        if before is not None:
            group.acceptance.counts.add_chain(after(before), 4, accepted)
        before = outcome(4, accepted)


def test_chances_behind_a_proposal_are_calibrated() -> None:
    """19 of 20 proposals behind a whole one are accepted whole, one in 20 behind nothing is; without regard to that it
    is half of them."""
    group, request = Group("model", "rejection", evident=False), RequestAcceptance()
    assert request.expected_after(group.acceptance, ALL, 4) is None, "nothing is known"
    in_runs(group)
    every = request.expected(group.acceptance, ANY, 4)
    good = request.expected_after(group.acceptance, ALL, 4)
    bad = request.expected_after(group.acceptance, NOTHING, 4)
    assert good is not None and bad is not None
    assert every[1] == pytest.approx(0.5, abs=0.1)
    assert good[1] == pytest.approx(0.95, abs=0.05) and bad[1] == pytest.approx(0.05, abs=0.05)
    assert good[4] > 3.3 and bad[4] < 0.4
    assert request.expected_after(group.acceptance, SOME, 4) is None, "that never happened"


def priced(row: float) -> PerformanceModel:
    """A machine on which a step of one row takes 1, and each row more takes so much."""

    class Machine(PerformanceModel):
        def target_time(self, requests: int, rows: int, context: int, sampled: bool) -> float:
            return 1.0 + row * (rows - requests)

        def draft_time(self, *_: object, **__: object) -> float:
            return 0.0

    return Machine()


@pytest.mark.parametrize(("row", "cuts"), [(0.2, (0, 4)), (0.0, (4, 4))])
def test_the_budget_follows_the_price_of_rows(row: float, cuts: tuple[int, int]) -> None:
    group = Group("model", "rejection", evident=False)
    in_runs(group)
    member = Drafter(group, 4, 4, 4)
    option = make_option(group, [member], 4, Prices(1, 0, False, 1.0), 1.0, priced(row))
    ((_, on),) = option.members
    assert on
    member.cuts = cuts_of(group, member, 4, option.row_price)
    found = []
    for member.before in (NOTHING, ALL):
        found.append(member.cut(4))
    assert tuple(found) == cuts
    member.before = None
    assert member.cut(4) == member.cuts[ANY]
    member.before = SOME  # of which nothing is known
    assert member.cut(4) == member.cuts[ANY]

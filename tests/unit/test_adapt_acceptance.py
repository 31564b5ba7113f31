"""Acceptance is estimated from what was accepted, and forgotten slowly."""

from __future__ import annotations

import pytest

from draftwise.adapt.acceptance import (
    ANY,
    TREE,
    Counts,
    GroupAcceptance,
    RequestAcceptance,
    expected,
    is_chain,
    size_class,
)


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


def test_chains_are_told_from_trees() -> None:
    assert is_chain(()) and is_chain((-1,)) and is_chain((-1, 0, 1))
    assert not is_chain((-1, -1)) and not is_chain((-1, 0, 0))

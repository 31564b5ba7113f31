"""Requests that a head keeps side by side, against the same requests one by one."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import torch

from draftwise.propose.heads.state import Features, HeadState, joined
from draftwise.propose.heads.steady import SteadyHeads


def opened(known: list[int], gaps: list[int | None]) -> list[HeadState]:
    """Requests whose rows are stored up to their last known tokens, and whose newest features came from one step."""
    features = Features.of(torch.arange(len(known), dtype=torch.float32)[:, None])
    found = []
    for i, (count, gap) in enumerate(zip(known, gaps, strict=True)):
        state = HeadState.opened(1, 0, 0, None)
        state.gap = gap
        track = state.tracks[0]
        track.next = count
        track.queue.restore((count - 2, count - 2, []))
        track.queue.append(features, i, i + 1)
        found.append(state)
    return found


def book(state: HeadState) -> tuple[Any, ...]:
    track = state.tracks[0]
    pieces = track.queue.of(track.queue.first, track.queue.end)
    return track.next, track.queue.first, track.queue.end, joined(pieces)[:, 0].tolist(), state.filled


def test_steps_side_by_side_as_one_by_one() -> None:
    rng = random.Random(5)
    known, gaps = [10, 7, 30], [None, 4, None]
    rids = [3, 5, 8]
    alone, together = opened(known, gaps), opened(known, gaps)
    steady = SteadyHeads.of(rids, together)
    assert steady is not None
    for step in range(12):
        counts = [rng.randrange(1, 5) for _ in known]
        values = torch.arange(sum(counts), dtype=torch.float32)[:, None] + 100 * step
        firsts = np.array(known, np.int32) - 1
        assert steady.follows(rids, firsts)
        assert not steady.follows(rids, firsts + 1) and not steady.follows([3, 5], firsts[:2])
        steady.came(Features.of(values), array("i", counts))
        assert not steady.follows(rids, firsts), "features that came wait to be drafted from"
        start = 0
        given = Features.of(values)
        rows = []
        for state, count, before in zip(alone, counts, known, strict=True):
            state.tracks[0].queue.append(given, start, start + count)
            rows += state.tracks[0].queue.of(before - 1, before + count - 1)
            start += count
        known = [before + count for before, count in zip(known, counts, strict=True)]
        if step == 11:
            break  # written down before it was drafted from
        assert steady.ready([3, 5]) is None
        ready = steady.ready(rids)
        assert ready is not None and torch.equal(ready.values, joined(rows))
        assert ready.gaps.tolist() == [-1, 4, -1] and ready.first_keys.tolist() == [1, 1, 1]
        for i, (state, count) in enumerate(zip(alone, known, strict=True)):
            assert ready.seen[i] + 1 + ready.counts[i] == count, "rows up to the last known token"
            state.tracks[0].advance(count)
            ready.seen[i], ready.last[i] = count - 1, sum(counts[: i + 1]) - 1  # as native code does
        steady.drafted()
        assert [seen + 1 for seen in steady.seen] == [state.tracks[0].next for state in alone]
    steady.write()
    assert [book(state) for state in together] == [book(state) for state in alone]


def test_what_is_written_down_is_no_longer_in_the_memory_of_rounds() -> None:
    known, rids = [10, 7], [3, 5]
    states = opened(known, [None, None])
    steady = SteadyHeads.of(rids, states)
    assert steady is not None
    room = torch.arange(8, dtype=torch.float32).view(2, 4, 1)
    for i, count in enumerate((1, 2)):  # rows of the last round: one of the first request, two of the other
        steady.counts[i] = count
    steady.features_in(room[0])
    steady.went_on(Features.lent(room[1]), Features.lent(room[0]), drafted=False)
    steady.write()
    room.fill_(-1)
    read = [book(state) for state in states]
    assert read[0][3] == [0, 4] and read[1][3] == [1, 5, 6]


def test_requests_that_do_not_go_on_together() -> None:
    states = opened([10, 7], [None, None])
    states[1].tracks[0].queue.append(Features.of(torch.zeros(1, 1)), 0, 1)
    assert SteadyHeads.of([0, 1], states) is None, "a row is to be computed"
    states = opened([10, 7], [None, None])
    queue = states[1].tracks[0].queue
    queue.restore((queue.first, queue.first, []))
    queue.append(Features.of(torch.zeros(1, 1)), 0, 1)
    assert SteadyHeads.of([0, 1], states) is None, "features of two steps"
    assert SteadyHeads.of([0], [HeadState.opened(2, 0, 0, None)]) is None, "two depths"
    assert SteadyHeads.of([], []) is None

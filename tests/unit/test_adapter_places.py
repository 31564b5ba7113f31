"""Which adapters an executor holds, and who waits for a place."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from draftwise.sampling.params import SamplingParams
from draftwise.sched.adapters import MOST_OVERTAKING, AdapterPlaces, Move
from draftwise.sched.order import Waiting
from draftwise.sched.request import Request
from draftwise.types import Speculation


def request(rid: int, adapter: int) -> Request:
    return Request(
        rid, np.ones(1, np.int32), SamplingParams(), Speculation("none", 0),
        max_total=8, seed=0, arrival_time=0.0, adapter=adapter,
    )  # fmt: skip


def moves(places: AdapterPlaces) -> list[Move]:
    found = []
    while move := places.take_move():
        found.append(move)
    return found


def queue(requests: Iterable[Request]) -> Waiting:
    waiting = Waiting()
    for one in requests:
        waiting.add(one)
    return waiting


def admit(places: AdapterPlaces, requests: list[Request]) -> list[Request]:
    """All that can enter, in the order in which they do."""
    waiting = queue(requests)
    entered = []
    while (chosen := places.first(waiting)) is not None:
        places.enter(chosen)
        requests.remove(chosen)
        waiting.remove(chosen)
        entered.append(chosen)
    return entered


def test_the_example() -> None:
    places = AdapterPlaces(2)
    waiting = [request(rid, adapter) for rid, adapter in enumerate((1, 2, 3, 1, 0))]
    assert places.num_entering(queue(waiting)) == 4
    running = admit(places, waiting)
    assert [r.rid for r in running] == [0, 1, 3, 4] and [r.rid for r in waiting] == [2]
    assert moves(places) == [Move("load", 1), Move("load", 2)]
    places.check(running)
    places.leave(running[0])
    assert admit(places, waiting) == []  # the fourth still has adapter 1
    places.leave(running[1])
    assert [r.rid for r in admit(places, waiting)] == [2]
    assert moves(places) == [Move("drop", 2), Move("load", 3)]


def test_the_least_recently_used_makes_room() -> None:
    places = AdapterPlaces(2)
    found = []
    for rid, adapter in enumerate((1, 2, 1, 3)):
        one = request(rid, adapter)
        assert admit(places, [one]) == [one]
        found += moves(places)
        places.leave(one)
    assert found == [Move("load", 1), Move("load", 2), Move("drop", 2), Move("load", 3)]


def test_nobody_waits_for_ever() -> None:
    """Without the limit, a stream of requests with the one adapter that has a place would keep another out."""
    places = AdapterPlaces(1)
    running = [request(0, 1)]
    places.enter(running[0])
    waiting = [request(1, 2)]
    for rid in range(2, 2 + MOST_OVERTAKING):
        waiting.append(request(rid, 1))
        running += admit(places, waiting)
        places.leave(running.pop(0))
    assert len(running) == 1 and [r.rid for r in waiting] == [1]
    waiting += [request(900, 1), request(901, 0)]
    assert places.num_entering(queue(waiting)) == 1
    assert [r.rid for r in admit(places, waiting)] == [901]  # who has no adapter takes no place from anybody
    places.leave(running.pop())
    assert [r.rid for r in admit(places, waiting)] == [1]
    places.leave(request(1, 2))
    assert [r.rid for r in admit(places, waiting)] == [900]


def test_one_place_is_enough_for_who_waits() -> None:
    """When too many have overtaken, only the adapter with fewer requests ends; the other one's go on."""
    places = AdapterPlaces(2)
    running = [request(rid, adapter) for rid, adapter in enumerate((1, 2, 1))]
    for one in running:
        places.enter(one)
    waiting = [request(10, 3), *[request(rid, 2 - rid % 2) for rid in range(11, 20 + MOST_OVERTAKING)]]
    entered = admit(places, waiting)
    assert len(entered) > MOST_OVERTAKING and {r.adapter for r in entered[MOST_OVERTAKING:]} == {1}
    waiting = [request(10, 3), request(500, 2), request(501, 1)]
    assert places.num_entering(queue(waiting)) == 1
    assert [r.rid for r in admit(places, waiting)] == [501]
    for one in (*running, *entered):
        if one.adapter == 2:
            assert places.num_entering(queue(waiting)) == 0
            places.leave(one)
    assert [r.rid for r in admit(places, waiting)] == [10]


def test_one_who_is_cancelled_takes_nobodys_patience() -> None:
    places = AdapterPlaces(1)
    places.enter(request(0, 1))
    waiting = [request(1, 2), *[request(rid, 1) for rid in range(2, 2 + MOST_OVERTAKING)]]
    assert len(admit(places, waiting)) == MOST_OVERTAKING
    waiting[:] = [request(500, 3), request(501, 1)]  # the first one has left, another is passed over
    assert [r.rid for r in admit(places, waiting)] == [501]


def test_what_is_forgotten_need_not_be_moved() -> None:
    places = AdapterPlaces(1)
    one = request(0, 1)
    places.enter(one)
    with pytest.raises(AssertionError, match="in use"):
        places.forget(1)
    places.leave(one)
    places.forget(1)  # before the executor heard of it
    assert moves(places) == []
    places.enter(one)
    move = places.take_move()
    assert move == Move("load", 1)
    places.put_back(move)  # that failed
    assert places.take_move() == move
    places.leave(one)
    places.forget(1)
    places.forget(1)
    assert moves(places) == [Move("drop", 1)]


class _Unread(Waiting):
    def __iter__(self) -> Iterator[Request]:
        raise AssertionError("somebody looks at all who wait")


def test_who_waits_behind_others_costs_nothing() -> None:
    """A batch of many thousand requests with adapters stands in this queue, and every step asks for the first one."""
    places = AdapterPlaces(1)
    places.enter(request(0, 1))
    waiting = _Unread()
    for rid in range(1, 100):
        waiting.add(request(rid, 2 + rid % 8))
    assert places.first(waiting) is None and places.num_entering(waiting) == 0
    last = request(100, 1)
    waiting.add(last)
    assert places.first(waiting) is last and places.num_entering(waiting) == 1


def test_who_enters_is_counted_before() -> None:
    """Whatever runs and waits: so many as are said to enter do, and the first is the first that fits."""
    draw = random.Random(5)
    for _ in range(300):
        most = draw.randint(1, 3)
        places = AdapterPlaces(most)
        running = admit(places, [request(rid, draw.randint(0, 4)) for rid in range(draw.randint(0, 4))])
        waiting = [request(rid, draw.randint(0, 6)) for rid in range(10, 10 + draw.randint(0, 12))]
        expected = places.num_entering(queue(waiting))
        first = places.first(queue(waiting))
        own = {r.adapter for r in running} - {0}
        free = len(own) < most
        fitting = [r for r in waiting if not r.adapter or r.adapter in own or free]
        assert first is (fitting[0] if fitting else None)
        assert len(admit(places, waiting)) == expected

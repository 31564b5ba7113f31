"""How many replicas at random arrivals, and what load to be ready for: anchors of queueing theory and of least
squares."""

from __future__ import annotations

import json
import math
import random

import pytest

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.attainment import Attainment
from draftwise.plan.capacity import ModelCapacity
from draftwise.plan.forecast import load_ahead, trend
from draftwise.plan.operating import Sla
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.staffing import Service, replicas_for, share_waiting
from draftwise.plan.ticks import ENGINES, Observation
from draftwise.plan.times import Polynomial

ONE_PLACE = Service([(1, 1.0)], 0.0, 1.0)
"""Ends one request per second."""


def test_a_queue_with_one_place_is_the_text_book_s() -> None:
    assert share_waiting(0.5, 1, ONE_PLACE, 0.0) == pytest.approx(0.5)  # M/M/1: as often as it is busy
    assert share_waiting(0.5, 1, ONE_PLACE, 1.0) == pytest.approx(0.5 * math.exp(-0.5 * 4 / 3))
    assert share_waiting(2.0, 1, ONE_PLACE, 1.0) == 1.0
    assert share_waiting(0.0, 1, ONE_PLACE, 1.0) == 0.0


def test_many_places_are_erlang_s() -> None:
    """Erlang C of 5 servers and 4 erlangs is 0.5541."""
    assert share_waiting(4.0, 5, ONE_PLACE, 0.0) == pytest.approx(0.5541, abs=1e-4)


def test_places_that_share_a_device_wait_less() -> None:
    shared = Service([(m, float(m)) for m in range(1, 9)], 0.0, 1.0)  # 8 at once, together one per second
    assert shared.most == pytest.approx(1.0) and shared.places == 8
    assert replicas_for(2.5, shared, 0.0, 0.95) == 3
    assert replicas_for(2.5, ONE_PLACE, 0.0, 0.95) == 6
    assert replicas_for(0.0, shared, 0.0, 0.95) == 0
    # A large one: what the mean takes, and little besides, without reckoning out 100,000 places.
    assert 10_000 < replicas_for(1e4, shared, 0.0, 0.95) < 10_200


def test_a_trend_is_believed_when_chance_would_not_make_it() -> None:
    assert trend([1, 2, 3, 4]).slope == pytest.approx(1) and trend([1, 2, 3, 4]).level == pytest.approx(4)
    assert trend([5, 1, 4, 2]).slope == 0 and trend([5, 1, 4, 2]).level == 3
    assert trend([7.0]).level == 7.0


def test_a_load_that_goes_or_comes_at_once_is_followed_at_once() -> None:
    steady = load_ahead([2.0] * 8, 60.0, 60.0, None)[0]
    assert steady == 2.0
    assert load_ahead([2.0] * 7 + [0.0], 60.0, 60.0, None)[0] < 0.3
    assert load_ahead([2.0] * 7 + [20.0], 60.0, 60.0, None)[0] > 19
    rate, growth = load_ahead([float(n) for n in range(1, 9)], 60.0, 120.0, None)
    assert growth == pytest.approx(3.3, abs=0.1) and 11.0 < rate < 12.0  # 8 now, three intervals later 11


def _planned(luck: float = 1.0, ready: int = 1, requests: float = 60.0, itl: float | None = None) -> Planner:
    acceptance = AcceptanceModel.constant((0.7, 0.5, 0.2))
    capacity = ModelCapacity(Polynomial(60_000), acceptance, Sla(ttft=0.5, itl=0.02), most_requests=16)
    planner = Planner(PlannerConfig(budget=64, most_change=64), capacity)
    usual = capacity.accepted(3.0)
    assert usual == pytest.approx(1.12)
    for i in range(10):
        seen = Observation(
            60.0 * i, requests, isl=1000.0, osl=200.0, itl=itl, accepted_length=1 + luck * usual, draft_length=3.0,
            ready={ENGINES: ready},
        )  # fmt: skip
        planner.on_tick(seen)
    return planner


def test_replicas_with_little_to_do_are_no_quicker_ones() -> None:
    """A full engine takes longer per token: times of one with two requests say nothing about it."""
    times = Polynomial(60_000)
    quick = times.target_time(1, 4, 1100) / 2.12 + times.draft_time("model", 1, 3) / 2.12
    found = _planned(itl=quick, ready=4).state()["corrections"]["decode"]
    assert found == pytest.approx(1.0, abs=0.15)


def test_as_many_accepted_as_expected_of_so_many_drafts_changes_nothing() -> None:
    assert _planned().state()["luck"] == pytest.approx(1.0)
    assert _planned(luck=0.5).state()["luck"] == pytest.approx(0.5, abs=0.02)


def test_drafts_change_at_once_for_those_who_are_there() -> None:
    """Until more replicas have come, one has all of the load."""
    one, four = (_planned(ready=ready, requests=600.0) for ready in (1, 4))
    rows = [
        p.on_tick(Observation(0.0, 600.0, isl=1000.0, osl=200.0, ready={ENGINES: n}))
        for p, n in ((one, 1), (four, 4))
    ]
    loads = [next(r for r in row.reasons if "requests/s a replica" in r) for row in rows]
    assert rows[0].replicas == rows[1].replicas and loads[0] != loads[1]


def test_what_may_be_late_is_what_the_goal_has_left() -> None:
    found = Attainment(0.95)
    assert found.may_be_late() == pytest.approx(0.05)
    for _ in range(400):
        found.note(1e6, 1.0)
    assert found.may_be_late() == pytest.approx(0.25, abs=1e-4)
    for attained, late in ((0.975, 0.15), (0.95, 0.05), (0.9, 0.025)):
        for _ in range(400):
            found.note(1e6, attained)
        assert found.may_be_late() == pytest.approx(late, abs=1e-3)
    lax = Attainment(0.3)
    lax.note(1e9, 1.0)
    assert lax.may_be_late() == pytest.approx(0.7)  # never stricter than was asked for


def test_late_requests_make_a_plan_stricter_unless_replicas_were_on_their_way() -> None:
    times = Polynomial(60_000)
    capacity = ModelCapacity(
        times, AcceptanceModel.constant((0.7, 0.5, 0.2)), Sla(ttft=0.5, itl=0.02), most_requests=16
    )
    counts = {}
    for name, attained, ready in (("none", 1.0, 64), ("some", 0.9, 64), ("on their way", 0.9, 0)):
        planner = Planner(PlannerConfig(budget=64, most_change=64, goal=0.99), capacity)
        for i in range(30):
            seen = Observation(
                60.0 * i, 300.0, isl=1000.0, osl=200.0, ready={ENGINES: ready}, attained=attained
            )
            last = planner.on_tick(seen)
        counts[name] = last.replicas[ENGINES]
        again = Planner(planner.config, capacity)
        again.restore(json.loads(json.dumps(planner.state())))
        assert again.state() == planner.state()
    assert counts["none"] < counts["on their way"] <= counts["some"]


def test_a_queue_that_is_served_in_time_is_no_backlog() -> None:
    def reasons(queue: float) -> str:
        capacity = ModelCapacity(
            Polynomial(60_000), AcceptanceModel.constant((0.7,)), Sla(ttft=4.0), most_requests=16
        )
        planner = Planner(PlannerConfig(budget=64), capacity)
        seen = Observation(0.0, 600.0, isl=1000.0, osl=200.0, queue=queue)
        return "; ".join(planner.on_tick(seen).reasons)

    assert "wait," not in reasons(10.0) and "60 wait, " in reasons(60.0)  # about 19 come in half of 4 s


def test_a_load_that_shrinks_is_followed_and_growth_by_chance_is_not() -> None:
    falling = [10.0 - 0.5 * i for i in range(8)]
    rate, growth = load_ahead(falling, 60.0, 60.0, None)
    assert growth < 0 and rate < 6.5
    rng = random.Random(5)
    grown = sum(
        load_ahead([rng.gauss(4.0, 0.36) for _ in range(8)], 30.0, 45.0, None)[1] > 0.25 for _ in range(400)
    )
    assert grown < 0.05 * 400


def test_goals_that_cannot_be() -> None:
    for goal in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match="goal"):
            PlannerConfig(goal=goal)


def test_it_never_needs_less_for_more() -> None:
    rng = random.Random(1)
    for _ in range(30):
        itl = [rng.uniform(0.01, 0.05) * (1 + 0.1 * m) for m in range(1, 9)]
        service = Service(list(enumerate(itl, 1)), rng.uniform(0, 0.1), 50.0)
        needed = [replicas_for(load, service, 0.5, 0.95) for load in (0.1, 1.0, 5.0, 20.0)]
        assert needed == sorted(needed)

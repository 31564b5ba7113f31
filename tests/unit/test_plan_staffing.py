"""How many replicas at random arrivals, and what load to be ready for: anchors of queueing theory and of least
squares."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.attainment import Attainment
from draftwise.plan.capacity import ModelCapacity
from draftwise.plan.forecast import Habits, Load, Trend, loads_ahead, trend
from draftwise.plan.operating import Sla
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.staffing import Service, _grown, replicas_for, share_waiting
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


def test_a_queue_takes_its_time_to_grow() -> None:
    """Half of the cases are beyond what the mean has grown to; much later it is the text-book's again."""
    service = Service([(1, 0.01)], 0.0, 1.0)  # ends 100 per second
    assert share_waiting(110.0, 1, service, 10.0, 100.0) == pytest.approx(0.5, abs=0.01)
    assert (
        share_waiting(110.0, 1, service, 10.0, 30.0)
        < 1e-3
        < 0.999
        < share_waiting(110.0, 1, service, 10.0, 300.0)
    )
    for load in (0.3, 0.8):
        steady = share_waiting(load, 1, ONE_PLACE, 1.0)
        found = [share_waiting(load, 1, ONE_PLACE, 1.0, horizon) for horizon in (0.1, 1.0, 10.0, 1e4)]
        assert found == sorted(found) and found[0] < 0.5 * steady
        assert found[-1] == pytest.approx(steady)
    # A queue in which nobody may wait at all: who finds all places taken is late, however short the time.
    assert share_waiting(0.5, 1, ONE_PLACE, 0.0, 1.0) == pytest.approx(0.5)


def test_a_brownian_queue_is_that_of_a_random_walk() -> None:
    """4,000 walks of exponential steps that may not fall below zero, against the formula."""
    rng = np.random.default_rng(3)
    load, wait, horizon = 9.5, 2.0, 30.0
    lengths = np.zeros(4000)
    for _ in range(300):  # a tenth of a second each; per request as much variance as the formula has
        come, gone = rng.poisson(load * 0.1, 4000), rng.normal(1.0, math.sqrt(0.55), 4000)
        lengths = np.maximum(lengths + come - gone, 0.0)
    late = float((lengths > 10.0 * wait).mean())
    assert _grown(load, 10.0, wait, horizon) == pytest.approx(late, abs=0.03) and late > 0.02


def test_a_load_that_is_not_known_well_takes_more() -> None:
    shared = Service([(m, float(m)) for m in range(1, 9)], 0.0, 1.0)
    needed = [replicas_for(20.0, shared, 1.0, 0.95, error=error, horizon=60.0) for error in (0.0, 1.0, 4.0)]
    assert needed[0] < needed[1] < needed[2]
    assert 20 + 4 < needed[2] < 20 + 3 * 4  # 95 of 100 such loads are below 20 + 1.64 * 4


def test_a_slope_is_believed_as_far_as_loads_change_like_that() -> None:
    sure = trend([100.0 * n for n in range(1, 9)], 60.0, Habits())
    assert sure.slope == pytest.approx(100, rel=0.01) and sure.level == pytest.approx(800, rel=0.01)
    calm, wild = (trend([3.0, 3.5, 3.0, 4.0, 3.5, 4.5, 4.0, 4.5], 10.0, Habits(c)) for c in (1e-6, 1.0))
    assert abs(calm.slope) < 0.01 < 0.15 < wild.slope and calm.level < wild.level
    assert wild.ahead(3.0).error > 2 * calm.ahead(3.0).error
    assert trend([1.0, 7.0], 10.0, Habits()).level == 7.0  # of few the newest
    assert Trend(8.0, 1.0, 0.0, 0.0, 0.0).ahead(3.0) == Load(11.0, 0.0)


def test_errors_of_a_trend_are_as_large_as_it_says() -> None:
    """Of a thousand loads with such habits, the truth three intervals on lies within an error 68 times in 100."""
    rng = np.random.default_rng(0)
    habits, interval, within = Habits(0.05**2), 30.0, 0
    for _ in range(1000):
        true = 5.0 + 5.0 * 0.05 * rng.standard_normal() * np.arange(-7, 4)
        rates = rng.poisson(np.maximum(true[:8], 0.0) * interval) / interval
        found = trend(rates.tolist(), interval, habits).ahead(3.0)
        within += abs(found.rate - true[-1]) <= found.error
    assert 620 < within < 740


def test_habits_are_learned() -> None:
    rng = np.random.default_rng(1)

    def learned(rates: list[float]) -> Habits:
        habits = Habits()
        for n in range(1, len(rates) + 1):
            habits = habits.after(rates[:n], 30.0)
        return habits

    steady = learned((rng.poisson(150, 200) / 30).tolist())
    assert steady.change < 0.04**2 and 0.7 < steady.scatter < 1.3
    bursts = learned((rng.poisson(150, 200) / 30 * rng.choice([0.7, 1.3], 200)).tolist())
    assert bursts.noise > 5 * steady.noise
    growing = learned([1.0 * 1.15**n for n in range(30)])
    assert growing.change > 0.09**2
    for state in ({"change": math.nan}, {"scatter": -1.0}, {"bird": 1.0}):
        with pytest.raises((TypeError, ValueError)):
            Habits.of(state)


def test_a_load_that_goes_or_comes_at_once_is_followed_at_once() -> None:
    def rate(rates: list[float], startup: float = 60.0) -> float:
        near, far, _ = loads_ahead(rates, 60.0, startup, None, Habits())
        return max(near.rate, far.rate)

    assert rate([2.0] * 8) == pytest.approx(2.0)
    assert rate([2.0] * 7 + [0.0]) < 0.3
    assert rate([2.0] * 7 + [20.0]) > 19
    assert 10.5 < rate([float(n) for n in range(1, 9)], 120.0) < 11.5  # 8 now, three intervals later 11
    assert rate([10.0 - 0.5 * i for i in range(8)]) < 6.5  # one that shrinks


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

"""Adaptive control where steps stay on a device: a pass is as wide for all requests as for the one with most drafts,
whoever neither drafts nor decodes plainly costs a pass of its own, and nobody says what part of a step was drafting.
Times are those of an 8 B model with an EAGLE-3 head on an H200."""

from __future__ import annotations

import pytest
from tests.fakes.simulated import Simulation, World, rate

from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.controller import StaticController, StepShape
from draftwise.adapt.performance import PassTime, PerformanceModel
from draftwise.types import StepResult

K = 3
_PASSES = {1: (4.75, 4.8), 16: (5.3, 5.8), 64: (6.2, 9.0), 256: (9.5, 27.0)}
"""Requests -> milliseconds of a pass of one row each, and of four."""
_LOOPS = {1: 0.74, 16: 0.87, 64: 1.24, 256: 3.5}


def between(times: dict[int, float], requests: int) -> float:
    """A time for any number of requests, on the line between its neighbours."""
    sizes = sorted(times)
    low = max((n for n in sizes if n <= requests), default=sizes[0])
    high = min((n for n in sizes if n >= requests), default=sizes[-1])
    share = (requests - low) / (high - low) if high > low else 0.0
    return times[low] + share * (times[high] - times[low])


def target(requests: int, rows: int) -> float:
    wide = rows > requests
    return between({n: times[wide] for n, times in _PASSES.items()}, requests)


def draft(method: str, requests: int, nodes: int) -> float:
    return between(_LOOPS, requests) if nodes else 0.0


def world(accept: float) -> World:
    return World(
        target,
        draft,
        lambda rid, method, position, now: accept if position < K else 0.0,
        prompt=0.02,
        follow=0.003,
        catch_up=0.003,
        timed=False,
        apart=lambda requests: target(requests, requests) + 1.0 + 0.02 * requests,
    )


def seated() -> AdaptiveController:
    model = PerformanceModel()
    model.teach_passes(
        PassTime(n, n * (1 + drafts), context, target(n, n * (1 + drafts)) / 1000)
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for context in (128, 1024)
        for drafts in range(1 + K)
    )
    return AdaptiveController({}, (), {"model"}, ahead=True, seated=True, model=model)


def rates(accept: float, n: int, warm: int) -> tuple[float, float]:
    """Speed over plain decoding of static and of adaptive control, in 200 steps behind ``warm`` others; static control
    has nothing to learn in those."""
    found = []
    for controller, before in ((StaticController(), 5), (seated(), warm)):
        simulation = Simulation(world(accept), controller, max_num_seqs=256, ahead=True)
        simulation.add(n, k=K)
        simulation.run(before)
        found.append(rate(simulation.run(200)) * target(n, n) / 1000 / n)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("accept", "n"),
    [
        # every second one; with 256 drafting never pays: see the next test
        pytest.param(accept, n, marks=[] if (i + j) % 2 == 0 and n < 256 else pytest.mark.slow)
        for i, accept in enumerate((0.0, 0.3, 0.6, 0.8))
        for j, n in enumerate((1, 16, 64, 256))
    ],
)
def test_it_is_not_slower_than_plain_decoding_and_drafts_where_that_pays(accept: float, n: int) -> None:
    static, adaptive = rates(accept, n, warm=120)
    assert adaptive > 0.96
    if static > 1.3:
        assert adaptive > 0.94 * static


def test_who_does_not_draft_is_not_followed() -> None:
    """No request is computed apart once it is clear that drafting does not pay, not even as a sample."""
    simulation = Simulation(world(0.8), seated(), max_num_seqs=256, ahead=True)
    simulation.add(256, k=K)
    simulation.run(150)
    for step in simulation.run(100):
        assert not any(step.budgets.values()) and step.clean == pytest.approx(step.plain)


def test_all_draft_or_none() -> None:
    """A request whose drafts are bad drafts with the others: without drafts it would cost a pass."""

    def chance(rid: int, method: str, position: int, now: float) -> float:
        return 0.0 if rid % 8 == 0 or position >= K else 0.85

    uneven = world(0.0)
    uneven.chance = chance
    simulation = Simulation(uneven, seated(), ahead=True)
    simulation.add(16, k=K)
    simulation.run(150)
    for step in simulation.run(60):
        assert len({budget > 0 for budget in step.budgets.values()}) == 1


def test_passes_that_were_timed_are_known_for_draws_of_any_kind() -> None:
    model = PerformanceModel()
    model.teach_passes([PassTime(4, 8, 100, 0.005)])
    for sampled in (False, True):
        assert model.target_time(4, 8, 400, sampled) == pytest.approx(0.005)
        assert model.times_measured(4, 8, 400, sampled) >= 3


def test_steps_in_which_something_was_captured_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture takes is in the time of the step that is launched then, and of the one before it."""
    controller = seated()
    simulation = Simulation(world(0.8), controller, ahead=True)
    simulation.add(2, k=K)
    simulation.run(20)
    captured, seen = [0], []
    executor = type(simulation.core.executor)
    monkeypatch.setattr(executor, "num_captured", property(lambda self: captured[0]))
    observe = controller.observe

    def spied(result: StepResult, shape: StepShape, seconds: float | None) -> None:
        seen.append(seconds is not None)
        observe(result, shape, seconds)

    monkeypatch.setattr(controller, "observe", spied)
    simulation.run(3)
    captured[0] += 1
    simulation.run(4)
    assert seen == [True, True, True, False, False, True, True]

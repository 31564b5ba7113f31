"""The adaptive controller where a step has several rounds: what keeps it from them, and what is counted in rounds."""

from __future__ import annotations

from tests.fakes.simulated import Simulation, World

from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.choice import Drafter
from draftwise.types import Speculation

MOST = 8
LOOK_UP = Speculation(method="look-up", num_speculative_tokens=4)


def hopeless() -> World:
    """Nothing is accepted."""
    return World(
        lambda requests, rows: 0.3 + 0.1 * rows,
        lambda method, requests, nodes: 0.1 * nodes,
        lambda rid, method, position, time: 0.0,
    )


def drafter_of(controller: AdaptiveController, rid: int) -> Drafter:
    drafter = controller._drafters[rid]
    assert drafter is not None
    return drafter


def planned(controller: AdaptiveController, waiting: int = 0) -> tuple[int, list[int]]:
    """The next step of one request: its rounds, and what it drafts."""
    controller.begin(1)
    _, budgets = controller.wishes([1], [LOOK_UP], [waiting], 1)
    controller.grant([1], budgets)
    return controller.rounds([1], MOST)[0], budgets


def test_a_probe_waits_for_its_outcome() -> None:
    controller = AdaptiveController(evident=["look-up"])
    planned(controller)
    drafter = drafter_of(controller, 1)
    drafter.budget, drafter.probe, drafter.waiting = 0, 2, 0
    assert planned(controller) == (1, [2])
    assert planned(controller, waiting=2) == (1, [0])  # it is verified


def test_a_probe_that_may_not_be_drafted_keeps_nobody_from_rounds() -> None:
    """Suspended speculation drafts nothing: steps are those of plain decoding, with as many rounds."""
    controller = AdaptiveController(evident=["look-up"])
    planned(controller)
    drafter = drafter_of(controller, 1)
    drafter.budget, drafter.probe, drafter.waiting = 0, 2, 0
    controller._ledger.balance, controller._ledger.suspended = -4.0, True
    assert planned(controller) == (MOST, [0])


def test_a_choice_that_nobody_drafts_stands_for_rounds() -> None:
    """Not for steps: of eight rounds each, 128 of them would be a thousand tokens of every request."""
    controller = AdaptiveController()
    simulation = Simulation(hopeless(), controller)
    simulation.add(1, method="model", k=4)
    simulation.run(200)
    decisions = controller._decisions
    assert [group.cap for group in controller._groups] == [0]
    for rounds, steps in ((1.0, 128), (4.0, 32), (64.0, 16)):  # not more often than where somebody drafts
        decisions.rounds = rounds
        decisions.decide(controller._step)
        assert decisions.next_step - controller._step == steps
    waits = []
    for rounds in (1.0, 8.0):
        controller._explorer.rounds = rounds
        waits.append(controller._explorer._steps(256))
    assert waits == [256, 32]

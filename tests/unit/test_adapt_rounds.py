"""The adaptive controller where a step has several rounds: what keeps it from them, and what is counted in rounds."""

from __future__ import annotations

import pytest
from tests.fakes.simulated import Simulation, World

from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.choice import Drafter, Prices
from draftwise.adapt.controller import StepShape
from draftwise.adapt.explore import Explorer
from draftwise.adapt.performance import PerformanceModel
from draftwise.adapt.roster import Planned
from draftwise.types import RowResult, Speculation, StepResult

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


def row(drafted: int = 0, accepted: int = 0, proposed: int = 0) -> RowResult:
    """What came of the request in a round, where drafts are a chain."""
    tokens, drafts = tuple(range(accepted + 1)), tuple(range(drafted))
    parents = tuple(range(-1, drafted - 1))
    return RowResult(1, tokens, drafted, accepted, (), drafts, parents, num_proposed=proposed)


@pytest.mark.parametrize("evident", [True, False])
def test_a_probe_drafts_once(evident: bool) -> None:
    """A look-up behind the first round of a step, whose second one verifies it; another in a step of one round."""
    controller = AdaptiveController(evident=["look-up"] if evident else [])
    planned(controller)
    drafter = drafter_of(controller, 1)
    drafter.budget, drafter.probe, drafter.waiting = 0, 2, 0
    assert planned(controller) == (MOST if evident else 1, [2])
    assert planned(controller, waiting=2) == (MOST, [0])  # it is verified


def test_what_came_of_a_probe_is_seen_in_the_rounds_behind_it() -> None:
    """They drafted nothing, and are no proposals that found nothing."""
    controller = AdaptiveController(evident=["look-up"])
    planned(controller)
    drafter = drafter_of(controller, 1)
    drafter.budget, drafter.probe, drafter.waiting = 0, 2, 0
    controller.begin(1)
    _, budgets = controller.wishes([1], [LOOK_UP], [0], 1)
    controller.grant([1], budgets)
    rounds, cuts = controller.rounds([1], MOST)
    assert rounds == MOST and cuts is not None and list(cuts.once) == [1]
    sizes = dict(drafter.group.acceptance.sizes)
    asked, verified, plain = row(proposed=2), row(drafted=2, accepted=0), row()
    controller.observe(StepResult(0, [plain], earlier=([asked], [verified])), StepShape(1, 1, 0, 100), 0.004)
    assert (drafter.probe, drafter.streak, drafter.waiting) == (0, 0, 0)
    after = drafter.group.acceptance.sizes
    assert 0 not in after and sum(n for n, _ in after.values()) == 1 + sum(n for n, _ in sizes.values())


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
    for rounds, steps in ((1.0, 128), (4.0, 32), (64.0, 8)):  # not more often than where somebody drafts
        decisions.rounds = rounds
        decisions.decide(controller._step)
        assert decisions.next_step - controller._step == steps
    waits = []
    for rounds in (1.0, 8.0):
        controller._explorer.rounds = rounds
        waits.append(controller._explorer._steps(256))
    assert waits == [256, 32]


@pytest.mark.parametrize(
    ("seconds", "rounds", "steps"), [(0.025, 1.0, 16), (0.01, 10.0, 2), (0.005, 40.0, 1)]
)
def test_a_choice_stands_for_a_time_where_steps_are_long(seconds: float, rounds: float, steps: int) -> None:
    """0.2 seconds, but for 16 rounds: with 40 rounds of 5 ms sixteen steps would be more than three seconds."""
    world = World(
        lambda requests, rows: 1000 * seconds * (1 + 0.01 * rows),
        lambda method, requests, nodes: 0.1 * nodes,
        lambda rid, method, position, time: 0.9,
    )
    controller = AdaptiveController()
    simulation = Simulation(world, controller)
    simulation.add(1, method="model", k=4)
    simulation.run(200)
    decisions = controller._decisions
    assert all(group.cap for group in controller._groups)
    decisions.rounds = rounds
    decisions.decide(controller._step)
    assert decisions.next_step - controller._step == steps
    assert decisions.stride == (3 if steps == 16 else 1)


def test_steps_are_long_once_control_has_learned() -> None:
    """Not while a choice rests on guesses, nor on trial."""
    controller = AdaptiveController()
    assert controller.settled, "nobody drafts"
    simulation = Simulation(hopeless(), controller)
    simulation.add(1, method="model", k=4)
    settled = []
    for _ in range(100):
        simulation.run(1)
        settled.append(controller.settled)
    assert not any(settled[: controller.settings.warm_steps]) and settled[-1]
    drafter = drafter_of(controller, next(iter(controller._drafters)))
    drafter.group.cap, drafter.group.num_rounds, drafter.group.num_drafts = None, 0, 0  # as if it were new
    controller._decisions.decide(controller._step)
    assert not controller.settled
    controller._ledger.suspended = True
    assert controller.settled, "nothing is drafted, whatever is chosen"


def test_a_plain_step_to_learn_from_has_as_many_rounds_as_others() -> None:
    """Behind one that verifies what waits. The first round of a step meets cold caches: a plain step of one round took
    twice what a round of plain decoding takes, and a draft model was kept at 0.9 of its speed."""
    controller = AdaptiveController(evident=["look-up"])
    planned(controller)
    explorer = controller._explorer
    for usual, rounds in ((1.0, 1), (4.0, MOST)):
        explorer.rounds, explorer._pause_until = usual, controller._step + 3
        drafter_of(controller, 1).waiting = 4
        assert planned(controller, waiting=4) == (1, [0])
        drafter_of(controller, 1).waiting = 0
        assert planned(controller) == (rounds, [0])


def test_a_pause_is_no_longer_than_can_be_paid() -> None:
    """Where 32 rounds are usual, a plain step of so many costs more than may ever be saved up, and what is believed of
    plain decoding would never be looked at again."""
    controller = AdaptiveController(evident=["look-up"])
    planned(controller)
    explorer = controller._explorer
    explorer.rounds, explorer._pause_until = 32.0, controller._step + 3
    drafter_of(controller, 1).waiting = 0
    controller.begin(1)
    controller.wishes([1], [LOOK_UP], [0], 1)
    assert controller.rounds([1], 32)[0] == 8
    prices = Prices(1, 100, False, 0.001, 500, False)
    for _ in range(9):
        controller.model.observe_target(StepShape(1, 1, 0, 100), 0.001)
    explorer._funds = explorer._most_steps * prices.plain
    explorer.saw_plain(1)
    explorer.begin(5000)
    explorer.look(prices, 2.0, True, list)
    assert explorer.pausing


@pytest.mark.parametrize(
    ("rounds", "seconds", "of_one"), [(1, 0.7, 0.475), (2, 1.1, 0.475), (4, 1.9, 0.475), (4, 1.6, 0.4)]
)
def test_what_rounds_share_is_shared_by_as_many_as_there_may_be(
    rounds: int, seconds: float, of_one: float
) -> None:
    """0.3 ms of planning, and 0.4 for each round; the last: nobody said what the rounds took."""
    controller = AdaptiveController()
    times = controller._rounds
    times._several = True
    took = 0.0 if rounds == 4 and seconds == 1.6 else 0.4 * rounds
    result = StepResult(0, [], earlier=([],) * (rounds - 1), forward_time=took)
    assert times.of_one(result, Planned(5, most_rounds=4), seconds) == pytest.approx(of_one)


def test_a_pause_lasts_two_steps_where_steps_have_several_rounds() -> None:
    explorer = Explorer(PerformanceModel(), 0.004, 24.0)
    prices = Prices(1, 100, False, 0.001, 5, False)
    for usual, last in ((1.0, 5), (4.0, 6)):
        explorer.rounds = usual
        explorer.begin(5)
        explorer.look(prices, 1.5, False, list)
        assert explorer.pausing
        explorer.begin(6)
        assert explorer.pausing == (last == 6)
        explorer._pause_until = 0


@pytest.mark.parametrize("usual", [1.0, 4.0, 8.0, 64.0])
def test_pauses_for_the_first_samples_leave_room_for_decisions(usual: float) -> None:
    """With eight rounds in a step, every step was one to learn from, for ever: each put off the decision that would
    have seen that enough was learned. Greedy requests behind sampled ones ran at half their speed."""
    explorer = Explorer(PerformanceModel(), 0.004, 24.0)
    explorer.rounds = usual
    pausing = []
    for step in range(5, 65):
        prices = Prices(1, 100, False, 0.001, step, False)
        explorer.earn(0.01, prices)
        explorer.begin(step)
        if explorer.is_due():
            explorer.look(prices, 1.5, False, list)
        pausing.append(explorer.pausing)
        if pausing[-2:] == [True, True] or (usual == 1.0 and explorer.pausing):
            explorer.saw_plain(1)
    assert 5 <= sum(pausing) <= 25


@pytest.mark.parametrize("usual, seconds", [(1.0, 0.005), (4.0, 0.002)])
def test_a_step_of_one_round_says_little_where_steps_have_several(usual: float, seconds: float) -> None:
    """A request's first step has one round, behind its prompt, and so has a model's probe."""
    controller = AdaptiveController()
    planned(controller)
    for _ in range(3):
        controller.model.observe_target(StepShape(1, 1, 0, 100), 0.002)
    for _ in range(9):
        controller.begin(1)
        controller._explorer.rounds = usual
        controller.observe(StepResult(0, [], forward_time=0.005), StepShape(1, 1, 0, 100), 0.005)
    assert controller.model.target_time(1, 1, 100) == pytest.approx(seconds, rel=0.1)


def test_plain_rounds_behind_drafts_are_those_of_warm_caches() -> None:
    """Eight of 0.8 ms but for the first ones; planning and cold caches, 1.9 ms, count as for one of 32."""
    times = AdaptiveController()._rounds
    times._several = True
    step = Planned(5, most_rounds=8, usual_rounds=32)
    result = StepResult(0, [], earlier=([],) * 7, forward_time=7.7, steady_round_time=0.8)
    of_one = times.of_one(result, step, 0.8 * 8 + 1.9, plain=True)
    assert of_one == pytest.approx(0.8 + 1.9 / 32) and times.samples(result) == 3
    assert times.of_one(result, step, 8.3) == pytest.approx(8.3 / 8)  # with drafts: what it took
    few = StepResult(0, [], earlier=([],), forward_time=1.6, steady_round_time=0.8)
    assert times.samples(few) == 1


def test_one_plain_step_of_several_rounds_is_enough_to_know_what_they_take() -> None:
    controller = AdaptiveController()
    planned(controller)
    controller._rounds._several = True
    controller.begin(1)
    rows = [row() for _ in range(8)]
    result = StepResult(
        0, rows[:1], earlier=tuple([r] for r in rows[1:]), forward_time=0.01, steady_round_time=0.001
    )
    controller.observe(result, StepShape(1, 1, 0, 100), 0.01)
    assert controller.model.times_measured(1, 1, 100) == 3
    assert controller.model.target_time(1, 1, 100) == pytest.approx(0.00125)


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_trial_is_counted_in_rounds(rounds: int) -> None:
    """24 with drafts, and then times decide: a step of several says as much as several."""
    controller = AdaptiveController()
    shares = []
    for _ in range(100):
        _, (budget,) = planned(controller, waiting=4 if shares else 0)
        group = drafter_of(controller, 1).group
        if group.cap is not None:
            break
        shares.append(rounds if budget else 0)
        drafted = 4 if budget else 0
        results = [[row(drafted=drafted, accepted=drafted // 2, proposed=drafted)] for _ in range(rounds)]
        controller.observe(
            StepResult(0, results[0], earlier=tuple(results[1:]), forward_time=0.001 * rounds),
            StepShape(1, 1 + drafted, 0, 100),
            (0.002 if drafted else 0.001) * rounds,
        )
    assert 24 <= sum(shares) < 32


@pytest.mark.parametrize("price", [0.0, 0.002])
def test_what_steps_cost_that_are_no_part_of_others_is_paid_for(price: float) -> None:
    """A pause takes two steps of one round more than its plain one, and a look deeper one, where others have many."""
    prices = Prices(1, 100, False, 0.001, 5, False)

    def explorer() -> Explorer:
        made = Explorer(PerformanceModel(), 0.004, 8.0)
        for _ in range(9):
            made._model.observe_target(StepShape(1, 1, 0, 100), 0.001)
        made.rounds, made.step_price = 8.0, price
        made.saw_plain(1)
        made.begin(5000)
        made._funds = 0.005  # half of eight rounds and one is 0.0045
        return made

    pause = explorer()
    pause.look(prices, 2.0, True, list)
    assert pause.pausing == (price == 0.0)
    controller = AdaptiveController()
    planned(controller)
    drafter = drafter_of(controller, 1)
    group = drafter.group
    group.cap, group.last_deep = 2, 0
    deep = explorer()
    deep._funds = 0.001
    deep._look_deeper(group, [drafter], prices)
    assert (deep.deep is group) == (price == 0.0)

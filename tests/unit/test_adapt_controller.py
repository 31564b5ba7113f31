"""The adaptive controller against scripted costs and acceptance: it finds what a calculation on paper finds, loses next
to nothing where nothing can be won, and comes back."""

from __future__ import annotations

import random

import pytest
from tests.fakes.simulated import Simulation, Step, World, rate

from draftwise.adapt.acceptance import GroupAcceptance
from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.choice import Drafter, Group, Prices, best_cut, caps, choose
from draftwise.adapt.controller import Controller, StaticController, StepShape
from draftwise.adapt.performance import PerformanceModel
from draftwise.adapt.roster import MAX_GROUPS
from draftwise.types import Speculation

K = 4


def small_model(requests: int, rows: int) -> float:
    """Milliseconds: flat up to 8 rows, then arithmetic."""
    return 0.27 + 0.01 * requests + 0.012 * rows + 0.05 * max(0, rows - 8)


def draft_pass(method: str, requests: int, nodes: int) -> float:
    """Milliseconds: one pass per node."""
    return nodes * (0.09 + 0.01 * requests)


def cheap_pass(method: str, requests: int, nodes: int) -> float:
    return draft_pass(method, requests, nodes) / 4


def world(accept: float, **more: object) -> World:
    return World(small_model, draft_pass, lambda rid, method, position, time: accept, **more)  # type: ignore[arg-type]


def rate_of(w: World, controller: Controller, n: int, steps: int, method: str = "model", k: int = K) -> float:
    """Tokens per second of n requests, from the first decoding step on."""
    simulation = Simulation(w, controller)
    simulation.add(n, method=method, k=k)
    simulation.run(1)
    return rate(simulation.run(steps))


def on_paper(accept: float, n: int, k: int) -> float:
    """Tokens per millisecond when each of n requests drafts k tokens every step."""
    tokens = sum(accept**i for i in range(k + 1))
    return n * tokens / (small_model(n, n * (1 + k)) + (draft_pass("", n, k) if k else 0))


def common_budget(steps: list[Step]) -> int:
    """The draft length that was used most often."""
    budgets = [b for step in steps for b in step.budgets.values()]
    return max(set(budgets), key=budgets.count)


# ------------------------------------------------------------------------------------------------ the choice


def test_best_cut() -> None:
    curve = [0.0, 0.8, 1.4, 1.6]
    assert [best_cut(curve, 3, price) for price in (0.0, 0.3, 0.7, 0.9)] == [3, 2, 1, 0]
    assert best_cut(curve, 1, 0.0) == 1
    assert best_cut(curve, 10, 0.0) == 10  # more than the curve knows
    assert best_cut([0.0, 0.1, 0.9], 2, 0.4) == 2  # a tree: its second node is the good one


def test_caps() -> None:
    assert caps(1) == [1]
    assert caps(4) == [1, 2, 3, 4]
    assert caps(13) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13]


@pytest.mark.parametrize("accept", [0.05, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("n", [1, 4, 16])
def test_the_choice_is_the_best_by_the_model(accept: float, n: int) -> None:
    model = PerformanceModel()
    for k in range(K + 1):
        for _ in range(5):
            shape = StepShape(requests=n, rows=n * (1 + k))
            model.observe_target(shape, small_model(n, n * (1 + k)) / 1000)
            if k:
                model.observe_draft("model", n, k, 0, False, draft_pass("", n, k) / 1000)
    group = Group("model", "greedy", False, GroupAcceptance())
    rng = random.Random(3)
    for _ in range(2000):
        hits = next((i for i in range(K) if rng.random() >= accept), K)
        group.acceptance.counts.add_chain(0, K, hits)
        group.acceptance.rates(0, K)
    members = [Drafter(group, K, K, K) for _ in range(n)]
    prices = Prices(n, 0, False, small_model(n, n) / 1000)
    (option,), promised = choose([(group, members)], prices, model)
    rates = [on_paper(accept, n, k) for k in range(K + 1)]
    assert rates[option.cap] > 0.95 * max(rates)
    assert promised / 1000 == pytest.approx(max(rates), rel=0.1)


# ------------------------------------------------------------------------------------------ best, and soon


@pytest.mark.parametrize(
    ("accept", "n"), [(0.8, 1), (0.95, 1), (0.8, 4), (0.95, 4), (0.3, 1), (0.6, 8), (0.8, 64)]
)
def test_it_finds_the_best_length_in_tens_of_steps(accept: float, n: int) -> None:
    simulation = Simulation(world(accept), AdaptiveController())
    simulation.add(n, k=K)
    simulation.run(60)
    found = common_budget(simulation.run(60))
    rates = [on_paper(accept, n, k) for k in range(K + 1)]
    assert rates[found] > 0.95 * max(rates), f"{found} of {[round(r, 2) for r in rates]}"


@pytest.mark.parametrize(
    ("accept", "n"),
    [  # every chance and every number; --all: together
        pytest.param(a, n, marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, a in enumerate((0.0, 0.3, 0.6, 0.8, 0.95))
        for j, n in enumerate((1, 4, 16, 64))
        if n < 64 or a in (0.0, 0.95)
    ],
)
def test_it_is_never_much_slower_than_the_better_of_plain_and_static(accept: float, n: int) -> None:
    adaptive = rate_of(world(accept), AdaptiveController(), n, 1500 if n < 64 else 500)
    assert adaptive > 0.98 * 1000 * max(on_paper(accept, n, 0), on_paper(accept, n, K))


def test_static_control_is_as_fast_as_on_paper() -> None:
    """What adaptive control is compared with. Drafts of 16 requests in 300 steps: means within 1 %."""
    plain = rate_of(world(0.8), StaticController(), 16, 20, "none", 0)
    assert plain == pytest.approx(1000 * on_paper(0.8, 16, 0))
    static = rate_of(world(0.8), StaticController(), 16, 300)
    assert static == pytest.approx(1000 * on_paper(0.8, 16, K), rel=0.03)


@pytest.mark.parametrize("n", [1, 8])
def test_nothing_accepted_on_a_noisy_machine_costs_two_percent_at_most(n: int) -> None:
    def noise(rng: random.Random) -> float:
        return 1 + 0.2 * rng.random() + (2.0 if rng.random() < 0.05 else 0.0)

    simulation = Simulation(world(0.0, noise=noise), AdaptiveController())
    simulation.add(n)
    simulation.run(100)
    lost = total = 0.0
    for step in simulation.run(3000):  # what the steps would have taken without the noise
        drafted = {b for b in step.budgets.values() if b}
        asked = sum(1 for b in step.budgets.values() if b)
        seconds = small_model(n, step.rows) + (draft_pass("", asked, max(drafted)) if drafted else 0.0)
        total += seconds
        lost += seconds - small_model(n, n)
    assert lost < 0.02 * total


def test_size_tells_a_good_match_from_a_bad_one() -> None:
    """Long proposals are accepted, short ones never; a row more costs as much as a tenth of a token."""

    def chance(rid: int, method: str, position: int, time: float) -> float:
        return long_match[0]

    long_match = [0.0]

    def sizes(method: str, rng: random.Random) -> int:
        size = rng.choice([2, 2, 2, 12])
        long_match[0] = 0.95 if size == 12 else 0.0
        return size

    w = World(lambda n, rows: 1.0 + 0.1 * rows, lambda method, n, k: 0.002, chance, sizes)
    controller = AdaptiveController(evident={"match"})
    simulation = Simulation(w, controller)
    simulation.add(1, method="match", k=16)
    simulation.run(300)
    rows = [step.rows for step in simulation.run(200)]
    assert set(rows) & {13} and rows.count(13) > 20, "long ones are verified"
    assert rows.count(3) < 10, "short ones are not"
    blind = Simulation(w, AdaptiveController())
    blind.add(1, method="match", k=16)
    blind.run(300)
    assert rate(simulation.run(1000)) > rate(blind.run(1000))


# ----------------------------------------------------------------------------------------------- not drafting


def test_not_drafting_costs_no_drafting() -> None:
    simulation = Simulation(world(0.0), AdaptiveController())
    simulation.add(4)
    simulation.run(100)
    steps = simulation.run(400)
    plain = small_model(4, 4) / 1000
    idle = [s for s in steps if not any(s.budgets.values()) and s.rows == s.requests]
    assert len(idle) > 0.95 * len(steps)
    assert all(s.seconds == pytest.approx(plain) for s in idle)


def test_it_comes_back_when_the_text_becomes_predictable() -> None:
    better = [False]
    w = World(small_model, draft_pass, lambda rid, method, position, time: 0.95 if better[0] else 0.0)
    simulation = Simulation(w, AdaptiveController())
    simulation.add(1)
    simulation.run(2000)
    assert common_budget(simulation.run(200)) == 0
    better[0] = True
    simulation.run(500)
    assert common_budget(simulation.run(100)) >= 3
    better[0] = False
    simulation.run(100)
    assert common_budget(simulation.run(100)) == 0


def test_a_new_request_gets_its_chance() -> None:
    """The first is unpredictable for ever, the second is not: what is known of the first must not bury it."""
    w = World(small_model, draft_pass, lambda rid, method, position, time: 0.95 if rid else 0.0)
    simulation = Simulation(w, AdaptiveController())
    simulation.add(1)
    simulation.run(3000)
    simulation.cancel([0])
    simulation.add(1)
    simulation.run(600)
    assert common_budget(simulation.run(100)) >= 3


def test_among_others_only_the_predictable_draft() -> None:
    w = World(small_model, cheap_pass, lambda rid, method, position, time: 0.95 if rid < 2 else 0.02)
    simulation = Simulation(w, AdaptiveController())
    simulation.add(4)
    simulation.run(200)
    steps = simulation.run(200)
    drafting = {rid: sum(bool(s.budgets[rid]) for s in steps) for rid in range(4)}
    assert min(drafting[0], drafting[1]) > 180
    assert max(drafting[2], drafting[3]) < 40


def test_from_one_request_to_many_and_back() -> None:
    simulation = Simulation(world(0.95), AdaptiveController())
    simulation.add(1)
    simulation.run(100)
    assert common_budget(simulation.run(50)) >= 3
    many = simulation.add(63)
    simulation.run(80)
    assert common_budget(simulation.run(50)) == 0  # on paper: drafting loses at 64
    assert max(on_paper(0.95, 64, k) for k in range(1, K + 1)) < on_paper(0.95, 64, 0)
    simulation.cancel(many)
    simulation.run(80)
    assert common_budget(simulation.run(50)) >= 3


@pytest.mark.parametrize(("accept", "alone", "more"), [(0.95, 4, 2), (0.95, 12, 0), (0.0, 12, 0)])
def test_steps_that_all_have_prompts_in_them(accept: float, alone: int, more: int) -> None:
    """The time of a prompt hides what the rest of a step takes: what drafts bring is booked beside what they take, and
    plain steps that cannot be measured are not made again and again."""
    flat = World(lambda n, rows: 4 + 0.02 * rows, draft_pass, lambda *_: accept, prompt=0.1)
    controller = AdaptiveController()
    simulation = Simulation(flat, controller)
    simulation.add(alone)
    simulation.run(100)
    simulation.add(more)  # a size that never decodes alone
    pauses, drafting = controller.stats().pauses, 0
    for _ in range(600):
        simulation.add(1, tokens=1, method="none")
        drafting += sum(map(bool, simulation.step().budgets.values())) >= alone
    simulation.run(1)
    assert drafting > 560 if accept else drafting < 30
    assert controller.stats().pauses - pauses < 12


def test_methods_in_one_batch_are_judged_apart() -> None:
    def chance(rid: int, method: str, position: int, time: float) -> float:
        return 0.95 if method == "good" else 0.02

    simulation = Simulation(World(small_model, cheap_pass, chance), AdaptiveController())
    good = simulation.add(2, method="good")
    bad = simulation.add(2, method="bad")
    plain = simulation.add(1, method="none")
    simulation.run(300)
    steps = simulation.run(300)
    mean = [sum(s.budgets[r] for s in steps) / len(steps) for r in (good[0], bad[0], plain[0])]
    assert mean[0] > 1.5 and mean[1] < 0.2 and mean[2] == 0
    stats = simulation.controller.stats()
    assert {g.method: bool(g.num_drafting) for g in stats.groups} == {"good": True, "bad": False}
    found = next(g for g in stats.groups if g.method == "good")
    assert found.gain is not None and found.gain > 1.1 and found.accepted is not None


# ------------------------------------------------------------------------------------------------- limits


def test_tables_and_requests_set_the_upper_limit() -> None:
    controller = AdaptiveController({"model": ((1, 2, 2), (3, 64, 0))})
    simulation = Simulation(world(0.99), controller)
    simulation.add(1)
    steps = simulation.run(200)
    assert max(b for s in steps for b in s.budgets.values()) == 2
    simulation.add(3)
    simulation.run(2)
    steps = simulation.run(200)
    assert max(b for s in steps for b in s.budgets.values()) == 0
    one = Simulation(world(0.99), AdaptiveController())
    one.add(1, k=1)
    assert max(b for s in one.run(100) for b in s.budgets.values()) == 1


def test_a_request_without_speculation_gets_none() -> None:
    controller = AdaptiveController()
    controller.begin(1)
    assert controller.draft_budget(0, Speculation("none", 0, "greedy"), 1) == 0
    assert controller.nodes_to_verify(0, 3) == 3
    assert controller.stats().groups == ()


def test_nothing_is_kept_of_requests_that_ended() -> None:
    controller = AdaptiveController()
    simulation = Simulation(world(0.5), controller)
    for _ in range(30):
        simulation.add(3, tokens=5)
        while simulation.core.has_work:
            simulation.step()
    simulation.add(1)
    simulation.run(2)
    assert len(controller._drafters) == 1


def test_learning_is_the_same_for_the_same_times() -> None:
    def run() -> list[dict[int, int]]:
        simulation = Simulation(world(0.6), AdaptiveController())
        simulation.add(3)
        return [s.budgets for s in simulation.run(300)]

    assert run() == run()


def test_a_few_slow_steps_do_not_end_what_was_asked_for() -> None:
    """A short answer on a busy machine: the first steps' times say nothing, so it drafts as it would under static
    control; unless next to nothing is accepted."""

    def noise(rng: random.Random) -> float:
        return rng.choice([1.0, 3.0, 30.0])

    def drafted(accept: float) -> int:
        w = World(small_model, draft_pass, lambda rid, method, position, time: accept, noise=noise)
        simulation = Simulation(w, AdaptiveController())
        simulation.add(1, k=K)
        return sum(any(step.budgets.values()) for step in simulation.run(20))

    assert drafted(0.9) >= 18  # all but the prompt's step and one that measures plain decoding
    assert drafted(0.0) <= 14


def test_static_control_does_as_it_is_told() -> None:
    controller = StaticController({"model": ((2, 3, 1),)})
    speculation = Speculation("model", 4, "greedy")
    assert [controller.draft_budget(0, speculation, n) for n in (1, 2, 3, 4)] == [4, 1, 1, 4]
    assert controller.nodes_to_verify(0, 4) == 4
    assert controller.stats().mode == "static"


@pytest.mark.parametrize("evident", [False, True])
def test_a_machine_that_was_busy_at_the_start_is_not_held_against_drafting(evident: bool) -> None:
    """The first steps take up to thirty times as long, by chance: what was learned from them passes."""
    count = [0]

    def noise(rng: random.Random) -> float:
        count[0] += 1
        return rng.choice([1.0, 3.0, 30.0]) if count[0] < 40 else 1.0

    def sizes(method: str, rng: random.Random) -> int | None:
        return rng.randint(0, 12) if evident else None

    w = World(small_model, cheap_pass, lambda rid, method, position, time: 0.95, sizes, noise)
    simulation = Simulation(w, AdaptiveController(evident={"model"} if evident else ()))
    simulation.add(1, k=12 if evident else 4)
    simulation.run(1400)
    steps = simulation.run(300)
    assert common_budget(steps) >= 3
    assert sum(any(s.budgets.values()) for s in steps) > 280


def test_kinds_of_trees_that_requests_make_up_are_bounded() -> None:
    """Requests may bring as many trees as they like, one after the other or at once."""

    def tree(i: int) -> Speculation:
        return Speculation(
            "model", 12, "greedy", tuple(-1 if i >> b & 1 else b - 1 for b in range(12)), (0,) * 12
        )

    controller = AdaptiveController()
    for rid in range(3000):
        controller.begin(1)
        controller.admit(rid, tree(rid), 8, 100)
        assert controller.draft_budget(rid, tree(rid), 1) > 0
        controller.forget(rid)
    assert len(controller._groups) == MAX_GROUPS
    for rid in range(3000, 4000):
        controller.admit(rid, tree(rid), 8, 100)
    assert len(controller._groups) <= MAX_GROUPS + 2
    kinds = {id(drafter.group) for drafter in controller._drafters.values() if drafter is not None}
    assert kinds <= {id(group) for group in controller._groups}, "a request's group was dropped"


def test_what_drafters_read_is_weighed_against_the_batch_that_reads() -> None:
    """A batch of 64 comes when one request was left: 10 ms of reading are one of its plain steps, not ten of those."""
    controller = AdaptiveController()
    for requests, seconds in ((1, 0.001), (64, 0.010)):
        for _ in range(9):
            shape = StepShape(requests=requests, rows=requests, context=100 * requests)
            controller.model.observe_target(shape, seconds)
    controller._decisions.prices = Prices(1, 100, False, 0.001)
    controller._decisions.plain_known = True
    for batch, lost in ((64, 1.0), (1, 10.0), (0, 10.0)):  # 0: all have ended
        controller._roster.batch, controller._ledger.balance = batch, 6.0
        controller._book_beside(0.010)
        assert controller._ledger.balance == pytest.approx(max(6.0 - lost, -4.0), abs=0.3)


@pytest.mark.parametrize("suspended", [True, False])
def test_what_others_lost_does_not_keep_a_new_group_from_its_trial(suspended: bool) -> None:
    """Greedy requests behind sampled ones whose drafts did not pay: some engines decoded plainly for twenty requests,
    at half the speed."""
    world = World(
        lambda requests, rows: 1.0 + 0.02 * rows,
        lambda method, requests, nodes: 0.02 * nodes,
        lambda rid, method, position, time: 0.9 if method == "good" else 0.0,
    )
    controller = AdaptiveController()
    simulation = Simulation(world, controller)
    simulation.add(1, method="bad", k=4)
    simulation.run(100)
    controller._ledger.balance, controller._ledger.suspended = (-4.0, True) if suspended else (10.0, False)
    simulation.add(2, method="good", k=4)
    asked = [step.budgets.get(2, 0) for step in simulation.run(20)]
    assert sum(nodes > 0 for nodes in asked) >= 18

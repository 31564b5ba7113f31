"""Accepted drafts are worth more to the request that ends last, where all wait for it (`Endings`)."""

from __future__ import annotations

import asyncio

import pytest
from tests.fakes.simulated import Simulation, Step, World

from draftwise import LLM, AsyncLLM
from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.choice import Drafter, Group, Prices
from draftwise.adapt.endings import Endings
from draftwise.adapt.performance import PerformanceModel

BASE, EACH = 3.0, 0.4
"""Milliseconds of a plain step, and of each of its requests."""


def members(*remaining: int) -> list[Drafter]:
    group = Group("model", "greedy", evident=False)
    return [Drafter(group, 4, 4, 4, remaining=left) for left in remaining]


def worths(
    endings: Endings, drafters: list[Drafter], *, closed: bool = True, requests: int = 0
) -> list[float]:
    n = requests or len(drafters)
    model = PerformanceModel()
    for size in (n // 2, n):
        for _ in range(3):
            model.teach_target(size, size, 0, (BASE + EACH * size) / 1000)
    prices = Prices(n, 0, False, (BASE + EACH * n) / 1000)
    endings.weigh(drafters, prices, model, closed=closed)
    return [drafter.worth for drafter in drafters]


def taught(*remaining: int) -> Endings:
    """Hundreds of requests have ended with so many tokens left."""
    endings = Endings()
    for left in remaining * 300:
        endings.ended(members(left)[0])
    return endings


def test_who_surely_ends_last_is_worth_a_whole_step_and_the_others_their_own_part() -> None:
    found = worths(taught(0), members(*[10] * 15, 500))
    average = EACH + BASE / 16
    assert found[:15] == pytest.approx([EACH / average] * 15, rel=0.02)
    assert found[15] == pytest.approx((EACH + BASE) / average, rel=0.02)


def test_equal_requests_are_worth_the_average() -> None:
    assert worths(taught(0), members(*[100] * 16)) == pytest.approx([1.0] * 16, rel=1e-6)


def test_all_together_are_worth_as_much_as_without_weights() -> None:
    assert sum(worths(taught(0), members(3, 80, 81, 100))) == pytest.approx(4.0)
    assert sum(worths(Endings(), members(3, 80, 81, 100))) == pytest.approx(4.0)


def test_tokens_left_say_nothing_where_requests_end_by_a_stop_token() -> None:
    assert worths(taught(400), members(*[10] * 3, 500)) == pytest.approx([1.0] * 4, rel=0.1)


def test_where_others_may_come_all_are_worth_the_same() -> None:
    assert worths(taught(0), members(*[10] * 3, 500), closed=False) == [1.0] * 4


def test_a_request_alone_is_worth_what_it_is() -> None:
    assert worths(taught(0), members(500), requests=1) == [1.0]


def test_one_that_decodes_plainly_may_be_the_last_one_too() -> None:
    """Of 16 requests four may draft: the chance that one of these is the last one is a quarter."""
    found = worths(taught(0), members(10, 10, 10, 500), requests=16)
    assert found[3] == pytest.approx((EACH + BASE / 4) / (EACH + BASE / 16), rel=0.02)


def target(requests: int, rows: int) -> float:
    """Milliseconds. A step that only one more request needs costs 3.4 of them, and a token in it 0.4 at most."""
    return 3.0 + 0.2 * requests + 0.2 * rows


def run_batches(*, closed: bool, seed: int) -> float:
    """How much longer plain decoding of twelve batches of four requests takes, without the first two. One request of
    each batch says what its drafter guesses, the others hardly ever."""
    world = World(
        target,
        lambda method, requests, nodes: nodes * (0.15 + 0.02 * requests),
        lambda rid, method, position, time: 0.6 if rid % 4 == 0 else 0.05,
        prompt=0.05,
    )
    simulation = Simulation(world, AdaptiveController(), seed=seed)
    simulation.core.scheduler.closed = closed
    steps: list[Step] = []
    for batch in range(12):
        if batch == 2:
            steps.clear()
        before = len(simulation.executor.steps)
        simulation.add(4, tokens=128, rule="coupled")
        while simulation.core.has_work:
            simulation.core.step()
        steps += simulation.executor.steps[before:]
    plain = 10 * (0.05 * 8 * 4 + 127 * target(4, 4)) / 1000
    return plain / sum(step.clean for step in steps)


def test_a_batch_does_not_lose_by_hurrying_those_who_are_ahead() -> None:
    hurried = [run_batches(closed=False, seed=seed) for seed in range(3)]
    weighed = [run_batches(closed=True, seed=seed) for seed in range(3)]
    assert max(hurried) < 0.97, "what is gained by one that ends early anyway is no gain: the control"
    assert min(weighed) > 0.975


@pytest.mark.parametrize(("places", "closed"), [(4, True), (3, False)])
def test_a_batch_is_closed_once_all_have_a_place(places: int, closed: bool) -> None:
    world = World(target, lambda method, requests, nodes: 0.1, lambda *_: 0.5)
    controller = AdaptiveController()
    simulation = Simulation(world, controller, max_num_seqs=places)
    simulation.add(4, tokens=8)
    simulation.run(2)
    assert not controller.closed, "others may come"
    simulation.core.scheduler.closed = True
    simulation.run(1)
    assert controller.closed == closed
    while simulation.core.has_work:
        simulation.core.step()
    assert controller.closed, "the last one has a place, too"


def test_a_call_of_llm_is_closed_and_a_server_is_not() -> None:
    with LLM() as llm:
        assert llm._engine.core.scheduler.closed

    async def serve() -> None:
        async with AsyncLLM() as server:
            assert not server._engine.core.scheduler.closed

    asyncio.run(serve())

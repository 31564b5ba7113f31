"""What the scheduler asks its controller, what it tells it, and what it does with the answers."""

from __future__ import annotations

import numpy as np
from tests.fakes.fake_executor import FakeExecutor

from draftwise.adapt.controller import StaticController
from draftwise.engine.core import EngineCore
from draftwise.kv.manager import KVManager
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.types import RowPlan, Speculation, StepPlan, StepResult


class Asked(StaticController):
    """Remembers what it is asked and told; lets ``most`` waiting nodes be verified."""

    def __init__(self, most: int = 63) -> None:
        super().__init__()
        self.most = most
        self.sizes: set[int] = set()
        self.granted_nodes: list[tuple[int, int]] = []

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        self.sizes.add(batch_size)
        return super().draft_budget(rid, speculation, batch_size)

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        return min(num_proposed, self.most)

    def granted(self, rid: int, nodes: int) -> None:
        self.granted_nodes.append((rid, nodes))


class Watched(FakeExecutor):
    """Proposes as many nodes as it may."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.random.randint = lambda low, high: high  # type: ignore[method-assign]
        self.plans: list[dict[int, RowPlan]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append({row.rid: row for row in plan.rows})
        return super().execute(plan)


def make(rows: int, controller: StaticController, *, seqs: int = 8) -> tuple[EngineCore, Watched]:
    executor = Watched(400, 4, 1, rows)
    scheduler = Scheduler(SchedulerConfig(seqs, rows), KVManager(400, 4), controller, lambda: 0.0)
    return EngineCore(scheduler, executor, lambda: 0.0), executor


def request(rid: int, prompt: int, tokens: int, k: int = 0) -> Request:
    return Request(
        rid,
        np.arange(prompt, dtype=np.int32) % 5,
        SamplingParams(temperature=0, max_tokens=tokens),
        Speculation("fake" if k else "none", k),
        max_total=prompt + tokens,
        seed=0,
        arrival_time=0.0,
    )


def run(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def test_no_more_is_verified_than_the_controller_says() -> None:
    core, executor = make(64, Asked(most=1))
    core.add(request(0, 5, 12, k=6))
    run(core)
    drafted = [(plan[0].num_draft, plan[0].draft_budget) for plan in executor.plans if 0 in plan]
    assert {verified for verified, _ in drafted} == {0, 1} and max(budget for _, budget in drafted) == 6


def test_the_controller_is_told_who_may_draft() -> None:
    controller = Asked()
    core, executor = make(64, controller)
    core.add(request(0, 5, 9, k=3))
    core.add(request(1, 5, 9))
    run(core)
    planned = [(rid, row.draft_budget) for plan in executor.plans for rid, row in plan.items()]
    wanted = [grant for grant in planned if grant[1]]
    assert len(wanted) < len(planned), "some step grants nothing"
    assert controller.granted_nodes == wanted


def test_the_batch_is_as_large_as_those_who_can_run() -> None:
    controller = Asked()
    core, _ = make(64, controller, seqs=4)
    for rid in range(3):
        core.add(request(rid, 5, 3, k=2))
    core.step()
    assert controller.sizes == {3}
    for rid in range(3, 9):
        core.add(request(rid, 5, 3, k=2))
    core.step()
    assert controller.sizes == {3, 4}
    run(core)


def test_the_last_two_tokens_of_a_prompt_are_one_chunk() -> None:
    core, executor = make(8, StaticController())
    core.add(request(0, 10, 2))
    run(core)
    assert [plan[0].num_new for plan in executor.plans if plan] == [8, 2, 1]


def test_a_prompt_leaves_a_wanted_draft_its_row() -> None:
    """One draft is wanted of 31 rows behind two roots: the prompt gets the 30 others."""
    core, executor = make(33, StaticController())
    core.add(request(0, 3, 60, k=1))
    core.step()
    core.add(request(1, 200, 2))
    core.step()
    core.step()
    plan = executor.plans[-1]
    assert plan[0].num_draft == 1 and plan[1].num_new == 31
    run(core)


def test_the_text_of_a_stop_token_is_shown_if_it_is_wanted() -> None:
    """Without stop strings the scheduler alone knows which token is the last to be shown."""
    for include in (False, True):
        ended = request(0, 3, 5)
        ended.params = SamplingParams(max_tokens=5, stop_token_ids=[4], include_stop_str_in_output=include)
        ended.stop_token_ids = frozenset({4})
        assert ended.append((1, 2)) == (2, None) and ended.num_shown == 2
        assert ended.append((4, 1)) == (1, "stop")
        ended.finish_reason = "stop"
        assert ended.num_output == 3 and ended.num_shown == 2 + include
    assert ended.num_computed == ended.num_cached == 0

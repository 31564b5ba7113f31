"""The scheduler case by case: who is admitted, who gets rows, who is told. The rest: `test_scheduler_property.py`."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from tests.fakes.fake_executor import FakeExecutor, LateExecutor, expected_output

from draftwise.adapt.controller import Controller, StaticController, StepShape
from draftwise.engine.core import EngineCore
from draftwise.errors import RequestError
from draftwise.kv.manager import KVManager
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.sched.shares import Shares, divide, draft_limit, kept_for_drafts
from draftwise.types import RowPlan, Speculation, StepPlan, StepResult


class Recorder(StaticController):
    """Drafts as asked; remembers what it was told, and the shape of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: list[int] = []
        self.grants: list[tuple[int, int]] = []
        self.shapes: list[StepShape] = []

    def admit(self, rid: int, speculation: Speculation, missing: int, remaining: int) -> None:
        self.admitted.append(rid)

    def granted(self, rid: int, nodes: int) -> None:
        self.grants.append((rid, nodes))

    def observe(self, result: StepResult, shape: StepShape, seconds: float | None) -> None:
        self.shapes.append(shape)


class PlanRecorder(FakeExecutor):
    def __init__(self, *args: int, ahead: bool) -> None:
        super().__init__(*args, ahead=ahead)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().execute(plan)


class Engine:
    """A scheduler with a fake executor behind it, which checks every slot and token."""

    def __init__(
        self,
        blocks: int,
        rows: int,
        *,
        seqs: int = 8,
        block_size: int = 4,
        chunks: bool = True,
        caching: bool = True,
        ahead: bool = False,
        controller: Controller | None = None,
        rounds: int = 1,
    ) -> None:
        self.time, self.tick = 0.0, 1.0 if rounds == 1 else 1e-4
        self.executor = PlanRecorder(blocks, block_size, 1, rows, ahead=ahead)
        self.kv = KVManager(blocks, block_size, caching)
        self.scheduler = Scheduler(
            SchedulerConfig(seqs, rows, chunks), self.kv, controller or StaticController(), self.clock, rounds
        )
        device = LateExecutor(self.executor) if ahead else self.executor
        self.core = EngineCore(self.scheduler, device, self.clock, ahead=ahead)
        self.requests: list[Request] = []

    def clock(self) -> float:
        self.time += self.tick
        return self.time

    def add(self, prompt: int | list[int], tokens: int, k: int = 0, **more: int) -> Request:
        """A request whose prompt has so many tokens, unlike others', or these."""
        rid = len(self.requests)
        ids = [(rid + i * (rid + 2)) % 5 for i in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request(
            rid,
            np.asarray(ids, np.int32),
            SamplingParams(temperature=0, max_tokens=tokens),
            Speculation("fake" if k else "none", k),
            max_total=len(ids) + tokens,
            seed=0,
            arrival_time=0.0,
            **more,
        )
        self.requests.append(request)
        self.core.add(request)
        return request

    def step(self) -> StepPlan:
        self.core.step()
        self.core.check_integrity()
        return self.executor.plans[-1]

    def run(self) -> int:
        """Steps until all requests are done; their outputs are what they should be."""
        steps = 0
        while self.core.has_work:
            self.step()
            steps += 1
            assert steps < 2000, "requests do not come to an end"
        assert self.kv.num_used == 0
        for request in self.requests:
            if request.finish_reason == "abort":
                continue
            prompt, output = request.tokens_np[: request.num_prompt].tolist(), request.output_ids()
            assert output == expected_output(prompt, request.max_total - request.num_prompt)
        return steps


def rows_of(plan: StepPlan) -> dict[int, RowPlan]:
    return {row.rid: row for row in plan.rows}


# -------------------------------------------------------------------------------------------------- admission


def test_whole_prompts_come_in_as_rows_become_free() -> None:
    """The rows of the first step refused them; blocks never did, so that none had to become free."""
    engine = Engine(blocks=200, rows=40, chunks=False, caching=False)
    for _ in range(6):
        engine.add(20, 50)
    assert engine.run() == 54  # two in the first step, one per step from then on: the last one in the fifth


def test_without_chunks_a_preempted_request_longer_than_a_step_is_computed_again() -> None:
    engine = Engine(blocks=12, rows=8, chunks=False, caching=False)
    for _ in range(3):
        engine.add(6, 20)
    engine.run()
    assert max(request.num_preemptions for request in engine.requests) >= 1


def test_without_chunks_a_prompt_is_never_cut() -> None:
    engine = Engine(blocks=60, rows=12, chunks=False)
    for prompt in (10, 5, 12, 1):
        engine.add(prompt, 6, k=4)
    with pytest.raises(RequestError, match="chunked prefill is off"):
        engine.add(13, 6)
    engine.requests.pop()
    engine.run()
    first = {row.rid: row.num_new for plan in reversed(engine.executor.plans) for row in plan.rows}
    assert first == {0: 10, 1: 5, 2: 12, 3: 1}


def test_samples_of_one_prompt_share_what_the_first_has_computed() -> None:
    """They did not fit beside it before its blocks could be found, and nothing was freed since."""
    engine = Engine(blocks=60, rows=2048, block_size=16)
    for _ in range(4):
        engine.add([i % 5 for i in range(600)], 20)
    assert engine.run() == 21
    assert engine.scheduler.num_preemptions == 0


def test_a_request_that_fits_only_without_drafting_runs_without() -> None:
    controller = Recorder()
    engine = Engine(blocks=4, rows=64, controller=controller)
    engine.add(13, 4, k=8)  # 16 slots: all four blocks
    assert rows_of(engine.step())[0] == RowPlan(0, 13, 0, 0, (0, 1, 2, 3))
    engine.run()
    # Lookahead finds room only within the last block: 16 - 14 slots behind the first root.
    assert all(nodes <= 2 for _, nodes in controller.grants)


def test_a_request_may_fill_the_cache_to_the_last_slot() -> None:
    engine = Engine(blocks=5, rows=64)
    engine.add(1, 20)  # the last token is never computed: 20 slots
    with pytest.raises(RequestError, match="needs up to 21 cache slots"):
        engine.add(1, 21)
    engine.requests.pop()
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_all_of_a_prompt_has_room_when_its_first_chunk_is_computed() -> None:
    """Two prompts that each fit, but not together, would preempt each other half-way."""
    engine = Engine(blocks=10, rows=8)
    engine.add(30, 4)
    engine.add(30, 4)
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_only_who_enters_is_told_to_the_controller() -> None:
    controller = Recorder()
    engine = Engine(blocks=9, rows=64, controller=controller)
    for _ in range(3):
        engine.add(20, 10, k=3)
    engine.step()
    assert controller.admitted == [0]
    engine.run()
    assert controller.admitted == [0, 1, 2]
    assert all(nodes > 0 for _, nodes in controller.grants)


def test_a_refused_prompt_is_not_hashed_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(blocks=12, rows=64)
    engine.add(20, 20)
    engine.add(30, 4)
    asked = []
    match = KVManager.match

    def count(self: KVManager, *args: object, **kwargs: object) -> object:
        asked.append(self.num_free)
        return match(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(KVManager, "match", count)
    for _ in range(15):
        engine.step()
    assert len(asked) == 2  # each once, though the first one's growth took blocks and registered others
    engine.run()


def test_refusals_do_not_outlive_what_they_waited_for() -> None:
    """The head of the queue changes, blocks come and go: everybody gets in."""
    engine = Engine(blocks=12, rows=16, seqs=3)
    for i in range(9):
        engine.add(7 + 3 * i % 20, 9, k=i % 4, priority=i % 2)
        engine.step()
    engine.core.cancel(7)
    engine.run()


def test_cancelled_waiting_requests_leave_at_once() -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(thing) is Request for thing in gc.get_objects())

    before = alive()
    engine = Engine(blocks=10, rows=16, seqs=1)
    engine.add(4, 30)
    for _ in range(500):
        engine.add(4, 30)
    for rid in range(1, 501):
        assert engine.core.cancel(rid)
    del engine.requests[1:]
    engine.step()  # delivers their ends
    assert engine.scheduler.num_waiting == 0
    assert alive() - before == 1


# ------------------------------------------------------------------------------------------------------- rows


def test_who_has_ended_hurries_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is closed behind its last output does not cut the rounds of the others short."""
    engine = Engine(8, 8)
    hurried: list[bool] = []
    monkeypatch.setattr(engine.executor, "hurry", hurried.append)
    done, other = engine.add(3, 1), engine.add(3, 8)
    assert hurried == [True, True]
    engine.step()
    assert done.finish_reason == "length" and hurried.pop() is False
    assert not engine.core.cancel(done.rid) and hurried == [True, True]
    assert engine.core.cancel(other.rid) and hurried == [True, True, True]


def test_nobody_starves_when_drafts_could_take_all_rows() -> None:
    engine = Engine(blocks=400, rows=32)
    for _ in range(8):
        engine.add(3, 60, k=15)
    engine.step()
    while engine.core.has_work:
        running = [r for r in engine.requests if r.finish_reason is None]
        before = [r.num_output for r in running]
        plan = engine.step()
        assert set(rows_of(plan)) == {r.rid for r in running}
        assert all(r.num_output > n for r, n in zip(running, before, strict=True))
    engine.run()


def test_a_waiting_request_finds_rows_though_drafts_want_them() -> None:
    engine = Engine(blocks=400, rows=32)
    engine.add(3, 100, k=31)
    for _ in range(3):
        engine.step()
    late = engine.add(3, 5)
    plan = engine.step()
    assert late.rid in rows_of(plan)
    engine.run()


def test_prompts_leave_some_rows_to_drafts() -> None:
    engine = Engine(blocks=400, rows=33)
    engine.add(3, 100, k=6)
    for _ in range(2):
        engine.step()
    engine.add(200, 5)
    seen = []
    for _ in range(6):
        plan = rows_of(engine.step())
        assert sum(row.num_new + row.num_draft for row in plan.values()) <= 33
        seen.append((plan[0].num_draft, plan[1].num_new))
    assert all(new >= 24 for _, new in seen)
    assert any(drafts for drafts, _ in seen)
    engine.run()


def test_decoding_goes_on_beside_a_prompt_that_came_first() -> None:
    """Its chunks would take all rows, and it stands first by its priority."""
    engine = Engine(blocks=400, rows=16)
    engine.add(3, 40)
    engine.step()
    engine.add(100, 5, priority=-1)
    for _ in range(5):
        before = engine.requests[0].num_output
        engine.step()
        assert engine.requests[0].num_output == before + 1
    engine.run()


def test_divide() -> None:
    assert divide([15, 2, 15], 20) == [9, 2, 9]
    assert divide([15, 15, 15], 32) == [11, 11, 10]
    assert divide([1, 2, 3], 6) == [1, 2, 3]
    assert divide([4, 4], 1) == [1, 0]
    assert divide([4, 4], 0) == [0, 0]
    assert divide([], 5) == []


def test_rows_kept_for_drafts_are_a_quarter_at_most() -> None:
    assert [kept_for_drafts(wanted, 24) for wanted in (0, 5, 6, 7, 100)] == [0, 5, 6, 6, 6]
    assert kept_for_drafts(5, 3) == 0


def test_nobody_drafts_more_than_can_be_verified() -> None:
    request = Engine(4, 8).add(1, 1)
    shares = Shares()
    for _ in range(8):
        shares.add(request, 1)
    assert draft_limit(shares, 32) == 0
    shares.budgets = [15] * 8
    assert draft_limit(shares, 32) == 3
    shares = Shares()
    for _ in range(7):
        shares.add(request, 1)
    shares.add(request, 600, num_new=8)
    shares.budgets = [15] * 7 + [0]
    assert draft_limit(shares, 32) == 1
    engine = Engine(blocks=400, rows=32)
    for _ in range(8):
        engine.add(3, 30, k=15)
    engine.step()
    assert all(row.draft_budget == 3 for row in engine.step().rows)
    engine.run()


# ---------------------------------------------------------------------------------------------- a full cache


def test_preemptions_are_counted() -> None:
    engine = Engine(blocks=8, rows=64, caching=False)
    first, second = engine.add(12, 9), engine.add(12, 9)
    engine.run()
    # Four blocks each at 16 tokens; the fifth has no room: the second one gives way until the first is done.
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert engine.scheduler.num_preemptions == 1
    assert sum(second.rid in plan.removed for plan in engine.executor.plans) == 1


def test_taking_back_lookahead_looks_at_no_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(self: KVManager, rid: int) -> tuple[int, ...]:
        raise AssertionError("a table was copied")

    monkeypatch.setattr(KVManager, "block_ids", unwanted)
    engine = Engine(blocks=28, rows=64, caching=False)
    for _ in range(6):
        engine.add(9, 12, k=5)
    engine.run()
    assert any(plan.trimmed for plan in engine.executor.plans)
    assert engine.scheduler.num_preemptions == 0, "lookahead goes before anybody's place"


def test_blocks_that_rounds_asked_for_go_to_who_waits() -> None:
    """The executor fills one of eight rounds. Blocks of 4, and 8 for a step of each: 4 drafts wait, 4 are to come."""
    engine = Engine(blocks=40, rows=64, caching=False, rounds=8)
    for _ in range(2):
        engine.add(8, 60, k=4)
    while not any(plan.rounds > 1 for plan in engine.executor.plans):
        engine.step()
    held = engine.kv.num_used
    known = sum(engine.kv.blocks_for(request.num_tokens) for request in engine.requests)
    free = engine.kv.num_free
    assert held > known + 2 * 2, "more than a step without rounds asks for"
    late = engine.add((free + 2) * 4, 4)
    plan = engine.step()
    assert [new.rid for new in plan.new] == [late.rid], "it does not wait for others' rounds"
    assert {rid for rid, _ in plan.trimmed} == {0, 1}
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_rounds_leave_the_last_blocks_to_steps_without() -> None:
    engine = Engine(blocks=26, rows=64, caching=False, rounds=8)
    for _ in range(2):
        engine.add(8, 24, k=4)
    with_rounds = 0
    while all(request.finish_reason is None for request in engine.requests):
        free = engine.kv.num_free
        if engine.step().rounds > 1:
            with_rounds += 1
            assert engine.kv.num_free >= min(free, 2 * 3), (
                "a step of one asks for three blocks: 4 + 4 drafts, a root"
            )
    assert 0 < with_rounds < len(engine.executor.plans) - 1
    engine.run()


# ------------------------------------------------------------------------------------------------------ shape


def test_shape_of_a_mixed_plan() -> None:
    """The example of `StepShape`."""
    controller = Recorder()
    engine = Engine(blocks=200, rows=160, caching=False, controller=controller)
    engine.executor.random.random = lambda: 0.99  # type: ignore[method-assign]  # drafts that are never right
    engine.executor.random.randint = lambda low, high: high  # type: ignore[method-assign]
    engine.add(50, 5)
    engine.add(70, 5, k=4)
    engine.step()
    assert controller.shapes[-1] == StepShape(0, 0, 120, 0)
    engine.add(100, 5)
    plan = rows_of(engine.step())
    drafts = plan[1].num_draft
    assert drafts >= 1
    assert controller.shapes[-1] == StepShape(2, 2 + drafts, 100, 120)


def test_a_prompt_in_the_cache_but_for_one_token_counts_as_prompt() -> None:
    controller = Recorder()
    engine = Engine(blocks=40, rows=64, controller=controller)
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 2]
    engine.add(prompt, 2)
    engine.run()
    engine.add(prompt, 2)
    engine.step()
    assert engine.requests[1].num_cached == 8
    assert controller.shapes[-1] == StepShape(0, 0, 1, 0)
    engine.run()


# ------------------------------------------------------------------------------------------------------ ahead


def test_chunks_of_a_prompt_follow_each_other_ahead() -> None:
    """A chunk is planned while the one before it runs: no step in between is empty."""
    engine = Engine(blocks=60, rows=16, ahead=True)
    request = engine.add(64, 3)
    calls = 0
    while engine.core.has_work:
        engine.core.step()
        calls += 1
    plans = [rows_of(plan) for plan in engine.executor.plans if plan.rows]
    assert [plan[0].num_new for plan in plans] == [16, 16, 16, 16, 1, 1]
    assert request.output_ids() == expected_output(request.tokens_np[:64].tolist(), 3)
    assert calls == len(plans) + 1 + (len(engine.executor.plans) - len(plans))


def test_who_finds_no_room_ahead_holds_nobody_else_up() -> None:
    """Two requests fill all four blocks, and the first needs a fifth one while its step is still on its way. It sits
    that plan out, the second does not; then the first, which came first, takes the second one's place."""
    engine = Engine(blocks=4, rows=16, caching=False, ahead=True)
    engine.add(7, 4)
    engine.add(5, 3)
    while engine.core.has_work:
        engine.core.step()
        engine.core.check_integrity()
    plans = [rows_of(plan) for plan in engine.executor.plans if plan.rows]
    assert [sorted(plan) for plan in plans] == [[0, 1], [0, 1], [1], [0], [0], [1]]
    assert engine.scheduler.num_preemptions == 1
    for request in engine.requests:
        prompt = request.tokens_np[: request.num_prompt].tolist()
        assert request.output_ids() == expected_output(prompt, request.max_total - request.num_prompt)

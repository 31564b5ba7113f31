"""What an engine counts over its life: sums of steps and of requests, exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.fakes.fake_executor import FakeExecutor, LateExecutor

from draftwise.adapt.controller import StaticController
from draftwise.engine.core import EngineCore
from draftwise.kv.manager import KVManager
from draftwise.propose.heads.passes import HeadPasses
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request, SpeculationCounts
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.types import DrafterFailure, Speculation, StepPlan, StepResult


def test_counts_of_two_requests_add_up() -> None:
    one, other = SpeculationCounts(), SpeculationCounts()
    one.add("ngram", 4, 2, 4)
    one.add("none", 0, 0, 0)
    other.add("mtp", 3, 3, 3)
    other.add("mtp", 6, 1, 6)
    other.add("ngram", 1, 0, 1)
    one.merge(other)
    assert one == SpeculationCounts(
        num_drafts=4,
        num_draft_tokens=14,
        num_accepted_tokens=6,
        num_accepted_tokens_per_pos=[3, 2, 1, 0, 0, 0],
        steps_by_method={"ngram": 2, "none": 1, "mtp": 2},
    )
    one.merge(SpeculationCounts(num_drafts=1, num_accepted_tokens_per_pos=[5]))
    assert one.num_accepted_tokens_per_pos == [8, 2, 1, 0, 0, 0], "the shorter one does not cut"


class Timed(FakeExecutor):
    """Says how long the parts of a step took, and that one drafter failed in it, twice."""

    calls = steps = 0  # all, and those that computed something

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        self.calls += 1
        self.steps += bool(result.rows)
        failures = tuple(
            DrafterFailure("mtp", hook, (), "broken") for hook in ("propose", "propose", "observe")
        )
        return replace(
            result,
            forward_time=0.5,
            draft_time=0.25,
            draft_forward_time=0.125,
            verify_time=0.0625,
            drafter_failures=failures,
        )


@pytest.mark.parametrize("ahead", [False, True])
def test_totals_are_sums_over_steps_and_finished_requests(ahead: bool) -> None:
    clock = iter(range(10_000))
    executor = Timed(64, 4, 1, 64, ahead=ahead)
    kv = KVManager(64, 4, True)
    scheduler = Scheduler(SchedulerConfig(8, 64, True), kv, StaticController(), lambda: float(next(clock)))
    device = LateExecutor(executor) if ahead else executor
    core = EngineCore(scheduler, device, lambda: float(next(clock)), ahead=ahead)
    for rid, (prompt, tokens) in enumerate([(5, 3), (9, 4)]):
        ids = np.arange(prompt, dtype=np.int32) % 5
        params = SamplingParams(temperature=0, max_tokens=tokens)
        core.add(
            Request(
                rid, ids, params, Speculation("none", 0), max_total=prompt + tokens, seed=0, arrival_time=0.0
            )
        )
    while core.has_work:
        core.step()
    totals, steps = core.totals, executor.steps
    assert totals.num_steps == steps >= 4
    assert ahead or steps == 4
    assert (totals.forward_time, totals.draft_time) == (0.5 * steps, 0.25 * steps)
    assert (totals.draft_forward_time, totals.verify_time) == (0.125 * steps, 0.0625 * steps)
    assert totals.step_time > 0
    assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (14, 7)
    assert (totals.num_requests_finished, totals.finish_reasons) == (2, {"length": 2})
    assert totals.drafter_failures == {"mtp.propose": 2 * executor.calls, "mtp.observe": executor.calls}


def test_a_finished_requests_speculation_stays_in_the_totals() -> None:
    kv = KVManager(64, 4, True)
    scheduler = Scheduler(SchedulerConfig(8, 64, True), kv, StaticController(), lambda: 0.0)
    core = EngineCore(scheduler, FakeExecutor(64, 4, 1, 64), lambda: 0.0)
    requests = []
    for rid, tokens in enumerate([6, 17]):  # the first ends long before the second
        params = SamplingParams(temperature=0, max_tokens=tokens)
        ids = np.arange(5 + rid, dtype=np.int32) % 5
        requests.append(
            Request(
                rid,
                ids,
                params,
                Speculation("fake", 3),
                max_total=len(ids) + tokens,
                seed=0,
                arrival_time=0.0,
            )
        )
        core.add(requests[-1])
    drafts = []
    while core.has_work:
        core.step()
        drafts.append(core.speculation_counts().num_drafts)
    expected = SpeculationCounts()
    for request in requests:
        assert request.counts.num_drafts > 0
        expected.merge(request.counts)
    assert core.speculation_counts() == core.totals.speculation == expected
    assert drafts == sorted(drafts), "what a request did is not lost when it ends"


def test_time_in_passes_is_taken_once() -> None:
    passes = HeadPasses.__new__(HeadPasses)
    passes._time = 3.0
    assert passes.take_time() == 3.0 and passes.take_time() == 0.0

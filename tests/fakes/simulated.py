"""An engine without a model whose steps take simulated time: acceptance and costs are scripted, scheduler, cache and
controller are real."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwise.adapt.controller import Controller
from draftwise.engine.core import EngineCore
from draftwise.kv.manager import KVManager
from draftwise.runner.executor import Executor
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.types import RowResult, Speculation, StepPlan, StepResult
from tests.fakes.fake_executor import LateExecutor


@dataclass
class World:
    """Costs in milliseconds. ``target(requests, rows)``: a step's target part; ``draft(method, requests, nodes)``;
    ``prompt``: per prompt token. ``chance(rid, method, position, time)``: of acceptance, given the positions before.
    ``sizes(method, random)``: size of an evident proposal, None: as many nodes as allowed. ``noise(random)``: factor
    of a step's time. ``follow``: per token that a drafter is told of (see `Following`); if it is not 0, drafts behind a
    gap are accepted rarely for 64 tokens. ``catch_up``: per token that a drafter has not seen when it drafts.
    ``timed``: whether a step says what part of it was drafting."""

    target: Callable[[int, int], float]
    draft: Callable[[str, int, int], float]
    chance: Callable[[int, str, int, float], float]
    sizes: Callable[[str, random.Random], int | None] = lambda method, rng: None
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    prompt: float = 0.001
    follow: float = 0.0
    catch_up: float = 0.0
    timed: bool = True


@dataclass
class _Row:
    speculation: Speculation
    num_tokens: int
    num_computed: int
    max_total: int
    waiting: int = 0
    whole: bool = True  # the drafter was told of every token
    told: int = 0  # of so many in a row up to the newest one
    drafted: int = 0  # tokens known when it drafted last


@dataclass
class Step:
    """What a step did, for assertions. ``budgets``: rid -> nodes asked for."""

    time: float
    seconds: float
    tokens: int
    requests: int
    rows: int
    budgets: dict[int, int] = field(default_factory=dict)
    plain: float = 0.0  # seconds that the same step would take without drafts and drafters, and without noise
    clean: float = 0.0  # seconds without noise


class SimulatedExecutor(Executor):
    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.now = 0.0
        self.rows: dict[int, _Row] = {}
        self.steps: list[Step] = []

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan) -> StepResult:
        for rid in plan.removed:
            self.rows.pop(rid, None)
        for new in plan.new:
            self.rows[new.rid] = _Row(new.speculation, len(new.token_ids_np), new.num_computed, new.max_total)
        world, start = self.world, self.now
        results: list[RowResult] = []
        drafting: dict[str, list[int]] = {}
        decoding = verified = prompt = told = late = 0
        for planned in plan.rows:
            row = self.rows[planned.rid]
            if row.num_tokens >= row.max_total:
                continue  # ahead, the scheduler did not know
            num_draft = min(planned.num_draft, row.waiting)
            if planned.num_new == 1:
                decoding += 1
                verified += 1 + num_draft
            else:
                prompt += planned.num_new
            results.append(self._row(planned.rid, row, planned.num_new, num_draft, planned.draft_budget))
            told += self._tell(row, planned.num_new + results[-1].num_accepted, planned.follow)
            if planned.draft_budget and results[-1].token_ids:
                drafting.setdefault(row.speculation.method, []).append(planned.draft_budget)
                late += max(row.num_tokens - row.drafted - results[-1].num_accepted - 1, 0)
                row.drafted = row.num_tokens
        noise = world.noise(self.random)
        target = (world.target(decoding, verified) if decoding else 0.0) + world.prompt * prompt
        extra = sum(world.draft(m, len(n), max(n)) for m, n in drafting.items())
        extra += world.follow * told + world.catch_up * late
        forward, draft = target * noise / 1000, extra * noise / 1000
        self.now += forward + draft
        budgets = {p.rid: p.draft_budget for p in plan.rows}
        tokens = sum(len(r.token_ids) for r in results)
        plain = ((world.target(decoding, decoding) if decoding else 0.0) + world.prompt * prompt) / 1000
        self.steps.append(
            Step(
                self.now,
                self.now - start,
                tokens,
                decoding,
                verified,
                budgets,
                plain,
                (target + extra) / 1000,
            )
        )
        if not world.timed:
            forward = draft = 0.0
        return StepResult(plan.step, tuple(results), forward_time=forward, draft_time=draft)

    def _tell(self, row: _Row, tokens: int, follow: bool) -> int:
        """The drafter is told of these tokens, or not: how many it has to take in."""
        if row.speculation.method == "none" or not self.world.follow:
            return 0
        row.told = row.told + tokens if follow else 0
        row.whole = row.whole and follow
        return tokens if follow else 0

    def _row(self, rid: int, row: _Row, num_new: int, num_draft: int, budget: int) -> RowResult:
        if row.num_computed + num_new < row.num_tokens:
            row.num_computed += num_new
            row.waiting = 0
            return RowResult(rid)
        method = row.speculation.method
        accepted = 0
        while accepted < num_draft:
            chance = self.world.chance(rid, method, accepted, self.now)
            if self.world.follow and not row.whole and row.told < 64:
                chance *= 0.4
            if self.random.random() >= chance:
                break
            accepted += 1
        row.num_computed += num_new + accepted
        row.num_tokens += accepted + 1
        row.waiting = 0
        if budget:
            size = self.world.sizes(method, self.random)
            row.waiting = budget if size is None else min(size, budget)
        return RowResult(
            rid,
            token_ids=(1,) * (accepted + 1),
            num_drafted=num_draft,
            num_accepted=accepted,
            accepted_nodes=tuple(range(accepted)),
            draft_tokens=(1,) * num_draft,
            draft_parents=tuple(range(-1, num_draft - 1)),
            method=method if num_draft else "none",
            num_proposed=row.waiting,
        )

    def close(self) -> None:
        self.rows.clear()


class Simulation:
    """Requests that come and go; time is the executor's."""

    def __init__(
        self,
        world: World,
        controller: Controller,
        *,
        seed: int = 0,
        max_num_seqs: int = 64,
        ahead: bool = False,
    ) -> None:
        self.executor = SimulatedExecutor(world, seed)
        self.controller = controller
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, 2048),
            KVManager(1 << 16, 16, False),
            controller,
            self.executor.clock,
        )
        executor = LateExecutor(self.executor) if ahead else self.executor
        self.core = EngineCore(scheduler, executor, self.executor.clock, ahead=ahead)
        self._next = 0

    def add(
        self, count: int = 1, tokens: int = 1_000_000, method: str = "model", k: int = 4, rule: str = "greedy"
    ) -> list[int]:
        """Add requests with prompts of 8 tokens; their ids."""
        rids = []
        for _ in range(count):
            rid, self._next = self._next, self._next + 1
            speculation = Speculation(method, k if method != "none" else 0, rule)
            request = Request(
                rid,
                np.zeros(8, np.int32),
                SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
                speculation,
                max_total=8 + min(tokens, 12_000),
                seed=0,
                arrival_time=self.executor.now,
            )
            self.core.add(request)
            rids.append(rid)
        return rids

    def cancel(self, rids: Sequence[int]) -> None:
        for rid in rids:
            self.core.cancel(rid)

    def run(self, steps: int) -> list[Step]:
        """So many steps; what they did."""
        before = len(self.executor.steps)
        for _ in range(steps):
            self.core.step()
        self.core.check_integrity()
        return self.executor.steps[before:]


def rate(steps: Sequence[Step]) -> float:
    """Tokens per simulated second."""
    return sum(s.tokens for s in steps) / sum(s.seconds for s in steps)

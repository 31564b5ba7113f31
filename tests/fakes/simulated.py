"""An engine without a model whose steps take simulated time: acceptance and costs are scripted. The device is that of
`draftwise simulate`, with a scripted world behind it; scheduler, cache and controller are real."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draftwise.adapt.controller import Controller
from draftwise.engine.core import EngineCore
from draftwise.kv.manager import KVManager
from draftwise.plan.times import StepTimes
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.simulate import executor as simulate
from draftwise.types import RowPlan, Speculation, StepPlan, StepResult
from tests.fakes.fake_executor import LateExecutor

_POSITIONS = 64


@dataclass
class World:
    """Costs in milliseconds. ``target(requests, rows)``: a step's target part; ``draft(method, requests, nodes)``;
    ``prompt``: per prompt token. ``chance(rid, method, position, time)``: of acceptance, given the positions before.
    ``sizes(method, random)``: size of an evident proposal, None: as many nodes as allowed. ``noise(random)``: factor
    of a step's time. ``follow``: per token that a drafter is told of; if it is not 0, drafts behind a gap are accepted
    rarely for 64 tokens. ``catch_up``: per token that a drafter has not seen when it drafts. ``timed``: whether a step
    says what part of it was drafting. ``apart(requests)``: a pass more, for those who do not draft and whose drafters
    are told of their tokens: they have no seats on a device; None: they take part in the others' pass."""

    target: Callable[[int, int], float]
    draft: Callable[[str, int, int], float]
    chance: Callable[[int, str, int, float], float]
    sizes: Callable[[str, random.Random], int | None] = lambda method, rng: None
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    prompt: float = 0.001
    follow: float = 0.0
    catch_up: float = 0.0
    timed: bool = True
    apart: Callable[[int], float] | None = None


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


class _Times(StepTimes):
    """A world's costs in seconds, and what was asked of them in this step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.requests = self.rows = 0
        self.plain = self.clean = 0.0

    def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
        self.requests, self.rows = requests, rows
        self.plain += self.world.target(requests, requests) / 1000
        return self._kept(self.world.target(requests, rows))

    def draft_time(
        self, method: str, requests: int, nodes: int, catch_up: int = 0, sampled: bool = False
    ) -> float:
        return self._kept(self.world.draft(method, requests, nodes) + self.world.catch_up * catch_up)

    def reading_time(self, method: str, start: int, end: int) -> float:
        return self._kept(self.world.catch_up * (end - start))

    def prompt_time(self, start: int, end: int, alone: bool) -> float:
        self.plain += self.world.prompt * (end - start) / 1000
        return self._kept(self.world.prompt * (end - start))

    def _kept(self, ms: float) -> float:
        self.clean += ms / 1000
        return ms / 1000


class _Told:
    """What a request's drafter was told of."""

    def __init__(self) -> None:
        self.whole = True  # every token
        self.in_a_row = 0  # so many up to the newest one

    def note(self, tokens: int, follow: bool) -> None:
        self.in_a_row = self.in_a_row + tokens if follow else 0
        self.whole = self.whole and follow


class _Survival:
    """Chances that drafts up to a position are all accepted. Few positions are asked for, the first ones first."""

    def __init__(self, chance: Callable[[int], float]) -> None:
        self._chance = chance
        self._found: list[float] = []

    def __getitem__(self, position: int) -> float:
        found = self._found
        while len(found) <= position:
            found.append((found[-1] if found else 1.0) * self._chance(len(found)))
        return found[position]


class _Draws:
    """The draws of one request: a world's chances may change from step to step."""

    until = math.inf

    def __init__(self, of: SimulatedExecutor, rid: int, method: str) -> None:
        self._of, self._rid, self._method = of, rid, method

    @property
    def survival(self) -> _Survival:
        of, told = self._of, self._of.told[self._rid]
        factor = 0.4 if of.world.follow and not told.whole and told.in_a_row < 64 else 1.0
        rid, method, now = self._rid, self._method, of.clock()
        return _Survival(lambda position: factor * of.world.chance(rid, method, position, now))

    @property
    def offered(self) -> Sequence[float] | None:
        size = self._of.world.sizes(self._method, self._of.random)
        return None if size is None else [1.0] * size + [0.0] * _POSITIONS


class _Acceptance:
    """A world's chances, as the simulated device asks for them: a request's kind is its number."""

    def __init__(self, of: SimulatedExecutor) -> None:
        self._of = of

    def draws(self, method: str, kind: str, context: int) -> _Draws:
        return _Draws(self._of, int(kind), method)


class SimulatedExecutor(simulate.SimulatedExecutor):
    """Keeps what each step did. Told of tokens (``follow``), planned ahead or with noise: the rest is the device's."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.clock = simulate.Clock()
        self.costs = _Times(world)
        self.told: dict[int, _Told] = {}
        self.steps: list[Step] = []
        self._most: dict[int, int] = {}  # tokens at which a request ends
        super().__init__(self.costs, _Acceptance(self), self.clock, seed)  # type: ignore[arg-type]

    def execute(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            self.kinds[new.rid] = str(new.rid)
            self._most[new.rid] = new.max_total
            self.told[new.rid] = _Told()
        world, start = self.world, self.clock.now
        self.slowdown = world.noise(self.random)
        self.costs.begin()
        rows = [found for row in plan.rows if (found := self._possible(row)) is not None]
        result = super().execute(replace(plan, rows=rows))
        told = sum(
            self._tell(row, row.num_new + found.num_accepted)
            for row, found in zip(rows, result.rows, strict=True)
        )
        following = world.follow * told / 1000 + self._apart(plan)
        self.clock.now += following * self.slowdown
        costs = self.costs
        self.steps.append(
            Step(
                self.clock.now,
                self.clock.now - start,
                sum(len(found.token_ids) for found in result.rows),
                costs.requests,
                costs.rows,
                {row.rid: row.draft_budget for row in plan.rows},
                costs.plain,
                costs.clean + following,
            )
        )
        if not world.timed:
            return replace(result, forward_time=0.0, draft_time=0.0)
        return replace(result, draft_time=result.draft_time + following * self.slowdown)

    def _possible(self, planned: RowPlan) -> RowPlan | None:
        """A step that was planned ahead assumes tokens and drafts that may not have come; None: the request has
        ended."""
        row = self._rows.get(planned.rid)
        if row is None:  # it is new
            return planned
        if row.known >= self._most[planned.rid]:
            return None
        return planned._replace(num_draft=min(planned.num_draft, row.waiting))

    def _apart(self, plan: StepPlan) -> float:
        """Seconds of the pass of those who have no seats."""
        if self.world.apart is None:
            return 0.0
        count = sum(
            self._rows[row.rid].method != "none" and row.follow and not row.draft_budget
            for row in plan.rows
            if row.rid in self._rows and row.num_new - row.num_draft == 1
        )
        return self.world.apart(count) / 1000 if count else 0.0

    def _tell(self, planned: RowPlan, tokens: int) -> int:
        """The drafter is told of these tokens, or not: how many it has to take in."""
        if self._rows[planned.rid].method == "none" or not self.world.follow:
            return 0
        self.told[planned.rid].note(tokens, planned.follow)
        return tokens if planned.follow else 0


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
        clock = self.executor.clock
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, 2048), KVManager(1 << 16, 16, False), controller, clock
        )
        executor = LateExecutor(self.executor) if ahead else self.executor
        self.core = EngineCore(scheduler, executor, clock, ahead=ahead)
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
                arrival_time=self.executor.clock.now,
            )
            self.core.add(request)
            rids.append(rid)
        return rids

    def cancel(self, rids: Sequence[int]) -> None:
        for rid in rids:
            self.core.cancel(rid)

    def step(self) -> Step:
        """One step; what it did. Unlike `run`, it leaves the books unchecked: that takes longer than the step."""
        self.core.step()
        return self.executor.steps[-1]

    def run(self, steps: int) -> list[Step]:
        """So many steps, and a look at all books; what the steps did."""
        before = len(self.executor.steps)
        for _ in range(steps):
            self.core.step()
        self.core.check_integrity()
        return self.executor.steps[before:]


def rate(steps: Sequence[Step]) -> float:
    """Tokens per simulated second."""
    return sum(s.tokens for s in steps) / sum(s.seconds for s in steps)

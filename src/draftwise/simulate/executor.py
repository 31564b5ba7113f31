"""A device that takes simulated time: what stands behind `Executor.execute` when an engine is simulated."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence

from draftwise.plan.acceptance import AcceptanceModel, Draws
from draftwise.plan.times import StepTimes
from draftwise.runner.executor import Executor
from draftwise.types import RowResult, StepPlan, StepResult, chain_parents, new_record

_TOKENS = [(7,) * n for n in range(66)]
_CHAINS = [chain_parents(n) for n in range(65)]
_NODES = [tuple(range(n)) for n in range(65)]


class Clock:
    """A clock that is set from outside. Calling it returns seconds."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Row:
    """``known`` tokens, of which ``computed`` have their K/V; ``waiting`` drafts were proposed."""

    __slots__ = ("cached", "computed", "drafted_at", "draws", "kind", "known", "method", "waiting")

    def __init__(self, known: int, computed: int, method: str, kind: str, draws: Draws | None) -> None:
        self.known = known
        self.computed = computed
        self.method = method
        self.kind = kind
        self.draws = draws  # those that hold at its length; None: it never drafts
        self.waiting = 0
        self.drafted_at = 0  # tokens known when it drafted last; 0: never
        self.cached = computed  # tokens of the prompt that were cached


class _Rest:
    """How far an engine has cooled down by doing nothing, and warmed up by work since."""

    def __init__(self, rests: Sequence[tuple[float, float]], pause: float) -> None:
        self._untils = [until for until, _ in rests]
        self._factors = [factor - 1 for _, factor in rests]
        self._pause = pause
        self._share = 0.0  # of the pause that was measured
        self._work = math.inf  # seconds since
        self._end = 0.0

    def factor(self, now: float) -> float:
        """The slow-down of a step that begins now. Example: 0.4 s were measured, after which a first step takes 1.2
        times as long: after 0.1 s, 1.05 times.
        """
        idle = now - self._end
        if idle > 0:
            self._share = min(self._left() + idle / self._pause, 1.0)
            self._work = 0.0
        at = bisect_left(self._untils, self._work)
        return 1 + self._share * self._factors[at] if at < len(self._factors) else 1.0

    def _left(self) -> float:
        """The share that is still cold."""
        at = bisect_left(self._untils, self._work)
        return self._share * self._factors[at] / max(self._factors) if at < len(self._factors) else 0.0

    def ended(self, now: float, seconds: float) -> None:
        """A step of so many seconds ends now."""
        self._end = now
        self._work += seconds


class SimulatedExecutor(Executor):
    """Answers each plan with how many drafts were accepted, and lets the clock run for as long as the step takes.

    Draws are its own, in the order of the rows, so that the same plans with the same seed give the same results.
    """

    def __init__(self, times: StepTimes, acceptance: AcceptanceModel, clock: Clock, seed: int = 0) -> None:
        self._times = times
        self._acceptance = acceptance
        self._clock = clock
        self._random = random.Random(seed)
        self._scatter = random.Random(seed ^ 0x5CA77E4)  # of times: what is accepted does not hang on it
        self._rest = _Rest(times.rests, times.pause) if times.rests and times.pause > 0 else None
        self._behind = False  # the step before had a prompt in it
        self._rows: dict[int, _Row] = {}
        self.kinds: dict[int, str] = {}
        """Request -> kind of text; whoever adds requests says it, and it is forgotten when they end."""
        self.num_steps = 0
        self.num_rows = 0  # scheduled: tokens of prompts and rows of decoding requests
        self.num_outside = 0  # steps of a size that the times know nothing of
        self.outside: str | None = None  # why, of the first one
        self.slowdown = 1.0  # a device that is throttled takes so many times as long

    def execute(self, plan: StepPlan) -> StepResult:
        rows = self._rows
        for rid in plan.removed:
            rows.pop(rid, None)
        for new in plan.new:
            method, known = new.speculation.method, len(new.token_ids_np)
            kind = self.kinds.get(new.rid, "")
            draws = None if method == "none" else self._acceptance.draws(method, kind, known)
            rows[new.rid] = _Row(known, new.num_computed, method, kind, draws)
        results: list[RowResult] = []
        requests = verified = context = prompt_rows = 0
        prompts: list[tuple[int, int]] = []
        drafting: dict[str, list[int]] = {}  # requests, nodes, tokens to catch up on
        draw = self._random.random
        reading = 0.0
        for rid, num_new, num_draft, budget, _, _ in plan.rows:
            row = rows[rid]
            start = row.computed
            if num_new > 1 or start + 1 < row.known:
                prompts.append((start, start + num_new))
                prompt_rows += num_new
                if start + num_new < row.known:
                    row.computed = start + num_new
                    row.waiting = 0
                    results.append(RowResult(rid))
                    continue
            else:
                requests += 1
                context += start
                verified += 1 + num_draft
            accepted = 0
            if num_draft:
                assert row.draws is not None
                survival, u = row.draws.survival, draw()
                while accepted < num_draft and u < survival[accepted]:
                    accepted += 1
            row.computed = start + num_new + accepted
            row.known += accepted + 1
            waiting = budget
            if budget:
                draws = row.draws
                assert draws is not None
                if row.known >= draws.until:
                    draws = row.draws = self._acceptance.draws(row.method, row.kind, row.known)
                if draws.offered is not None:
                    offered, u = draws.offered, draw()
                    waiting = 0
                    while waiting < budget and u < offered[waiting]:
                        waiting += 1
            row.waiting = waiting
            results.append(
                new_record(
                    RowResult,
                    (
                        rid, _TOKENS[accepted + 1], num_draft, accepted, _NODES[accepted], _TOKENS[num_draft],
                        _CHAINS[num_draft], row.method if num_draft else "none", waiting, None, None, None, None,
                    ),
                )
            )  # fmt: skip
            if budget:
                late = max(row.known - row.drafted_at - accepted - 1, 0) if row.drafted_at else 0
                if not row.drafted_at:  # the first time: its drafter reads all that there is
                    reading += self._times.reading_time(row.method, row.cached, row.known - 1)
                row.drafted_at = row.known
                entry = drafting.get(row.method)
                if entry is None:
                    drafting[row.method] = [1, budget, late]
                else:
                    entry[0] += 1
                    entry[1] = max(entry[1], budget)
                    entry[2] += late
        times = self._times
        forward = times.target_time(requests, verified, context) if requests else 0.0
        for i, (first, end) in enumerate(prompts):
            forward += times.prompt_time(first, end, not requests and i == 0)
        draft = reading
        for method, (count, nodes, late) in drafting.items():
            draft += times.draft_time(method, count, nodes, late)
        if requests:
            why = times.outside(requests, verified, context)
            if why is not None:
                self.num_outside += 1
                self.outside = self.outside or why
        self.num_steps += 1
        self.num_rows += verified + prompt_rows
        if self._behind and requests:
            forward += times.behind
        if prompts or requests:
            self._behind = bool(prompts)
        factors = times.prompt_factors if prompts else times.step_factors
        factor = self.slowdown
        if factors:
            factor *= factors[int(self._scatter.random() * len(factors))]
        rest = self._rest
        if rest is not None:
            factor *= rest.factor(self._clock.now)
        forward, draft = forward * factor, draft * factor
        self._clock.now += forward + draft
        if rest is not None:
            rest.ended(self._clock.now, forward + draft)
        return StepResult(plan.step, tuple(results), forward_time=forward, draft_time=draft)

    def close(self) -> None:
        self._rows.clear()

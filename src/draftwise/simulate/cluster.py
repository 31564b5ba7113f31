"""Simulated engines behind a router, on one clock of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftwise.errors import ConfigError, RequestError
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.planner import Planner
from draftwise.plan.ticks import DECODE, ENGINES, PREFILL, Decision, Observation
from draftwise.plan.times import StepTimes
from draftwise.plan.traces import MOONCAKE_BLOCK, Trace
from draftwise.sched.request import RequestUpdate
from draftwise.simulate.engine import EngineSettings, Policy, SimulatedEngine, prompt_tokens
from draftwise.simulate.outcome import Moment, Outcome
from draftwise.simulate.replicas import Replica, Work, router
from draftwise.simulate.settings import ClusterSettings, Failure, Window
from draftwise.simulate.tally import Tally

_PATIENCE = 3600.0
"""Seconds after the last arrival for which a planner without replicas is asked whether it wants some."""
_LONGEST_STEP = 86_400.0
"""Seconds beyond which the time of a step is a fault of the performance model."""
_MOMENTS = 240
"""Moments of a run that are kept, where no planner says how often to look."""


class Cluster:
    """One run of a trace; made once, run once."""

    def __init__(
        self,
        trace: Trace,
        times: StepTimes,
        acceptance: AcceptanceModel,
        policy: Policy,
        engine: EngineSettings,
        settings: ClusterSettings | None = None,
        *,
        planner: Planner | None = None,
        advisory: bool = False,
        seed: int = 0,
        advance: Callable[[float], None] = lambda share: None,
    ) -> None:
        """``planner``: decides the number of replicas; ``advisory``: its decisions are noted and not carried out.
        ``advance``: told the share of requests that have ended, now and then. Raises ConfigError."""
        self._trace, self._times, self._acceptance = trace, times, acceptance
        self._policy, self._seed = policy, seed
        self._settings = settings or ClusterSettings()
        pooled = self._settings.pooled
        count = self._settings.prefill + self._settings.decode if pooled else self._settings.replicas
        late = [f.number for f in self._settings.failures if f.number >= count]
        if late and planner is None:
            raise ConfigError(
                f"failures: there is no replica {late[0]} (they are numbered from 0 to {count - 1})"
            )
        self._engine_settings = replace(
            engine, prefix_caching=engine.prefix_caching or pooled or trace.blocks is not None
        )
        self._planner, self._advisory = planner, advisory
        if planner is not None and (planner.config.mode == "pools") != pooled:
            raise ConfigError("planner: its mode and the cluster's pools do not agree")
        self._pools = (PREFILL, DECODE) if pooled else (ENGINES,)
        self._router = {
            pool: router(self._settings.router if pool != DECODE else "load") for pool in self._pools
        }
        self._replicas: list[Replica] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._now = 0.0
        self._backlog: dict[str, list[Work]] = {pool: [] for pool in self._pools}
        self._tally = Tally(trace, self._settings.sla, advance)
        self._moments: list[Moment] = []
        self._wanted: dict[str, int] = {}
        self._why = ""
        self._give_up = trace.seconds + _PATIENCE
        self._tick = planner.config.interval if planner else max(trace.seconds / _MOMENTS, 1e-3)

    # ------------------------------------------------------------------------------------------- the run

    def run(self) -> Outcome:
        """Serve the whole trace. Raises ConfigError if the performance model gives times that are none."""
        s = self._settings
        counts = {PREFILL: s.prefill, DECODE: s.decode} if s.pooled else {ENGINES: s.replicas}
        for pool in self._pools:
            for _ in range(counts[pool]):
                self._start(pool, 0.0)
        for failure in s.failures:
            self._at(failure.time, self._fail, failure)
        self._at(self._tick, self._look)
        trace, events = self._trace, self._events
        arrivals = trace.times_np.tolist()
        first = 0
        total = len(arrivals)
        while self._tally.left:
            if first < total and (not events or arrivals[first] <= events[0][0]):
                self._now = arrivals[first]
                self._arrive(first)
                first += 1
                continue
            if not events:
                break  # no replica is there to serve waiting requests
            self._now, _, act, given = heapq.heappop(events)
            act(*given)
        for r in self._replicas:
            self._end(r)
        return self._outcome()

    def _at(self, time: float, act: Callable[..., None], *given: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, act, given))

    def _arrive(self, index: int) -> None:
        trace = self._trace
        work = Work(
            index,
            int(trace.isl_np[index]),
            int(trace.osl_np[index]),
            self._now,
            () if trace.blocks is None else tuple(trace.blocks[index]),
            "" if trace.kinds is None else trace.kinds[index],
        )
        self._tally.arrived(work)
        self._send(work, self._pools[0])

    def _send(self, work: Work, pool: str) -> None:
        """Send a request to a serving replica; it waits if there is none."""
        ready = [r for r in self._replicas if r.pool == pool and r.state == "ready"]
        if not ready:
            self._backlog[pool].append(work)
            return
        replica = self._router[pool](ready, work)
        tokens_np = self._tokens(work)
        if pool == DECODE:
            replica.inbox.append((work, tokens_np))
            self._take_in(replica)
        else:
            self._add(replica, work, tokens_np)
        if not replica.busy:  # who else comes at this very moment is in the same step
            self._at(self._now, self._go, replica)

    def _tokens(self, work: Work) -> Any:
        """[isl + done] the prompt and what its user has of the output."""
        return prompt_tokens(work.isl + work.done, work.index, work.blocks, MOONCAKE_BLOCK)

    def _add(self, replica: Replica, work: Work, tokens_np: Any) -> None:
        output = 1 if replica.pool == PREFILL else work.osl - work.done
        try:
            request = replica.engine.add(work.index, tokens_np, output, work.arrived, work.kind)
        except RequestError as error:
            self._tally.refused(str(error))
            return
        replica.live[work.index] = (work, request)
        replica.load += work.isl + work.osl
        if work.blocks:
            replica.remember(work.blocks)

    def _take_in(self, replica: Replica) -> None:
        """Write arrived K/V as far as there is room; requests without room wait, in order."""
        engine = replica.engine
        while replica.inbox and engine.scheduler.num_waiting < 4:
            work, tokens_np = replica.inbox[0]
            if not engine.bring(tokens_np) and replica.live:
                return
            del replica.inbox[0]
            self._add(replica, work, tokens_np)

    def _go(self, replica: Replica) -> None:
        """Begin a step, unless one runs or there is nothing to do."""
        if replica.busy or replica.state in ("failed", "gone", "starting"):
            return
        if not replica.engine.core.has_work:
            if replica.state == "draining" and not replica.inbox:
                self._end(replica)
            return
        replica.pending = replica.engine.step(self._now)
        end = replica.engine.clock.now
        if not 0 < end - self._now <= _LONGEST_STEP:
            raise ConfigError(f"performance model: a step takes {end - self._now} s")
        replica.busy = True
        self._at(end, self._stepped, replica, replica.epoch)

    def _stepped(self, replica: Replica, epoch: int) -> None:
        """A step has ended: now its tokens are there."""
        if replica.epoch != epoch:
            return
        replica.busy = False
        updates, replica.pending = replica.pending, []
        for update in updates:
            if update.num_new:
                work = replica.live[update.request.rid][0]
                if work.first_token is None:
                    self._tally.first(work, self._now)
                if update.finished:
                    self._finish(replica, work, update)
        if replica.inbox:
            self._take_in(replica)
        self._go(replica)

    def _finish(self, replica: Replica, work: Work, update: RequestUpdate) -> None:
        request = update.request
        del replica.live[work.index]
        replica.load -= work.isl + work.osl
        self._tally.drafted(request.counts)
        work.done += request.num_output
        if work.done < work.osl:  # the prompt is read: what comes is decoded elsewhere
            s = self._settings
            seconds = s.latency + (work.isl + work.done) * s.kv_bytes / s.bandwidth
            self._at(self._now + seconds, self._send, work, DECODE)
            return
        self._tally.ended(work, self._now)

    # ---------------------------------------------------------------------------------- replicas come and go

    def _start(self, pool: str, delay: float) -> None:
        number = len(self._replicas)
        made = Replica(number, pool, self._engine(pool, number), "starting", self._now)
        made.most_seen = max(made.engine.kv.num_blocks * made.engine.kv.block_size // MOONCAKE_BLOCK, 1)
        self._replicas.append(made)
        if delay:
            self._at(self._now + delay, self._serve, made, made.epoch)
        else:
            self._serve(made, made.epoch)

    def _engine(self, pool: str, number: int) -> SimulatedEngine:
        policy = Policy() if pool == PREFILL else self._policy
        return SimulatedEngine(
            self._times, self._acceptance, policy, self._engine_settings, seed=self._seed * 65_537 + number
        )

    def _serve(self, replica: Replica, epoch: int) -> None:
        if replica.epoch != epoch or replica.state not in ("starting", "failed"):
            return
        replica.state = "ready"
        replica.served_since = self._now
        backlog, self._backlog[replica.pool] = self._backlog[replica.pool], []
        for work in backlog:
            self._send(work, replica.pool)

    def _fail(self, failure: Failure) -> None:
        if failure.number >= len(self._replicas):
            return
        replica = self._replicas[failure.number]
        if replica.state in ("gone", "failed"):
            return
        unseen = {u.request.rid: u.num_new for u in replica.pending}
        lost: list[Work] = []
        for work, request in replica.live.values():
            # What the step that ran has computed never left the replica.
            work.done += request.num_output - unseen.get(request.rid, 0)
            lost.append(work)
        lost += [work for work, _ in replica.inbox]
        self._tally.engine_ended(replica.engine)
        replica.live, replica.inbox, replica.pending = {}, [], []
        replica.epoch += 1
        replica.busy, replica.load, replica.state = False, 0, "failed"
        replica.seen.clear()
        replica.engine = self._engine(replica.pool, replica.number)
        self._at(self._now + failure.down, self._serve, replica, replica.epoch)
        for work in lost:
            self._tally.moved(work)
            # Its K/V is gone: a pool that decodes alone cannot make it anew.
            self._send(work, self._pools[0])

    def _end(self, replica: Replica) -> None:
        if replica.state != "gone":
            replica.state = "gone"
            replica.until = max(self._now, replica.since)
            self._tally.engine_ended(replica.engine)

    def _scale(self, pool: str, wanted: int) -> None:
        """Start replicas, or let some drain: those that do not serve yet first, then the least loaded."""
        mine = [r for r in self._replicas if r.pool == pool and r.state in ("starting", "ready", "failed")]
        for _ in range(wanted - len(mine)):
            self._start(pool, self._settings.startup)
        spare = sorted(mine, key=lambda r: (r.state == "ready", r.num_requests, -r.number))
        for replica in spare[: max(len(mine) - wanted, 0)]:
            if replica.state == "ready":
                replica.state = "draining"
                self._go(replica)
            else:
                replica.epoch += 1
                self._end(replica)

    # ------------------------------------------------------------------------------------------ moments

    def _look(self) -> None:
        """A moment: note how things stand, and ask the planner."""
        if self._planner is not None:
            decision = self._planner.on_tick(self._observation())
            self._note(decision)
            if not self._advisory:
                for pool, wanted in decision.replicas.items():
                    self._scale(pool, wanted)
        engines = [r for r in self._replicas if r.state in ("ready", "draining")]
        running = sum(r.engine.scheduler.num_running for r in engines)
        deciding = [r for r in engines if r.pool != PREFILL]
        weights = [r.engine.scheduler.num_running for r in deciding]
        drafts = sum(r.engine.drafts_wanted * w for r, w in zip(deciding, weights, strict=True))
        window, self._tally.window = self._tally.window, Window()
        self._moments.append(
            Moment(
                self._now,
                window.arrived,
                window.ended,
                running,
                self._waiting(),
                drafts / sum(weights) if sum(weights) else 0.0,
                {pool: sum(r.pool == pool and r.state == "ready" for r in engines) for pool in self._pools},
                dict(self._wanted),
                window.good / window.ended if window.ended else None,
                self._why,
            )
        )
        waits = self._planner is not None and any(self._backlog.values()) and self._now < self._give_up
        if self._tally.left and (self._events or waits or self._now < self._trace.seconds):
            self._at(self._now + self._tick, self._look)

    def _note(self, decision: Decision) -> None:
        self._wanted, self._why = dict(decision.replicas), "; ".join(decision.reasons)

    def _waiting(self) -> int:
        waiting = sum(
            r.engine.scheduler.num_waiting + len(r.inbox) for r in self._replicas if r.state != "gone"
        )
        return waiting + sum(map(len, self._backlog.values()))

    def _observation(self) -> Observation:
        ready = [r for r in self._replicas if r.state == "ready"]
        used = [1 - r.engine.kv.num_free / r.engine.kv.num_blocks for r in ready]
        return self._tally.window.observation(
            self._now,
            queue=self._waiting(),
            kv_usage=sum(used) / len(used) if used else None,
            ready={pool: sum(r.pool == pool for r in ready) for pool in self._pools},
            warming=sum(r.served_since > 0 and self._now - r.served_since < self._tick for r in ready),
        )

    def _outcome(self) -> Outcome:
        cost = sum((r.until or self._now) - r.since for r in self._replicas)
        return self._tally.outcome(self._policy.name, cost * self._settings.devices, self._moments)

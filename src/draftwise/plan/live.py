"""The planner beside something that runs: what it sees of engines, when it is asked, and where it remembers.

`LoadWatch` turns what steps did into observations. `PlannerService` asks the planner once per interval and is the only
one that carries out what it says: one owner of the number of replicas. Without somebody who can start and drain
replicas it only advises.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from draftwise.engine.outputs import EngineStats
from draftwise.errors import ConfigError, EngineDeadError
from draftwise.plan.operating import Sla
from draftwise.plan.planner import Planner
from draftwise.plan.ticks import ENGINES, Decision, Observation, counted, kind_of, known
from draftwise.sched.request import RequestUpdate

logger = logging.getLogger("draftwise.planner")

ADVISE = "advise"


@dataclass(slots=True)
class Work:
    """What an engine did in an interval: sums over requests, and what there is at its end."""

    arrived: int = 0
    started: int = 0
    isl: int = 0
    ttft: float = 0.0
    ended: int = 0
    good: int = 0
    osl: int = 0
    itl: float = 0.0
    num_itl: int = 0
    proposals: int = 0
    drafts: int = 0
    accepted: int = 0
    waiting: int = 0
    used_blocks: int = 0
    num_blocks: int = 0


_NO_LIMITS = Sla()


class LoadWatch:
    """An engine's work since the last call. `observe` is called in the engine's thread after every step."""

    def __init__(self, stats: Callable[[], EngineStats], sla: Sla = _NO_LIMITS) -> None:
        """``sla``: the limits that requests are held to."""
        self._stats, self._sla = stats, sla
        self._lock = threading.Lock()
        self._work = Work()
        self._waiting = 0  # at the end of the interval before

    def observe(self, updates: Sequence[RequestUpdate]) -> None:
        """Take in what a step changed."""
        with self._lock:
            work = self._work
            for request, num_new, finished in updates:
                first = request.first_token_time
                if num_new and first is not None and request.num_output == num_new:
                    work.started += 1
                    work.isl += request.num_prompt
                    work.ttft += first - request.arrival_time
                if not finished:
                    continue
                work.ended += 1
                work.osl += request.num_output
                work.proposals += request.counts.num_drafts
                work.drafts += request.counts.num_draft_tokens
                work.accepted += request.counts.num_accepted_tokens
                end = request.finished_time
                itl = None
                if request.num_output > 1 and first is not None and end is not None:
                    itl = (end - first) / (request.num_output - 1)
                    work.itl += itl
                    work.num_itl += 1
                waited = None if first is None else first - request.arrival_time
                work.good += self._sla.met(waited, itl)

    def work(self) -> Work:
        """The interval that ends now. Who waits at its end has come in it, or before it."""
        stats = self._stats()
        with self._lock:
            work, self._work = self._work, Work()
        work.arrived = max(work.started + stats.num_waiting - self._waiting, 0)
        self._waiting = work.waiting = stats.num_waiting
        work.used_blocks, work.num_blocks = stats.num_used_blocks, stats.num_blocks
        return work

    def take(self, now: float, ready: Mapping[str, int], warming: int = 0) -> Observation:
        """The same as an observation at the time ``now``."""
        return observed([self.work()], now, ready, warming)


def observed(works: Sequence[Work], now: float, ready: Mapping[str, int], warming: int = 0) -> Observation:
    """The work of several engines as one observation."""
    sums = {f.name: sum(getattr(work, f.name) for work in works) for f in fields(Work)}

    def mean(what: str, by: str) -> float | None:
        return sums[what] / sums[by] if sums[by] else None

    accepted = mean("accepted", "proposals")
    return Observation(
        time=now,
        requests=float(sums["arrived"]),
        isl=mean("isl", "started"),
        osl=mean("osl", "ended"),
        ttft=mean("ttft", "started"),
        itl=mean("itl", "num_itl"),
        queue=float(sums["waiting"]),
        kv_usage=mean("used_blocks", "num_blocks"),
        accepted_length=None if accepted is None else 1 + accepted,
        draft_length=mean("drafts", "proposals"),
        ready=ready,
        warming=warming,
        attained=mean("good", "ended"),
    )


class PlannerService:
    """Asks a planner every interval. `tick` may be called by hand instead of `start`."""

    def __init__(
        self,
        planner: Planner,
        observe: Callable[[float], Observation],
        *,
        carry_out: Callable[[Decision], None] | None = None,
        state: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``observe``: the interval that ends at the time it is given. ``carry_out``: starts and drains replicas; None:
        decisions are advice. ``state``: what the planner remembers is read from this file, and written after every
        decision. Raises ConfigError if the file is there and is no such state."""
        self.planner = planner
        self.mode = ADVISE if carry_out is None else "scale"
        self._observe, self._carry_out, self._state, self._clock = observe, carry_out, state, clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._decision: Decision | None = None
        self._seen: Observation | None = None
        self._ticks = self._changes = self._failures = 0
        self._reasons: Counter[str] = Counter()
        if state is not None and state.exists():
            planner.restore(read_state(state))

    def tick(self) -> Decision | None:
        """Observe and decide; None if observing or carrying out failed, which is logged: what runs goes on."""
        try:
            seen = self._observe(self._clock())
            decision = self.planner.on_tick(seen)
            if self._carry_out is not None:
                self._carry_out(decision)
            if self._state is not None:
                write_state(self._state, self.planner)
        except EngineDeadError as error:
            logger.warning("the planner could not look, or not carry out what it decided: %s", error)
            with self._lock:
                self._failures += 1
            return None
        except Exception:
            logger.exception("the planner could not look, or not carry out what it decided")
            with self._lock:
                self._failures += 1
            return None
        with self._lock:
            before = self._decision
            self._decision, self._seen = decision, seen
            self._ticks += 1
            new = before is None or _wanted(before) != _wanted(decision)
            self._changes += before is not None and new
            self._reasons.update(map(kind_of, decision.reasons))
        if new:
            logger.info("%s: %s (%s)", self.mode, words(decision), "; ".join(decision.reasons))
        return decision

    def start(self) -> None:
        """Tick every interval in a thread of its own, until `close`."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, name="draftwise-planner", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.planner.config.interval):
            self.tick()

    def close(self) -> None:
        """Stop ticking. May be called again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def failed(self) -> None:
        """Report that a change failed. The caller logs the reason."""
        with self._lock:
            self._failures += 1

    def as_dict(self) -> dict[str, Any]:
        """The planner's wishes and reasons, for JSON."""
        with self._lock:
            decision, seen = self._decision, self._seen
            return {
                "mode": self.mode,
                "interval": self.planner.config.interval,
                "budget": self.planner.config.budget,
                "ticks": self._ticks,
                "changes": self._changes,
                "failures": self._failures,
                "decision": None if decision is None else decision.as_dict(),
                "words": "nothing was decided yet" if decision is None else words(decision),
                "seen": None
                if seen is None
                else {name: getattr(seen, name) for name in seen.__slots__ if name != "ready"},
            }

    def samples(self) -> Iterator[tuple[str, str, str, Mapping[str, str], float]]:
        """(name, what it is, "gauge" or "counter", labels, value) for metrics."""
        with self._lock:
            decision, seen = self._decision, self._seen
            counts = (
                ("planner_decisions", "Times the planner decided.", self._ticks),
                ("planner_changes", "Decisions that were another one than before.", self._changes),
                ("planner_failures", "Times it could not look or carry out.", self._failures),
            )
            reasons = dict(self._reasons)
        for name, text, value in counts:
            yield name, text, "counter", {}, float(value)
        for kind, count in sorted(reasons.items()):
            yield (
                "planner_reasons",
                "Reasons of decisions by kind.",
                "counter",
                {"reason": kind},
                float(count),
            )
        if decision is None:
            return
        for pool, wanted in decision.replicas.items():
            yield "planner_replicas", "Replicas wanted.", "gauge", {"pool": pool}, float(wanted)
        if seen is not None:
            if known(seen.requests):
                assert seen.requests is not None
                rate = seen.requests / self.planner.config.interval
                yield (
                    "planner_request_rate_seen",
                    "Requests per second in its last interval.",
                    "gauge",
                    {},
                    rate,
                )
            for pool, ready in seen.ready.items():
                yield "planner_replicas_ready", "Replicas that serve.", "gauge", {"pool": pool}, float(ready)
        labels = {"method": decision.method}
        yield (
            "planner_draft_length",
            "Drafts per step that it wants.",
            "gauge",
            labels,
            float(decision.drafts),
        )
        if decision.rate is not None:
            yield "planner_request_rate", "Requests per second it plans for.", "gauge", {}, decision.rate


def watch_one(planner: Planner, watch: LoadWatch, state: Path | None = None) -> PlannerService:
    """A planner that advises about one engine."""
    return PlannerService(planner, lambda now: watch.take(now, {ENGINES: 1}), state=state)


def _wanted(decision: Decision) -> tuple[Mapping[str, int], str, int]:
    return dict(decision.replicas), decision.method, decision.drafts


def words(decision: Decision) -> str:
    """Example: "2 engines, eagle3 K=4"."""
    how = "plain decoding" if decision.method == "none" else f"{decision.method} K={decision.drafts}"
    return f"{counted(decision.replicas)}, {how}"


def read_state(path: Path) -> dict[str, Any]:
    """The state that `write_state` wrote. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"planner: its state {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"planner: {path} is not the state of a planner")
    return value


def write_state(path: Path, planner: Planner) -> None:
    """Write what a planner remembers, whole or not at all. Raises ConfigError."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(planner.state()) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"planner: its state {path} cannot be written: {error.strerror}") from None

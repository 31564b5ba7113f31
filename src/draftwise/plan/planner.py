"""Decides the number of replicas, the method and the number of drafts: a state machine from observations to
decisions.

It has no clock, reads no file and starts nothing, so that its decisions are a function of its observations alone. The
formulas for replicas are NVIDIA Dynamo's; what is drafted and what is accepted are in the rates it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from draftwise.errors import ConfigError
from draftwise.plan.attainment import Attainment
from draftwise.plan.capacity import Capacity, Rates
from draftwise.plan.forecast import Habits, Load, loads_ahead
from draftwise.plan.predictors import Constant, Predictor, Recent, predictor
from draftwise.plan.staffing import Service, replicas_for
from draftwise.plan.ticks import DECODE, ENGINES, PREFILL, Decision, Observation, Reason, counted, known

_HISTORY = 4096
_MOST_HELD = 256
_MOST_RATE, _MOST_TOKENS = 1e9, float(1 << 24)
"""Observations beyond this value are faults of the observer."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """``interval``: seconds between ticks. ``mode``: whole engines, or pools that prefill and decode. ``budget``:
    devices in all; ``devices``: of a replica of each pool (missing: 1). ``least``: replicas of each pool that are
    always there. ``margin``: share of what a replica could do that is kept free. ``hold``: ticks for which fewer
    must have been enough before some are given up; None: as many as a new one takes to start, since one that is
    given up and wanted back costs that. ``most_change``: replicas added or given up in one tick, per pool.
    ``startup``: seconds until a new replica serves: a load that grows is planned for as it will be then.
    ``goal``: share of requests that are to find a place in time: they come at random times.
    ``dynamo``: the rule of Dynamo's planner: no queue, no growth, no hysteresis, no margin, no chance.
    """

    interval: float = 60.0
    mode: Literal["engines", "pools"] = "engines"
    budget: int = 8
    devices: Mapping[str, int] = field(default_factory=dict)
    least: int = 1
    margin: float = 0.0
    goal: float = 0.95
    hold: int | None = None
    most_change: int = 4
    startup: float = 60.0
    predictor: str = "constant"
    period: int = 1440
    dynamo: bool = False

    def __post_init__(self) -> None:
        if not (self.interval > 0 and math.isfinite(self.interval)):
            raise ConfigError(f"interval: expected seconds above 0, got {self.interval:g}")
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin: expected a share from 0 to 1, got {self.margin:g}")
        if not 0 < self.goal < 1:
            raise ConfigError(f"goal: expected a share between 0 and 1, got {self.goal:g}")
        if self.least < 0 or (self.hold or 0) < 0 or self.most_change < 1:
            raise ConfigError("expected least >= 0, hold >= 0 and most_change >= 1")
        if not 0 <= self.startup < math.inf:
            raise ConfigError(f"startup: expected seconds from 0 on, got {self.startup:g}")
        needed = sum(self.least * self.size(pool) for pool in self.pools)
        if self.budget < max(needed, 1):
            raise ConfigError(
                f"budget: {self.budget} devices are fewer than the {max(needed, 1)} of the least replicas"
            )

    @property
    def pools(self) -> tuple[str, ...]:
        return (ENGINES,) if self.mode == "engines" else (PREFILL, DECODE)

    @property
    def ticks_held(self) -> int:
        """``hold``, at least 1 unless it is given. Example: a start takes 45 s, ticks come every 30 s: 1."""
        if self.hold is not None:
            return self.hold
        return min(max(int(self.startup / self.interval), 1), _MOST_HELD)

    def size(self, pool: str) -> int:
        """Devices of a replica."""
        return self.devices.get(pool, 1)


class Planner:
    """Told of each interval in turn."""

    def __init__(self, config: PlannerConfig, capacity: Capacity) -> None:
        self.config = config
        self._capacity = capacity
        length = Constant() if config.dynamo else Recent()
        self._predictors: dict[str, Predictor] = {
            "rate": predictor(config.predictor, config.period),
            "isl": length,
            "osl": length,
        }
        self._habits = Habits()
        self._history: dict[str, list[float]] = {"rate": [], "isl": [], "osl": []}
        self._corrections = {"prefill": 1.0, "decode": 1.0}
        self._luck = 1.0
        self._attainment = Attainment(config.goal)
        self._recent: dict[str, list[int]] = {pool: [] for pool in config.pools}  # needed in the last ticks
        self._last: Decision | None = None

    # ------------------------------------------------------------------------------------------- a tick

    def on_tick(self, seen: Observation) -> Decision:
        """Take in an interval and decide. It never raises because of an observation."""
        reasons: list[str] = []
        current = self._current(seen)
        if not known(seen.requests):
            # The state is unknown: neither idle nor busy. Replicas stay as they are.
            return self._decide(seen, current, [Reason("no_data", "no data: everything stays")], None)
        assert seen.requests is not None
        self._remember(seen)
        if not self._history["isl"] or not self._history["osl"]:
            return self._decide(
                seen, self._floors(current), [Reason("nothing_seen", "no request was seen yet")], None
            )
        forecast = {name: self._predictors[name].predict(values) for name, values in self._history.items()}
        isl, osl = max(forecast["isl"], 1.0), max(forecast["osl"], 1.0)
        self._correct(seen, isl, osl)
        rates = self._capacity(isl, osl, self._corrections["decode"], self._luck)
        if not rates.known:
            reasons.append(
                Reason(
                    "unknown_size",
                    f"nothing is known of requests of {isl:.0f} + {osl:.0f} tokens: everything stays",
                )
            )
            return self._decide(seen, current, reasons, None)
        loads: Sequence[Load] = (Load(forecast["rate"], 0.0),)
        if not self.config.dynamo:
            loads = self._loads_ahead(seen, forecast["rate"], rates.wait, reasons)
        rate = max(load.rate for load in loads)
        needed = self._needed(loads, isl, osl, rates)
        replicas = counted(needed)
        reasons.append(
            Reason("load", f"{rate:.3g} requests/s of {isl:.0f} + {osl:.0f} tokens need {replicas}")
        )
        how = "plain" if rates.method == "none" else f"{rates.method} K={rates.drafts}"
        reasons.append(Reason("rate", f"{how}: at most {rates.output_tokens:.0f} tokens/s a replica"))
        if rates.late:
            reasons.append(Reason("limit", "no setting keeps to the limit per token"))
        target = self._steady(current, needed, reasons)
        return self._decide(
            seen,
            target,
            reasons,
            self._drafting(rates, isl, osl, rate, self._serving(seen, target), reasons),
            rate,
        )

    def _loads_ahead(
        self, seen: Observation, forecast: float, wait: float | None, reasons: list[str]
    ) -> tuple[Load, ...]:
        """Loads to be ready for: `loads_ahead`, and those who wait. ``wait``: seconds for which they may: as many as
        come in half of it are no backlog."""
        config = self.config
        *loads, found = loads_ahead(
            self._history["rate"],
            config.interval,
            config.startup,
            None if config.predictor == "constant" else forecast,
            self._habits,
        )
        if found.slope > math.sqrt(found.slope_var):
            slope = 60 * found.slope / config.interval
            reasons.append(Reason("growth", f"growing by {slope:.2g}/s a minute"))
        usual = 0.5 * max(load.rate for load in loads) * (wait or 0.0)
        extra = 0.0
        if known(seen.queue) and seen.queue and seen.queue > usual:
            extra = min((seen.queue - usual) / config.interval, _MOST_RATE)
            reasons.append(Reason("queue", f"{seen.queue:.0f} wait, {extra:.2g}/s more"))
        return tuple(Load(load.rate + extra, load.error) for load in loads)

    def _serving(self, seen: Observation, target: Mapping[str, int]) -> int:
        """Replicas that decode from now on: those that are there share the load until more have come."""
        pool = ENGINES if self.config.mode == "engines" else DECODE
        ready = seen.ready.get(pool, 0)
        return min(target[pool], ready) if ready else target[pool]

    def _drafting(
        self,
        rates: Rates,
        isl: float,
        osl: float,
        rate: float,
        serving: int,
        reasons: list[str],
    ) -> tuple[str, int]:
        """Method and drafts for what a replica will get: a full one may gain nothing by drafts that one with few
        requests gains much by. That changes at once, replicas come later."""
        if self.config.dynamo or serving < 1:
            return rates.method, rates.drafts
        load = rate / serving
        method, drafts = self._capacity.setting(isl, osl, load, self._corrections["decode"], self._luck)
        how = "plain decoding" if method == "none" else f"{method} K={drafts}"
        reasons.append(Reason("drafting", f"{how} is the quickest at {load:.3g} requests/s a replica"))
        return method, drafts

    def _current(self, seen: Observation) -> dict[str, int]:
        """The last decision; at the beginning, the present replicas."""
        if self._last is not None:
            return dict(self._last.replicas)
        return {pool: max(seen.ready.get(pool, 0), self.config.least) for pool in self.config.pools}

    def _remember(self, seen: Observation) -> None:
        assert seen.requests is not None
        if known(seen.attained) and seen.attained is not None and self._all_serve(seen):
            self._attainment.note(min(max(seen.requests, 0.0), _MOST_RATE), seen.attained)
        self._history["rate"].append(min(max(seen.requests, 0.0) / self.config.interval, _MOST_RATE))
        for name, value in (("isl", seen.isl), ("osl", seen.osl)):
            # An interval without requests says nothing about their lengths.
            if known(value) and value and value > 0:
                self._history[name].append(min(value, _MOST_TOKENS))
        self._habits = self._habits.after(self._history["rate"], self.config.interval)
        for values in self._history.values():
            if len(values) > _HISTORY:
                del values[: _HISTORY // 2]

    def _all_serve(self, seen: Observation) -> bool:
        """Whether all that were asked for served in this interval: who waits for a replica to start is not helped by
        more places later."""
        last = self._last
        return (
            last is not None
            and not seen.warming
            and all(seen.ready.get(pool, 0) >= n for pool, n in last.replicas.items())
        )

    def _correct(self, seen: Observation, isl: float, osl: float) -> None:
        """How much slower than the model the machines are, from times of replicas that are warm, and how many more
        drafts are accepted."""
        if seen.warming or not seen.requests:
            return
        expected = self._capacity(isl, osl, 1.0, self._luck)
        for name, value, model in (
            ("prefill", seen.ttft, expected.ttft),
            ("decode", seen.itl, self._itl_expected(seen, expected, osl)),
        ):
            if known(value) and value and value > 0 and 0 < model < math.inf:
                ratio = min(max(value / model, 0.5), 2.0)
                self._corrections[name] += 0.3 * (ratio - self._corrections[name])
        if known(seen.accepted_length) and seen.accepted_length and seen.accepted_length >= 1:
            drafts = seen.draft_length
            usual = self._capacity.accepted(min(max(drafts, 0.0), 63.0) if drafts and known(drafts) else None)
            if usual:
                ratio = min(max((seen.accepted_length - 1) / usual, 0.0), 1.5)
                self._luck += 0.3 * (ratio - self._luck)

    def _itl_expected(self, seen: Observation, rates: Rates, osl: float) -> float:
        """Seconds per token by the model, of as many requests at once as there were, and with the prompts that came in
        between: a replica with little to do is quick, which says nothing about a full one.

        Example: 2 requests/s of 100 tokens at 20 ms per token are 4 at once. If 4 at once take 15 ms by the model, and
        each prompt 100 ms, in which nobody decodes: 15 / (1 - 0.2) = 18.75 ms.
        """
        serving = seen.ready.get(ENGINES, 0)
        if self.config.dynamo or self.config.mode != "engines" or serving < 1 or not rates.curve:
            return rates.itl
        if not known(seen.itl) or not seen.itl or not seen.requests:
            return rates.itl
        load = seen.requests / self.config.interval / serving
        at_once = load * osl * seen.itl
        counts, times = zip(*rates.curve, strict=True)
        itl = float(np.interp(at_once, counts, times))
        return itl / max(1 - load * rates.reading, 0.25)

    def _needed(self, loads: Sequence[Load], isl: float, osl: float, rates: Rates) -> dict[str, int]:
        """Replicas by pool, enough for each of the loads.

        Example: 500 requests in 60 s of 3000 + 150 tokens, 40,000 prompt and 1,000 output tokens/s: 25,000 / 40,000
        -> 1 and 1,250 / 1,000 -> 2.
        """
        config = self.config
        free = 1.0 if config.dynamo else 1.0 - config.margin
        rate = max(load.rate for load in loads)
        prompt = rate * isl * min(1.0, self._corrections["prefill"]) / (rates.prompt_tokens * free)
        output = rate * osl / (rates.output_tokens * free) if rates.output_tokens > 0 else 0.0
        if config.mode == "engines":
            if config.dynamo or not rates.curve or rates.wait is None:
                return {ENGINES: _up(prompt + output)}
            service = Service(rates.curve, rates.reading, osl)
            late = self._attainment.may_be_late()
            horizon = config.startup + config.interval
            found = (
                replicas_for(rate / free, service, rates.wait, 1 - late, error=error / free, horizon=horizon)
                for rate, error in loads
            )
            return {ENGINES: max(found)}
        return {PREFILL: _up(prompt), DECODE: _up(output)}

    # ------------------------------------------------------------------------------------- what is let through

    def _steady(self, current: dict[str, int], needed: dict[str, int], reasons: list[str]) -> dict[str, int]:
        """Up at once, down when fewer were enough for some time; not too many at a time."""
        config = self.config
        target: dict[str, int] = {}
        wanted = self._within_budget(self._floors(needed), reasons)
        for pool in config.pools:
            now, want = current[pool], wanted[pool]
            recent, held = self._recent[pool], config.ticks_held
            recent.append(want)
            del recent[: -held - 1]
            if want < now and not config.dynamo:
                most = min(max(recent), now) if len(recent) > held else now
                if most > want:
                    reasons.append(Reason("patience", f"{pool}: {want} would do, {most} for {held} ticks"))
                want = most
            change = max(-config.most_change, min(config.most_change, want - now))
            if change != want - now:
                reasons.append(Reason("most_change", f"{pool}: {change:+d} of {want - now:+d} now"))
            target[pool] = now + change
        return self._within_budget(target, reasons)

    def _floors(self, replicas: Mapping[str, int]) -> dict[str, int]:
        return {pool: max(replicas[pool], self.config.least) for pool in self.config.pools}

    def _within_budget(self, replicas: dict[str, int], reasons: list[str]) -> dict[str, int]:
        """Within the budget, in proportion; floors first.

        Example: 3 and 9 replicas of one device, budget 8, least 1: 1 + 6 * 2 / 10 = 2 and 1 + 6 * 8 / 10 = 5.
        """
        config = self.config
        used = sum(n * config.size(pool) for pool, n in replicas.items())
        if used <= config.budget:
            return replicas
        reasons.append(Reason("budget", f"{used} devices wanted, {config.budget} in the budget"))
        least = {pool: min(config.least, n) for pool, n in replicas.items()}
        left = config.budget - sum(n * config.size(pool) for pool, n in least.items())
        more = used - sum(n * config.size(pool) for pool, n in least.items())
        share = max(left, 0) / more if more > 0 else 0.0
        return {pool: least[pool] + int((n - least[pool]) * share) for pool, n in replicas.items()}

    def _decide(
        self,
        seen: Observation,
        replicas: dict[str, int],
        reasons: list[str],
        drafting: tuple[str, int] | None,
        rate: float | None = None,
    ) -> Decision:
        last = self._last
        if drafting is None:
            drafting = (last.method, last.drafts) if last is not None else ("none", 0)
        method, drafts = drafting
        replicas = self._within_budget(replicas, [])
        changed = last is not None and dict(last.replicas) != replicas
        self._last = Decision(seen.time, replicas, method, drafts, tuple(reasons), changed, rate)
        return self._last

    # ------------------------------------------------------------------------------------------- restarts

    @property
    def wanted(self) -> int | None:
        """Whole engines it asked for last; None: nothing yet, or its pools are others."""
        return None if self._last is None else self._last.replicas.get(ENGINES)

    def state(self) -> dict[str, Any]:
        """All that it remembers, for JSON."""
        return {
            "history": {name: list(values) for name, values in self._history.items()},
            "corrections": dict(self._corrections),
            "luck": self._luck,
            "habits": asdict(self._habits),
            "attainment": [self._attainment.late, self._attainment.ended],
            "recent": {pool: list(values) for pool, values in self._recent.items()},
            "last": None if self._last is None else self._last.as_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises ConfigError if it is of another kind of deployment."""
        try:
            if set(state["recent"]) != set(self.config.pools):
                raise ConfigError(f"planner: its state is of pools {sorted(state['recent'])}")
            self._history = {n: [float(v) for v in state["history"][n]] for n in ("rate", "isl", "osl")}
            self._corrections = {n: float(state["corrections"][n]) for n in ("prefill", "decode")}
            self._luck = float(state["luck"])
            self._habits = Habits.of(state.get("habits", {}))  # older files have none
            self._attainment = Attainment(self.config.goal, *map(float, state["attainment"]))
            self._recent = {pool: [int(v) for v in state["recent"][pool]] for pool in self.config.pools}
            last = state["last"]
            self._last = None if last is None else Decision(**{**last, "reasons": tuple(last["reasons"])})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"planner: this is not the state of a planner: {error!r}") from None


def _up(replicas: float) -> int:
    """Whole replicas. Example: 1.25 is 2, 2.0000001 is 2: a rounding error is no replica."""
    return max(math.ceil(min(replicas, 1e9) - 1e-6), 0)

"""Decides the number of replicas, the method and the number of drafts: a state machine from observations to
decisions.

It has no clock, reads no file and starts nothing, so that its decisions are a function of its observations alone. The
formulas for replicas are NVIDIA Dynamo's; what is drafted and what is accepted are in the rates it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from draftwise.errors import ConfigError
from draftwise.plan.capacity import Capacity, Rates
from draftwise.plan.predictors import Predictor, predictor
from draftwise.plan.ticks import DECODE, ENGINES, PREFILL, Decision, Observation, Reason, known

_HISTORY = 4096
_TREND = 8
"""Intervals over which growth is looked for."""
_MOST_RATE, _MOST_TOKENS = 1e9, float(1 << 24)
"""Observations beyond this value are faults of the observer."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """``interval``: seconds between ticks. ``mode``: whole engines, or pools that prefill and decode. ``budget``:
    devices in all; ``devices``: of a replica of each pool (missing: 1). ``least``: replicas of each pool that are
    always there. ``margin``: share of what a replica could do that is kept free. ``hold``: ticks for which fewer
    must have been enough before some are given up. ``most_change``: replicas added or given up in one tick, per
    pool. ``startup``: seconds until a new replica serves: a load that grows is planned for as it will be then.
    ``dynamo``: the rule of Dynamo's planner: no queue, no growth, no hysteresis, no margin.
    """

    interval: float = 60.0
    mode: Literal["engines", "pools"] = "engines"
    budget: int = 8
    devices: Mapping[str, int] = field(default_factory=dict)
    least: int = 1
    margin: float = 0.0
    hold: int = 3
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
        if self.least < 0 or self.hold < 0 or self.most_change < 1:
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

    def size(self, pool: str) -> int:
        """Devices of a replica."""
        return self.devices.get(pool, 1)


@dataclass(slots=True)
class _Patience:
    """Of a pool: for how many ticks fewer replicas must have been enough before some are given up.

    It doubles when replicas that were given up are wanted back soon, and comes down again in calm times, so that a
    load at the border between two numbers does not make the pool swing.
    """

    ticks: int
    calm: int = 0  # ticks without a change
    since_down: int = 1 << 20  # ticks since some were given up

    def note(self, change: int, hold: int) -> None:
        if change > 0 and self.since_down <= 4 * self.ticks:
            self.ticks = min(2 * self.ticks, 16 * max(hold, 1))
        self.since_down = 0 if change < 0 else min(self.since_down + 1, 1 << 20)
        self.calm = 0 if change else self.calm + 1
        if self.calm > 8 * self.ticks:
            self.ticks, self.calm = max(self.ticks // 2, hold), 0


class Planner:
    """Told of each interval in turn."""

    def __init__(self, config: PlannerConfig, capacity: Capacity) -> None:
        self.config = config
        self._capacity = capacity
        self._predictors: dict[str, Predictor] = {
            name: predictor(config.predictor if name == "rate" else "constant", config.period)
            for name in ("rate", "isl", "osl")
        }
        self._history: dict[str, list[float]] = {"rate": [], "isl": [], "osl": []}
        self._corrections = {"prefill": 1.0, "decode": 1.0}
        self._accepted: float | None = None
        self._lower: dict[str, list[int]] = {pool: [] for pool in config.pools}
        self._patience = {pool: _Patience(config.hold) for pool in config.pools}
        self._last: Decision | None = None

    # ------------------------------------------------------------------------------------------- a tick

    def on_tick(self, seen: Observation) -> Decision:
        """Take in an interval and decide. It never raises because of an observation."""
        reasons: list[str] = []
        current = self._current(seen)
        if not known(seen.requests):
            # Nobody knows what happened: neither idle nor busy. What runs goes on.
            return self._decide(seen, current, [Reason("no_data", "no data: everything stays")], None)
        assert seen.requests is not None
        self._remember(seen)
        if not self._history["isl"] or not self._history["osl"]:
            return self._decide(
                seen, self._floors(current), [Reason("nothing_seen", "no request was seen yet")], None
            )
        forecast = {name: self._predictors[name].predict(values) for name, values in self._history.items()}
        isl, osl = max(forecast["isl"], 1.0), max(forecast["osl"], 1.0)
        rate = forecast["rate"]
        growth = 0.0 if self.config.dynamo else _slope(self._history["rate"][-_TREND:])
        if growth > 0:
            rate += growth * self.config.startup / self.config.interval
            reasons.append(
                Reason("growth", f"growing by {60 * growth / self.config.interval:.2g}/s a minute")
            )
        if known(seen.queue) and seen.queue and not self.config.dynamo:
            extra = min(max(seen.queue / self.config.interval, 0.0), _MOST_RATE)
            rate += extra
            reasons.append(Reason("queue", f"{seen.queue:.0f} wait, {extra:.2g}/s more"))
        self._correct(seen, isl, osl)
        rates = self._capacity(isl, osl, self._corrections["decode"], self._accepted)
        if not rates.known:
            reasons.append(
                Reason(
                    "unknown_size",
                    f"nothing is known of requests of {isl:.0f} + {osl:.0f} tokens: everything stays",
                )
            )
            return self._decide(seen, current, reasons, None)
        needed = self._needed(rate, isl, osl, rates)
        replicas = ", ".join(f"{n} {pool}" for pool, n in needed.items())
        reasons.append(
            Reason("load", f"{rate:.3g} requests/s of {isl:.0f} + {osl:.0f} tokens need {replicas}")
        )
        how = "plain" if rates.method == "none" else f"{rates.method} K={rates.drafts}"
        reasons.append(Reason("rate", f"{how}: at most {rates.output_tokens:.0f} tokens/s a replica"))
        if rates.late:
            reasons.append(Reason("limit", "no setting keeps to the limit per token"))
        target = self._steady(current, needed, reasons)
        return self._decide(
            seen, target, reasons, self._drafting(rates, isl, osl, rate, target, reasons), rate
        )

    def _drafting(
        self,
        rates: Rates,
        isl: float,
        osl: float,
        rate: float,
        target: Mapping[str, int],
        reasons: list[str],
    ) -> tuple[str, int]:
        """Method and drafts for what a replica will get: a full one may gain nothing by drafts that one with few
        requests gains much by."""
        serving = target[ENGINES] if self.config.mode == "engines" else target[DECODE]
        if self.config.dynamo or serving < 1:
            return rates.method, rates.drafts
        load = rate / serving
        method, drafts = self._capacity.setting(isl, osl, load, self._corrections["decode"], self._accepted)
        how = "plain decoding" if method == "none" else f"{method} K={drafts}"
        reasons.append(Reason("drafting", f"{how} is the quickest at {load:.3g} requests/s a replica"))
        return method, drafts

    def _current(self, seen: Observation) -> dict[str, int]:
        """What was asked for last; at the beginning, what is there."""
        if self._last is not None:
            return dict(self._last.replicas)
        return {pool: max(seen.ready.get(pool, 0), self.config.least) for pool in self.config.pools}

    def _remember(self, seen: Observation) -> None:
        assert seen.requests is not None
        self._history["rate"].append(min(max(seen.requests, 0.0) / self.config.interval, _MOST_RATE))
        for name, value in (("isl", seen.isl), ("osl", seen.osl)):
            # An interval without requests says nothing about their lengths.
            if known(value) and value and value > 0:
                self._history[name].append(min(value, _MOST_TOKENS))
        for values in self._history.values():
            if len(values) > _HISTORY:
                del values[: _HISTORY // 2]

    def _correct(self, seen: Observation, isl: float, osl: float) -> None:
        """How much slower than the model the machines are, from times of replicas that are warm."""
        if seen.warming or not seen.requests:
            return
        expected = self._capacity(isl, osl, 1.0, self._accepted)
        for name, value, model in (
            ("prefill", seen.ttft, expected.ttft),
            ("decode", seen.itl, expected.itl),
        ):
            if known(value) and value and value > 0 and 0 < model < math.inf:
                ratio = min(max(value / model, 0.5), 2.0)
                self._corrections[name] += 0.3 * (ratio - self._corrections[name])
        if known(seen.accepted_length) and seen.accepted_length and seen.accepted_length >= 1:
            before = self._accepted if self._accepted is not None else seen.accepted_length
            self._accepted = before + 0.3 * (seen.accepted_length - before)

    def _needed(self, rate: float, isl: float, osl: float, rates: Rates) -> dict[str, int]:
        """Replicas by pool.

        Example: 500 requests in 60 s of 3000 + 150 tokens, 40,000 prompt and 1,000 output tokens/s: 25,000 / 40,000
        -> 1 and 1,250 / 1,000 -> 2.
        """
        config = self.config
        free = 1.0 if config.dynamo else 1.0 - config.margin
        prompt = rate * isl * min(1.0, self._corrections["prefill"]) / (rates.prompt_tokens * free)
        output = rate * osl / (rates.output_tokens * free) if rates.output_tokens > 0 else 0.0
        if config.mode == "engines":
            return {ENGINES: _up(prompt + output)}
        return {PREFILL: _up(prompt), DECODE: _up(output)}

    # ------------------------------------------------------------------------------------- what is let through

    def _steady(self, current: dict[str, int], needed: dict[str, int], reasons: list[str]) -> dict[str, int]:
        """Up at once, down when fewer were enough for some time; not too many at a time."""
        config = self.config
        target: dict[str, int] = {}
        wanted = self._within_budget(self._floors(needed), reasons)
        for pool in config.pools:
            now, want = current[pool], wanted[pool]
            lower, patience = self._lower[pool], self._patience[pool]
            if want >= now:
                lower.clear()
            elif not config.dynamo:
                lower.append(want)
                if len(lower) <= patience.ticks:
                    waited = f"waiting ({len(lower)} of {patience.ticks})"
                    reasons.append(Reason("patience", f"{pool}: {want} would do, {waited}"))
                    want = now
                else:
                    want = max(lower)  # the most that was needed meanwhile
                    lower.clear()
            change = max(-config.most_change, min(config.most_change, want - now))
            if change != want - now:
                reasons.append(Reason("most_change", f"{pool}: {change:+d} of {want - now:+d} now"))
            target[pool] = now + change
            patience.note(change, config.hold)
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
            "accepted": self._accepted,
            "patience": {pool: [p.ticks, p.calm, p.since_down] for pool, p in self._patience.items()},
            "lower": {pool: list(values) for pool, values in self._lower.items()},
            "last": None if self._last is None else self._last.as_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises ConfigError if it is of another kind of deployment."""
        try:
            if set(state["lower"]) != set(self.config.pools):
                raise ConfigError(f"planner: its state is of pools {sorted(state['lower'])}")
            self._history = {n: [float(v) for v in state["history"][n]] for n in ("rate", "isl", "osl")}
            self._corrections = {n: float(state["corrections"][n]) for n in ("prefill", "decode")}
            self._accepted = None if state["accepted"] is None else float(state["accepted"])
            self._lower = {pool: [int(v) for v in state["lower"][pool]] for pool in self.config.pools}
            self._patience = {
                pool: _Patience(*map(int, state["patience"][pool])) for pool in self.config.pools
            }
            last = state["last"]
            self._last = None if last is None else Decision(**{**last, "reasons": tuple(last["reasons"])})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"planner: this is no state of a planner: {error!r}") from None


def _slope(values: list[float]) -> float:
    """Growth per interval by least squares; 0 if it is not twice as large as chance alone may make it.

    Example: 1, 2, 3, 4 is 1; 5, 1, 4, 2 is 0.
    """
    n = len(values)
    if n < 4:
        return 0.0
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = n * (n * n - 1) / 12
    slope = math.fsum((i - middle) * (v - mean) for i, v in enumerate(values)) / spread
    rest = math.fsum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    return slope if abs(slope) > 2 * math.sqrt(rest / (n - 2) / spread) else 0.0


def _up(replicas: float) -> int:
    """Whole replicas. Example: 1.25 is 2, 2.0000001 is 2: a rounding error is no replica."""
    return max(math.ceil(min(replicas, 1e9) - 1e-6), 0)

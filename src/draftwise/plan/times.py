"""Times of steps: one contract for planner and simulator, measured, from a formula, or derived from a device.

The parts of a step are those that the controller knows (`adapt.performance`): the target's pass with all that goes with
it, and each drafter's. Acceptance is not in here: what a pass takes depends on sizes, what is accepted on the text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from draftwise.adapt.performance import PerformanceModel
from draftwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Nothing does what was asked, and why. ``nearest``: what comes closest, where something does."""

    reason: str
    nearest: object = None


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The question lies outside of what is known."""

    reason: str


class StepTimes(ABC):
    """Seconds of the parts of a step.

    ``kv_tokens``: tokens that the cache holds, None: not known. ``methods``: drafters whose times are known.
    ``max_context``, ``most_drafts``: longest request, and most drafts, that are known of; None: no limit.

    All times are means. ``behind``: by how much longer, in all, the steps after a prompt take. ``step_factors``,
    ``prompt_factors``: equally likely factors, 1 on average, by which single steps differ from the mean, those without
    and those with a prompt in them; empty: they do not. ``rests``: (seconds of work up to which it holds, factor) of an
    engine that did nothing for ``pause`` seconds; the first one is of its first step.
    """

    kv_tokens: int | None = None
    methods: Sequence[str] = ()
    max_context: int | None = None
    most_drafts: int | None = None
    behind: float = 0.0
    step_factors: Sequence[float] = ()
    prompt_factors: Sequence[float] = ()
    rests: Sequence[tuple[float, float]] = ()
    pause: float = 0.0

    @abstractmethod
    def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
        """The time of the target's part of a step over ``rows`` rows of ``requests`` >= 1 requests that decode, with
        ``context``
        tokens in the cache together."""

    @abstractmethod
    def draft_time(
        self, method: str, requests: int, nodes: int, catch_up: int = 0, sampled: bool = False
    ) -> float:
        """To draft ``nodes`` nodes for each of ``requests`` requests, as in `PerformanceModel.draft_time`."""

    @abstractmethod
    def prompt_time(self, start: int, end: int, alone: bool) -> float:
        """The time that tokens ``start`` .. ``end - 1`` of a prompt add to a step. ``alone``: nothing else is in the
        step, so
        that what every pass takes is part of it."""

    def reading_time(self, method: str, start: int, end: int) -> float:
        """A drafter's time to read tokens ``start`` .. ``end - 1`` of a prompt, without its first drafts."""
        return 0.0

    def outside(self, requests: int, rows: int, context: int) -> str | None:
        """Why a step of this size is beyond what is known; None: it is not."""
        return None


class Polynomial(StepTimes):
    """The passes of NVIDIA Dynamo's simulator for an 8 B model: prefill of n tokens takes 4.21e-7 n^2 + 1.518e-2 n +
    16.5 ms, decoding -25.74 u^2 + 54.01 u + 5.74 ms with u the share of the cache in use.

    Rows behind each request's first cost as much as tokens of a prompt; a drafted node takes ``draft_ms``.
    """

    def __init__(
        self,
        kv_tokens: int,
        *,
        prefill: tuple[float, float, float] = (4.21e-7, 1.518e-2, 16.5),
        decode: tuple[float, float, float] = (-25.74, 54.01, 5.74),
        draft_ms: float = 0.5,
        methods: Sequence[str] = ("model",),
    ) -> None:
        """``prefill``, ``decode``: coefficients from the square down, in milliseconds."""
        numbers = (*prefill, *decode, draft_ms)
        if kv_tokens < 1 or not all(map(math.isfinite, numbers)) or draft_ms < 0:
            raise ConfigError("polynomial: expected finite coefficients and at least one token of cache")
        self.kv_tokens = kv_tokens
        self.methods = tuple(methods)
        self._prefill, self._decode, self._draft = prefill, decode, draft_ms

    def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
        a, b, c = self._decode
        assert self.kv_tokens is not None
        u = min(context / self.kv_tokens, 1.0)
        return (a * u * u + b * u + c + self._prefill[1] * (rows - requests)) / 1000

    def draft_time(
        self, method: str, requests: int, nodes: int, catch_up: int = 0, sampled: bool = False
    ) -> float:
        return self._draft * nodes / 1000 if requests else 0.0

    def prompt_time(self, start: int, end: int, alone: bool) -> float:
        a, b, c = self._prefill
        return (a * (end * end - start * start) + b * (end - start) + (c if alone else 0.0)) / 1000

    def outside(self, requests: int, rows: int, context: int) -> str | None:
        assert self.kv_tokens is not None
        if context > self.kv_tokens:
            return f"{context} tokens in a cache of {self.kv_tokens}"
        return None


class Curve:
    """A line through measured points (x, y), straight between them, and beyond the last one as between the last two."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        """At least one point; x increasing, all numbers finite, y >= 0. Raises ConfigError."""
        self.xs = [float(x) for x, _ in points]
        self.ys = [float(y) for _, y in points]
        if not points or not all(map(math.isfinite, (*self.xs, *self.ys))):
            raise ConfigError("a curve needs at least one point, and finite numbers")
        if any(b <= a for a, b in zip(self.xs, self.xs[1:], strict=False)) or min(self.ys) < 0:
            raise ConfigError("a curve needs lengths that grow and times that are not negative")

    def at(self, x: float) -> float:
        """Example: through (0, 1) and (10, 3): 2 at 5, and 4 at 15."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        slope = (ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i])
        return ys[i] + slope * (x - xs[i])


class Measured(StepTimes):
    """Measured times of a machine: the controller's own model for decoding steps, a curve for prompts."""

    def __init__(
        self,
        model: PerformanceModel,
        prefill: Sequence[tuple[int, float]],
        *,
        kv_tokens: int,
        most_requests: int,
        most_rows: int,
        max_context: int,
        most_drafts: int | None = None,
        methods: Sequence[str] = (),
        readings: Mapping[str, Sequence[tuple[int, float]]] = MappingProxyType({}),
        behind: float = 0.0,
        step_factors: Sequence[float] = (),
        prompt_factors: Sequence[float] = (),
        rests: Sequence[tuple[float, float]] = (),
        pause: float = 0.0,
    ) -> None:
        """``prefill``: (tokens, seconds from an empty cache to the first token). ``most_requests``, ``most_rows``: the
        largest that were measured; ``max_context``: the longest prompt that was. ``readings``: method -> (tokens,
        seconds that its drafter reads them). ``step_factors``, ``prompt_factors``: what single measurements were of
        the times given here, which are medians."""
        self.model = model
        self._curve = Curve(prefill)
        self._readings = {method: Curve(points) for method, points in readings.items() if points}
        self._step_mean, self.step_factors = _around_one(step_factors)
        self._prompt_mean, self.prompt_factors = _around_one(prompt_factors)
        self.behind = behind
        self.rests, self.pause = tuple(rests), pause
        # What a pass takes whatever its length: where the curve meets the axis.
        self._fixed = min(max(self._curve.at(0.0), 0.0), self._curve.ys[0])
        self.kv_tokens = kv_tokens
        self.methods = tuple(methods)
        self.max_context = max_context
        self.most_drafts = most_drafts
        self._most_requests, self._most_rows = most_requests, most_rows

    def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
        return self.model.target_time(requests, rows, context, sampled) * self._step_mean

    def draft_time(
        self, method: str, requests: int, nodes: int, catch_up: int = 0, sampled: bool = False
    ) -> float:
        return self.model.draft_time(method, requests, nodes, catch_up, sampled) * self._step_mean

    def reading_time(self, method: str, start: int, end: int) -> float:
        curve = self._readings.get(method)
        if curve is None:
            return 0.0
        return max(curve.at(end) - (curve.at(start) if start else 0.0), 0.0) * self._prompt_mean

    def prompt_time(self, start: int, end: int, alone: bool) -> float:
        more = max(self._curve.at(end) - (self._curve.at(start) if start else self._fixed), 0.0)
        return (more + (self._fixed if alone else 0.0)) * self._prompt_mean

    def outside(self, requests: int, rows: int, context: int) -> str | None:
        # A measured size stands for those up to half as large again.
        if requests > 1.5 * self._most_requests:
            return f"{requests} requests at once; measured up to {self._most_requests}"
        if rows > 1.5 * self._most_rows:
            return f"{rows} rows in a step; measured up to {self._most_rows}"
        if context > 1.5 * self.max_context_or(context) * max(requests, 1):
            return f"{context // max(requests, 1)} tokens of context; measured up to {self.max_context}"
        return None

    def max_context_or(self, other: int) -> int:
        """The longest context measured; ``other`` if that is not known."""
        return other if self.max_context is None else self.max_context


def _around_one(factors: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """(mean, factors divided by it). Example: 1, 1, 2.5 are 1.5 and 2/3, 2/3, 5/3."""
    if not factors:
        return 1.0, ()
    mean = math.fsum(factors) / len(factors)
    return mean, tuple(f / mean for f in factors)


def check_methods(times: StepTimes, methods: Mapping[str, object] | Sequence[str]) -> None:
    """Raise ConfigError for a method whose drafting was not measured."""
    for method in methods:
        if method != "none" and method not in times.methods:
            known = ", ".join(times.methods) or "none"
            raise ConfigError(f"method: what {method!r} takes to draft is not known here (known: {known})")

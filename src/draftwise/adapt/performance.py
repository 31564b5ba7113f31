"""How long a step takes, learned while steps run: what the controller decides by, and what a planner or simulator can
reuse, since it says nothing about acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from draftwise.adapt.controller import StepShape
from draftwise.adapt.curves import Cell, Speed, TimeCurve

_TARGET_PRIOR = (1.0, 0.005, 0.03, 0.0, 0.0, 0.003, 0.001)
"""Relative cost of `_target_features` before anything is known: reading the weights, and a thirtieth of it per row."""
_DRAFT_PRIOR = (0.1, 0.01, 1.0, 0.02, 0.02)
"""The prior of `_draft_features`: a pass per drafted node, nearly independent of the number of requests."""


def bucket(n: int) -> int:
    """Sizes that are treated alike: exact up to 16, above by eighths of a power of two.

    Example: 0, 1, ..., 16 are themselves; 17 -> 16, 18 and 19 -> 17, 32 -> 24.
    """
    if n <= 8:
        return n
    shift = n.bit_length() - 4
    return 8 * shift + (n >> shift)


def class_of_batch(requests: int) -> int:
    """Numbers of requests that say enough of each other to choose by: each for itself up to 8, then half an octave.

    Example: 64 and 80 are 32, 96 is 36.
    """
    return requests if requests <= 8 else bucket(requests) & ~3


_OCTAVE = 4
"""Classes of contexts in an octave: from fewer, the formula could not tell a growing context from a slower machine."""


def _context_bucket(context: int, requests: int) -> int:
    """Mean context by quarters of a power of two from 128 tokens on.

    Example: under 128 -> 0, under 160 -> 1, under 192 -> 2, under 224 -> 3, under 256 -> 4, under 320 -> 5.
    """
    mean = context // max(requests, 1)
    if mean < 128:
        return 0
    octave = mean.bit_length() - 8
    return 1 + _OCTAVE * octave + (mean >> (octave + 5)) % _OCTAVE


def _target_features(requests: int, rows: int, context: int) -> tuple[float, ...]:
    """Constant, requests, rows, rows beyond 8 and beyond 32 (where arithmetic takes over from reading weights), tokens
    of context read, and read again per row: the last two in thousands."""
    kilo = context / 1000
    return (
        1.0,
        float(requests),
        float(rows),
        float(max(rows - 8, 0)),
        float(max(rows - 32, 0)),
        kilo,
        kilo * rows / max(requests, 1),
    )


def _draft_features(requests: int, nodes: int, catch_up: int) -> tuple[float, ...]:
    """Constant, requests, nodes per request, nodes in all, tokens caught up on."""
    return (1.0, float(requests), float(nodes), float(requests * nodes), float(catch_up))


class PassTime(NamedTuple):
    """What the target's part of a step takes: ``rows`` of all ``requests``, with ``context`` tokens before each."""

    requests: int
    rows: int
    context: int
    seconds: float


class PerformanceModel:
    """Seconds of a step: of the target's part (everything but drafting: forward, verification, host) as a function of
    (requests, rows, context), and of each drafter's part as a function of (requests, nodes, tokens to catch up on).

    Greedy and sampled steps are kept apart, since verification costs differ. Every measurement is a time that somebody
    else read off the engine's clock: the model itself has none.
    """

    def __init__(self) -> None:
        self._speed = Speed()
        self._targets: dict[bool, TimeCurve] = {}
        self._drafters: dict[tuple[str, bool], TimeCurve] = {}
        self._prompt = Cell((1.0,))

    def _target(self, sampled: bool) -> TimeCurve:
        curve = self._targets.get(sampled)
        if curve is None:
            axes = (1.0, 1.0, 2.0 / _OCTAVE)
            curve = self._targets[sampled] = TimeCurve(_TARGET_PRIOR, self._speed, axes, tells_speed=True)
        return curve

    def _drafter(self, method: str, sampled: bool) -> TimeCurve:
        curve = self._drafters.get((method, sampled))
        if curve is None:
            curve = self._drafters[method, sampled] = TimeCurve(_DRAFT_PRIOR, self._speed, (1.0, 1.0, 2.0))
        return curve

    # ------------------------------------------------------------------------------------------- prediction

    def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
        """Seconds of a step over ``rows`` rows of ``requests`` requests that decode, with ``context`` tokens in the
        cache together; 0 while nothing was measured."""
        key = (bucket(requests), bucket(rows), _context_bucket(context, requests))
        return self._target(sampled).predict(key, _target_features(requests, rows, context))

    def draft_time(
        self, method: str, requests: int, nodes: int, catch_up: int = 0, sampled: bool = False
    ) -> float:
        """Seconds to draft ``nodes`` nodes for each of ``requests`` requests; ``catch_up``: committed tokens the
        drafter has to see first, in all, beyond those of a step before this one. 0 while nothing was measured."""
        if requests == 0 or nodes == 0:
            return 0.0
        key = (bucket(requests), nodes, catch_up.bit_length())
        return self._drafter(method, sampled).predict(key, _draft_features(requests, nodes, catch_up))

    def catch_up_time(self, method: str, requests: int, nodes: int, lag: int, sampled: bool = False) -> float:
        """Seconds by which `draft_time` is longer if ``lag`` committed tokens have to be seen first."""
        if not lag:
            return 0.0
        usual = self.draft_time(method, requests, nodes, 0, sampled)
        late = max(self.draft_time(method, requests, nodes, lag, sampled) - usual, 0.0)
        # A guess from few steps may be wild. No drafter reads slower than the target.
        slowest = self.prompt_time(lag)
        return min(late, slowest) if slowest > 0 else late

    def prompt_time(self, rows: int) -> float:
        """Seconds that ``rows`` prompt tokens add to a step; 0 while none was measured."""
        return self._prompt.median * rows * self._speed.value

    def times_measured(self, requests: int, rows: int, context: int, sampled: bool = False) -> int:
        """How often the target's part was measured at this point or close to it: with up to half as many requests
        more or less and as many more rows than those, and contexts of up to twice or half the length."""
        more = rows - requests
        near = range(requests, requests + 1)
        if requests > 8:
            near = range(requests - requests // 3, requests + requests // 2 + 1)
        context = _context_bucket(context, requests)
        buckets = {(bucket(n), bucket(n + more)) for n in near}
        contexts = range(max(context - _OCTAVE, 0), context + _OCTAVE + 1)
        return self._target(sampled).count((n, m, c) for n, m in buckets for c in contexts)

    # ----------------------------------------------------------------------------------------- observation

    def observe_target(self, shape: StepShape, seconds: float, times: int = 1) -> float:
        """A step's part of the target, which says as much as those of so many steps; answers what such a step takes by
        now (with a prompt in it: ``seconds``)."""
        requests, rows, context = shape.requests, shape.rows, shape.context
        if not shape.prompt_rows:
            key = (bucket(requests), bucket(rows), _context_bucket(context, requests))
            features = _target_features(requests, rows, context)
            return self._target(shape.sampled).observe(key, features, seconds, times)
        decoding = self.target_time(requests, rows, context, shape.sampled) if requests else 0.0
        if seconds > decoding:
            self._prompt.add((seconds - decoding) / shape.prompt_rows / self._speed.value, (1.0,))
        return seconds

    def observe_draft(
        self,
        method: str,
        requests: int,
        nodes: int,
        catch_up: int,
        sampled: bool,
        seconds: float,
    ) -> None:
        """A drafter's part of a step."""
        key = (bucket(requests), nodes, catch_up.bit_length())
        features = _draft_features(requests, nodes, catch_up)
        self._drafter(method, sampled).observe(key, features, seconds)

    def teach_target(
        self, requests: int, rows: int, context: int, seconds: float, sampled: bool = False
    ) -> None:
        """A profile's time of steps that decode."""
        key = (bucket(requests), bucket(rows), _context_bucket(context, requests))
        self._target(sampled).teach(key, _target_features(requests, rows, context), seconds)

    def teach_passes(self, times: Iterable[PassTime]) -> None:
        """What a device's passes take, whatever is drawn behind them."""
        for requests, rows, context, seconds in times:
            for sampled in (False, True):
                self.teach_target(requests, rows, context * requests, seconds, sampled)

    def teach_draft(self, method: str, requests: int, nodes: int, seconds: float) -> None:
        """A profile's time of a drafter."""
        self._drafter(method, False).teach(
            (bucket(requests), nodes, 0), _draft_features(requests, nodes, 0), seconds
        )

    # ------------------------------------------------------------------------------------------------ state

    def as_dict(self) -> dict[str, Any]:
        """All measurements, for JSON; times are in seconds at the speed of the machine when they were taken."""
        return {
            "target": {str(sampled): curve.as_list() for sampled, curve in self._targets.items()},
            "draft": {
                f"{method}:{sampled}": curve.as_list() for (method, sampled), curve in self._drafters.items()
            },
            "prompt_seconds_per_token": self._prompt.median,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PerformanceModel:
        """The model whose `as_dict` this is."""
        model = cls()
        for sampled, points in saved["target"].items():
            model._target(sampled == "True").load(points)
        for name, points in saved["draft"].items():
            method, _, sampled = name.rpartition(":")
            model._drafter(method, sampled == "True").load(points)
        if saved["prompt_seconds_per_token"]:
            model._prompt.add(float(saved["prompt_seconds_per_token"]), (1.0,))
        return model

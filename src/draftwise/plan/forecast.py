"""The load to prepare for: what is known of it now, and until new replicas serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

_RECENT = 8
"""Intervals that are looked at."""
_FEW = 4
"""Intervals below which the newest alone counts, and nothing is said of how fast loads change."""
_FADE, _FADE_SCATTER = 0.9, 0.97
"""What an interval counts for in the next one: of how fast loads change, and of how they scatter, which changes less
and of which eight intervals say little."""
_LEAST_CHANGE = 0.03
"""Share by which loads are taken to change from one interval to the next, at least."""


class Load(NamedTuple):
    """Requests per second that are expected, and the standard error of that."""

    rate: float
    error: float


@dataclass(frozen=True, slots=True)
class Habits:
    """How the load behaves, learned from it. ``change``: mean square of the share by which it changes from one interval
    to the next; ``scatter``: variance of what an interval counts, in multiples of what requests have that come each for
    itself (Poisson's: their number)."""

    change: float = 0.05**2
    scatter: float = 1.0

    @property
    def noise(self) -> float:
        """``scatter``; never less than that of requests that come each for itself."""
        return max(self.scatter, 1.0)

    def after(self, rates: Sequence[float], interval: float) -> Habits:
        """With the newest of ``rates`` seen. What chance explains of a slope and of a scatter is no habit."""
        recent_np = np.array(rates[-_RECENT:])
        n = len(recent_np)
        mean = max(float(recent_np.mean()), 1 / interval)
        if n < _FEW:
            return self
        at_np = np.arange(n) - (n - 1) / 2
        width = float(at_np @ at_np)
        slope = float(at_np @ recent_np) / width
        rest = float(((recent_np - recent_np.mean() - slope * at_np) ** 2).sum()) / (n - 2)
        alone = mean / interval
        found = max(slope**2 - self.noise * alone / width, 0.0) / mean**2
        return Habits(
            max(_FADE * self.change + (1 - _FADE) * min(found, 1.0), _LEAST_CHANGE**2),
            _FADE_SCATTER * self.scatter + (1 - _FADE_SCATTER) * min(rest / alone, 100.0),
        )

    @classmethod
    def of(cls, state: Mapping[str, float]) -> Habits:
        """From a planner's state. Raises TypeError, ValueError."""
        found = replace(cls(), **{name: float(value) for name, value in state.items()})
        if not (_LEAST_CHANGE**2 <= found.change < math.inf and 0 <= found.scatter < math.inf):
            raise ValueError(f"expected finite habits of a load, got {found}")
        return found


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the recent values: ``level`` at the newest, ``slope`` per interval, and the variances of both and
    their covariance."""

    level: float
    slope: float
    level_var: float
    slope_var: float
    both: float

    def ahead(self, intervals: float) -> Load:
        """The line and its standard error after the newest value. Example: level 8 and slope 1 are 11 after three."""
        t = intervals
        return Load(
            self.level + t * self.slope,
            math.sqrt(max(self.level_var + 2 * t * self.both + t * t * self.slope_var, 0.0)),
        )


def trend(rates: Sequence[float], interval: float, habits: Habits) -> Trend:
    """By least squares, with what is known before: slopes are as large as loads usually change. So a slope that chance
    may have made is believed in part, and what is not known of it is in the error.

    Example: rates that rise by one per interval, of thousands of requests each: a slope of nearly 1.
    """
    recent_np = np.array(rates[-_RECENT:] if len(rates) >= _FEW else rates[-1:])
    n = len(recent_np)
    mean = max(float(recent_np.mean()), 1 / interval)
    at_np = np.arange(n) - (n - 1.0)
    noise = habits.noise * mean / interval  # variance of a value
    # Normal equations with a prior of variance change * mean^2 for the slope, solved by hand: 2 x 2.
    a, b = n / noise, float(at_np.sum()) / noise
    c = float(at_np @ at_np) / noise + 1 / (habits.change * mean**2)
    p, q = float(recent_np.sum()) / noise, float(at_np @ recent_np) / noise
    whole = a * c - b * b
    return Trend((c * p - b * q) / whole, (a * q - b * p) / whole, c / whole, a / whole, -b / whole)


def loads_ahead(
    rates: Sequence[float], interval: float, startup: float, forecast: float | None, habits: Habits
) -> tuple[Load, Load, Trend]:
    """(the load of the next interval, that when a replica serves that is asked for now, the trend behind them). There
    have to be enough replicas for both: none can be added until then. ``rates``: of the intervals before, oldest first;
    ``forecast``: of the next interval, by a predictor; None: it goes on as it is, or as it grows.

    The newest rate is that of the middle of the interval before. That requests came is certain: the newest rate counts,
    less what chance may have added; and a load from which so few would hardly have come has gone.
    """
    found = trend(rates, interval, habits)
    newest = max(rates[-1], 0.0)
    certain = newest - math.sqrt(habits.noise * newest / interval)
    most = newest + 3 * math.sqrt(newest * interval + 4) / interval  # a load that has gone is not waited for

    def at(intervals: float) -> Load:
        rate, error = found.ahead(intervals)
        if forecast is not None:
            rate = forecast + found.slope * max(intervals - 1.0, 0.0)
        else:
            rate = min(rate, most + max(found.slope, 0.0) * intervals)
        return Load(max(rate, certain, 0.0), error)

    return at(0.5), at(startup / interval + 1), found

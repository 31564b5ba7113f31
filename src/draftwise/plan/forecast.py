"""The load to prepare for: the forecast until new replicas serve, and its possible error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_RECENT = 8
"""Intervals that are looked at."""
_FEW = 4
"""Intervals below which nothing is said of a trend."""
_SURE = 0.5
"""Standard errors: seven loads out of ten are lower. The next tick comes soon, and those who wait are counted then."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the recent values. ``level``: at the newest; ``slope``: per interval, 0 if it is not twice as
    large as chance alone may make it; ``spread``: of a single value around it; ``error``: standard error of the level,
    ``ahead`` intervals after it."""

    level: float
    slope: float
    spread: float
    error: float


def trend(values: Sequence[float], ahead: float = 0.0, least_spread: float = 0.0) -> Trend:
    """By least squares. ``least_spread``: by how much a value scatters at least.

    Example: 1, 2, 3, 4 has the level 4 and the slope 1; 5, 1, 4, 2 has the level 3 and none.
    """
    recent = list(values[-_RECENT:])
    n = len(recent)
    mean = math.fsum(recent) / n
    if n < _FEW:
        return Trend(recent[-1], 0.0, least_spread, least_spread)
    middle, width = (n - 1) / 2, n * (n * n - 1) / 12
    slope = math.fsum((i - middle) * (v - mean) for i, v in enumerate(recent)) / width
    rest = math.fsum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(recent))
    if abs(slope) > 2 * math.sqrt(rest / (n - 2) / width):
        spread = max(math.sqrt(rest / (n - 2)), least_spread)
        error = spread * math.sqrt(1 / n + (middle + ahead) ** 2 / width)
        return Trend(mean + slope * middle, slope, spread, error)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in recent) / (n - 1))
    spread = max(spread, least_spread)
    return Trend(mean, 0.0, spread, spread / math.sqrt(n))


def load_ahead(
    rates: Sequence[float], interval: float, startup: float, forecast: float | None
) -> tuple[float, float]:
    """(requests per second to be ready for, of these by growth). ``rates``: of the intervals before, oldest first;
    ``forecast``: of the next interval, by a predictor; None: it goes on as it is, or as it grows.

    A replica that is asked for now serves after ``startup`` seconds, and until then nothing can be added: what counts
    is the load from then on. The newest rate is that of the middle of the interval before. That requests came is
    certain: the newest rate counts, less what chance may have added; and a load from which so few would hardly have
    come has gone.
    """
    ahead = startup / interval + 1
    # So many requests as came in an interval scatter by their square root, if each comes for itself.
    mean = math.fsum(rates[-_RECENT:]) / len(rates[-_RECENT:])
    found = trend(rates, ahead, math.sqrt(max(mean, 0.0) / interval))
    growth = max(found.slope, 0.0) * ahead
    newest = max(rates[-1], 0.0)
    most = newest + 3 * math.sqrt(newest * interval + 4) / interval  # a load that has gone is not waited for
    expected = (min(found.level, most) if forecast is None else forecast) + growth
    certain = newest - _SURE * math.sqrt(newest / interval)
    return max(expected + _SURE * min(found.error, most), certain, 0.0), growth

"""The load to prepare for: the forecast until new replicas serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_RECENT = 8
"""Intervals that are looked at."""
_FEW = 4
"""Intervals below which nothing is said of a trend."""
_CHANCE = 1.0
"""Standard deviations by which a single interval's load is more than usual by chance alone."""
_SURE = 1.0
"""Standard errors that are added to a load that grows: who was not asked for in time is missing for a whole start."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through the recent values. ``level``: at the newest; ``slope``: per interval, as far as chance does not
    explain it; ``error``: standard error of the line where it was asked for, as much of it as of the slope."""

    level: float
    slope: float
    error: float = 0.0


def trend(values: Sequence[float], ahead: float = 0.0, chance: float = 0.0) -> Trend:
    """By least squares. ``ahead``: intervals after the newest for which the error is wanted; ``chance``: by how much
    values scatter at least.

    A slope of up to two standard errors is chance; of a steeper one a share is believed that grows with it: 1 - (2
    errors / slope)^2, as James and Stein shrink means (1961).

    Example: 1, 2, 3, 4 has the level 4 and the slope 1; 5, 1, 4, 2 has the level 3 and none.
    """
    recent = list(values[-_RECENT:])
    n = len(recent)
    if n < _FEW:
        return Trend(recent[-1], 0.0)
    mean = math.fsum(recent) / n
    middle, width = (n - 1) / 2, n * (n * n - 1) / 12
    slope = math.fsum((i - middle) * (v - mean) for i, v in enumerate(recent)) / width
    rest = math.fsum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(recent))
    spread = max(math.sqrt(rest / (n - 2)), chance)
    least = 2 * spread / math.sqrt(width)
    if abs(slope) <= least:
        return Trend(mean, 0.0)
    share = 1 - (least / slope) ** 2
    error = spread * math.sqrt(1 / n + (middle + ahead) ** 2 / width)
    return Trend(mean + share * slope * middle, share * slope, share * error)


def load_ahead(
    rates: Sequence[float], interval: float, startup: float, forecast: float | None
) -> tuple[float, float]:
    """(requests per second to be ready for, of these by growth). ``rates``: of the intervals before, oldest first;
    ``forecast``: of the next interval, by a predictor; None: it goes on as it is, or as it grows.

    A replica that is asked for now serves after ``startup`` seconds, and until then nothing can be added: what counts
    is the load from then on. Replicas that are not needed go at once, so a load that shrinks is that of the next
    interval. The newest rate is that of the middle of the interval before. That requests came is certain: the newest
    rate counts, less what chance may have added; and a load from which so few would hardly have come has gone.
    """
    ahead = startup / interval + 1
    # Requests that come each for itself scatter by the square root of their number.
    mean = math.fsum(rates[-_RECENT:]) / len(rates[-_RECENT:])
    found = trend(rates, ahead, math.sqrt(max(mean, 0.0) / interval))
    newest = max(rates[-1], 0.0)
    growth = found.slope * ahead + _SURE * found.error if found.slope > 0 else 0.5 * found.slope
    most = newest + 3 * math.sqrt(newest * interval + 4) / interval  # a load that has gone is not waited for
    expected = (min(found.level, most) if forecast is None else forecast) + growth
    certain = newest - _CHANCE * math.sqrt(newest / interval)
    return max(expected, certain, 0.0), growth

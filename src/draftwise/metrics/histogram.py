"""A histogram that costs a microsecond per observation; Prometheus sees it when it asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts by upper bound. One thread observes; another may take a snapshot, which may lag one observation.

    Example: bounds (1, 2); observations 0.5, 2, 9 give cumulative counts 1, 2, 3 for 1, 2, +Inf.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must rise"
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        """A snapshot."""
        made = Histogram(self.bounds)
        made.counts, made.sum = list(self.counts), self.sum
        return made

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, observations up to it), as Prometheus wants them."""
        out = []
        total = 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), list(self.counts), strict=True):
            total += count
            out.append((bound, float(total)))
        return out

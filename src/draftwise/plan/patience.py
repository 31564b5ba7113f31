"""How long replicas that are not needed now are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LONGER = 4
"""How many times as long as at first a pool's patience may get."""
MOST_PATIENCE = 256
"""Ticks."""


@dataclass(slots=True)
class Patience:
    """A pool's patience: for how many ticks fewer replicas must have been enough before some are given up.

    It doubles, up to `_LONGER` times, when replicas that were given up are wanted back soon, and comes down again in
    calm times, so that a load at the border between two numbers does not make the pool swing.
    """

    ticks: int
    calm: int = 0  # ticks without a change
    since_down: int = 1 << 20  # ticks since some were given up

    def note(self, change: int, hold: int) -> None:
        if change > 0 and self.since_down <= 4 * self.ticks:
            self.ticks = min(2 * max(self.ticks, 1), _LONGER * max(hold, 1), MOST_PATIENCE)
        self.since_down = 0 if change < 0 else min(self.since_down + 1, 1 << 20)
        self.calm = 0 if change else self.calm + 1
        if self.calm > 8 * self.ticks:
            self.ticks, self.calm = max(self.ticks // 2, hold), 0


def most_needed(recent: Sequence[int], now: int, patience: int, hold: int) -> int:
    """The replicas to keep of ``now``: as many as were needed at most within ``patience`` ticks. A load at the border
    of two numbers deserves more patience than one that falls: one more than within ``hold`` ticks will do.

    Example: needed 9, 7, 6, 5, 4 of 9, patience 4, hold 1: 9 by the one, 5 + 1 by the other.
    """
    if len(recent) <= hold:
        return now
    long = max(recent[-patience - 1 :]) if len(recent) > patience else now
    return min(long, max(recent[-hold - 1 :]) + 1, now)

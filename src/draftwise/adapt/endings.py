"""What a token is worth to the request that gets it, where all wait for the last one to end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftwise.adapt.choice import Drafter, Prices, hoped
from draftwise.adapt.performance import PerformanceModel

_GUESS = 4.0
"""Requests that the first guess counts for: half of them end at their limit."""
_MEMORY = 64.0
"""Requests after which the oldest ones count little."""
_NEAR, _NEAR_SHARE = 2.0, 0.05
"""Steps, and a share of the most steps that a request has left, by which one that is nearer to its end than the last
one is e times less likely to end last."""


class Endings:
    """Weighs accepted drafts in a *closed* batch: nobody waits, nobody else comes, and all is done when the last
    request ends.

    A plain step of n requests takes a + b n seconds. A token that any request gets early saves b: the request is there
    for a step less. It saves a, too, only if that request would have ended last. So a token of a request that ends
    last with the chance c is worth (b + a c) / (b + a / n) of an average one, which is a token of n equal requests. A
    request that is ahead of the others need not hurry; the last one is worth drafts that are rarely accepted.

    Example: n = 16, a = 3 ms, b = 0.4 ms. A request that surely does not end last: 0.4 / 0.5875 = 0.68. The one that
    surely does: 3.4 / 0.5875 = 5.8.

    A request that could be quicker if it drafted is not the last one even if it does not: it may still hurry. So the
    steps that it needs are counted with the drafts that it could have accepted.

    Where requests end by a stop token, tokens left until ``max_tokens`` say nothing: all are as likely to be the last.
    """

    def __init__(self) -> None:
        self._ended, self._at_limit = _GUESS, _GUESS / 2

    def ended(self, drafter: Drafter) -> None:
        """The request has ended, with its last row observed."""
        keep = 1.0 if self._ended < _MEMORY else 1.0 - 1.0 / _MEMORY
        self._ended = keep * self._ended + 1.0
        self._at_limit = keep * self._at_limit + (drafter.remaining <= 0)

    @property
    def limited(self) -> float:
        """The share of requests that end at their limit."""
        return self._at_limit / self._ended

    def weigh(
        self, members: Sequence[Drafter], prices: Prices, model: PerformanceModel, *, closed: bool
    ) -> None:
        """Set `Drafter.worth` of all requests that may draft."""
        n = prices.requests
        if not closed or n < 2 or len(members) < 2:
            for member in members:
                member.worth = 1.0
            return
        half = n // 2
        fewer = model.target_time(half, half, prices.context * half // n, prices.sampled)
        each = min(max(prices.plain - fewer, 0.0) / (n - half), prices.plain / n)  # b
        base = prices.plain - each * n  # a
        average = each + base / n
        steps = [member.remaining / (1.0 + hoped(member)) for member in members]
        most = max(steps)
        near = _NEAR + _NEAR_SHARE * most
        likely = [math.exp((left - most) / near) for left in steps]
        limited = self.limited
        share = limited * len(members) / n / sum(likely)
        for member, chance in zip(members, likely, strict=True):
            last = share * chance + (1.0 - limited) / n
            member.worth = (each + base * last) / average

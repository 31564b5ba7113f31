"""The account of what speculation gains and loses against plain decoding."""

from __future__ import annotations

_DEEPEST_LOSS = 4.0
"""Plain steps below which the account never falls: one wild measurement must not keep drafting out for long."""
_LEAST_RESERVE = 0.25
_RESERVE_REQUESTS = 4
"""A step of many requests says more about acceptance than one of a few, and its loss is that of all of them: with more
than so many requests the reserve is less, but not less than this share of it."""


class Ledger:
    """In plain steps of the present batch. Speculation that has lost more than it may is ``suspended`` until time has
    paid for it."""

    def __init__(self, share: float, reserve: float) -> None:
        """``share`` of the time that passes may be lost; ``reserve``: what the account starts with and never exceeds
        with few requests."""
        self.balance = reserve
        self.suspended = False
        self._share = share
        self._reserve = reserve

    def book(self, gain: float, requests: int) -> None:
        """Speculation gained, or lost, so many plain steps."""
        most = self._reserve * min(1.0, max(_LEAST_RESERVE, _RESERVE_REQUESTS / requests))
        self.balance = max(min(self.balance + gain, most), -_DEEPEST_LOSS)
        if self.balance < 0:
            self.suspended = True

    def earn(self, steps: float) -> None:
        """The time of so many plain steps has passed."""
        self.balance += self._share * steps
        if self.suspended and self.balance > 1.0:
            self.suspended = False

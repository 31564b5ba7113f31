"""The account of what speculation gains and loses against plain decoding."""

from __future__ import annotations

_DEEPEST_LOSS = 4.0
"""Plain steps below which the account never falls: one wild measurement must not keep drafting out for long."""
_LEAST_RESERVE = 0.25
_RESERVE_REQUESTS = 4
"""A step of many requests says more about acceptance than one of a few, and its loss is that of all of them: with more
than so many requests the reserve is less, but not less than this share of it."""
_RETRY = 64
"""Plain steps after which suspended speculation that now promises much is tried on credit; after each failure twice as
many. What suspended it may have been the machine."""
_CREDIT = 1.0


class Ledger:
    """In plain steps of the present batch. Speculation that has lost more than it may is ``suspended`` until time has
    paid for it, or until it promises much again.

    Greedy and sampled steps have an account each: what greedy requests have gained is not there to be lost by sampled
    ones, whose drafts are accepted less often.
    """

    def __init__(self, share: float, reserve: float) -> None:
        """``share`` of the time that passes may be lost; ``reserve``: what the account starts with and never exceeds
        with few requests."""
        self.balance = reserve
        self.suspended = False
        self._share = share
        self._reserve = reserve
        self._retry_after = _RETRY
        self._waited = 0.0
        self._sampled = False
        self._other = reserve, False, _RETRY, 0.0  # of the kind of steps that is not made now

    def turn_to(self, *, sampled: bool) -> None:
        """Steps of this kind are made now."""
        if sampled == self._sampled:
            return
        self._sampled = sampled
        own = self.balance, self.suspended, self._retry_after, self._waited
        self.balance, self.suspended, self._retry_after, self._waited = self._other
        self._other = own

    def book(self, gain: float, requests: int) -> None:
        """Speculation gained, or lost, so many plain steps."""
        most = self._reserve * min(1.0, max(_LEAST_RESERVE, _RESERVE_REQUESTS / requests))
        self.balance = max(min(self.balance + gain, most), -_DEEPEST_LOSS)
        if self.balance < 0:
            self.suspended = True
        elif self.balance >= 0.5 * most:
            self._retry_after = _RETRY

    def lend(self, steps: float) -> None:
        """Somebody drafts who never did, and has lost nothing yet: the account holds so much at least."""
        if self.balance < steps:
            self.balance, self.suspended, self._waited = steps, False, 0.0

    def earn(self, steps: float, promising: bool) -> None:
        """The time of so many plain steps has passed. ``promising``: by what is known now, drafting gains much."""
        self.balance += self._share * steps
        if not self.suspended:
            return
        self._waited += steps
        if promising and self._waited >= self._retry_after:
            self._retry_after *= 2
            self.balance = max(self.balance, _CREDIT + 0.01)
        if self.balance > _CREDIT:
            self.suspended = False
            self._waited = 0.0

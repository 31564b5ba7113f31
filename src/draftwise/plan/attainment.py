"""How strict a plan has to be: as strict as it takes to reach the goal, not to exceed it."""

from __future__ import annotations

from dataclasses import dataclass

_FADE = 0.95
"""What an interval's requests count for in the next one: half after 14 intervals."""
_PRIOR = 200.0
"""Requests that were just within the goal, as it were: what is believed before any have ended."""
_MOST = 5.0
"""By how much more requests may wait too long by the plan, while none does in fact, than the goal leaves late."""


@dataclass(slots=True)
class Attainment:
    """The share of requests that were late, of late, while all replicas that were asked for served. A forecast
    leaves room for chance, replicas come whole, and a queue is reckoned at its worst: a plan that would leave 5 %
    late by its own reckoning leaves none late in fact. So what it may leave late is what the goal has left of it.

    ``late``, ``ended``: requests, older ones counting less.
    """

    goal: float
    late: float = 0.0
    ended: float = 0.0

    def note(self, requests: float, attained: float) -> None:
        """An interval's requests, and the share of them that was within the limits."""
        self.late = _FADE * self.late + requests * min(max(1 - attained, 0.0), 1.0)
        self.ended = _FADE * self.ended + requests

    def may_be_late(self) -> float:
        """Share of requests that the next plan may leave late by its own reckoning.

        Example (goal 95 %): 5 % before anything was seen; 25 % after many requests none of which was late; 15 % if
        2.5 % were; 5 % if 5 % were, and 2.5 % if 10 % were.
        """
        allowed = 1 - self.goal
        spent = (self.late + allowed * _PRIOR) / (self.ended + _PRIOR) / allowed
        if spent >= 1:
            return allowed / spent
        most = max(min(_MOST * allowed, 0.5), allowed)
        return allowed + (most - allowed) * (1 - spent)

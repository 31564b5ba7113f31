"""How many rounds a step has: target, verification and drafts, again and again, without the scheduler between them."""

from __future__ import annotations

from draftwise.adapt.controller import Controller
from draftwise.kv.manager import KVManager
from draftwise.sched.shares import Shares
from draftwise.sched.taking import Books, Members
from draftwise.types import RoundCuts

ROUND_SECONDS = 0.004
"""Steps of several rounds take about so long at most: nobody sees that text comes in pieces of it, and a new request
does not wait for longer."""


class RoundRoom:
    """Asks the controller for rounds, as many as fit into `ROUND_SECONDS`, and finds blocks for their tokens."""

    def __init__(self, kv: KVManager, most: int) -> None:
        """``most``: rounds of a step."""
        self._kv = kv
        self._most = most
        self._seconds = 0.0  # of a round, lately; 0: not known

    def took(self, seconds: float) -> None:
        """A round of a step that was no prompt's took so long."""
        before = self._seconds
        self._seconds = seconds if not before else before + 0.25 * (seconds - before)

    def of(
        self, shares: Shares, controller: Controller, books: Books, members: Members
    ) -> tuple[int, RoundCuts | None]:
        """Rounds of a step in which all requests that are here decode, and what they cut. Blocks are free ones: if
        there are too few, the step has one round."""
        if self._most < 2 or not self._seconds:
            return 1, None
        most = min(self._most, int(ROUND_SECONDS / self._seconds))
        if most < 2:
            return 1, None
        rounds, cuts = controller.rounds(shares.rids, most)
        if rounds < 2:
            return 1, None
        # A root and its drafts in each round, and the drafts behind the last one; never behind a request's last token.
        wanted = [
            min(1 + nodes + budget + (rounds - 1) * (1 + budget), request.max_total - request.num_computed)
            for nodes, budget, request in zip(shares.num_draft, shares.budgets, members.requests, strict=True)
        ]
        for place in books.room(members, self._kv.block_size, wanted):
            blocks = self._kv.reserve(shares.rids[place], wanted[place])
            if blocks is None:
                return 1, None
            shares.got(place, blocks)
        return rounds, cuts

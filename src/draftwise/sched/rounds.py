"""How many rounds a step has: target, verification and drafts, again and again, without the scheduler between them."""

from __future__ import annotations

from itertools import islice

from draftwise.adapt.controller import Controller, most_nodes
from draftwise.kv.manager import KVManager
from draftwise.sched.order import Ordered
from draftwise.sched.request import Request
from draftwise.sched.shares import Shares
from draftwise.sched.taking import Books, Members
from draftwise.types import RoundCuts

ROUND_SECONDS = 0.016
"""Steps of several rounds take about so long at most, a screen's picture: nobody sees that text comes in pieces of it.
Who comes meanwhile waits for the round that is computed, not for the others (`Executor.hurry`)."""
UNREAD_SECONDS = 0.1
"""The same where nobody reads what comes before the requests have ended, as in `LLM.generate`. Ctrl-C waits so long
there, or for one round."""
_FEW_ROUNDS = 8
"""The most while control learns, and where a stop string may end a request: the text is only looked at behind a step,
and what comes behind the stop string is computed for nothing."""


class RoundRoom:
    """Asks the controller for rounds, as many as fit into a step's time, and finds blocks for their tokens.

    Rounds take blocks that nobody could miss: a step without them finds as many free ones as it may ask for. What they
    did not fill goes back before blocks become short, so that nobody waits, drafts less or loses its place for them.
    """

    def __init__(self, kv: KVManager, most: int) -> None:
        """``most``: rounds of a step."""
        self._kv = kv
        self._most = most
        self._seconds = [0.0, 0.0]  # of a round, lately, and of one that is plain; 0: not known
        self._spare: tuple[int, int] | None = None  # what `_step_blocks` said of who runs, and their version
        self._ahead = False  # somebody may have blocks that only rounds asked for

    def took(self, seconds: float, plain: bool) -> None:
        """A round of a step that was no prompt's took so long. ``plain``: without drafts."""
        before = self._seconds[plain]
        self._seconds[plain] = seconds if not before else before + 0.25 * (seconds - before)

    def of(
        self,
        shares: Shares,
        plain: bool,
        controller: Controller,
        books: Books,
        members: Members,
        running: Ordered,
    ) -> tuple[int, RoundCuts | None]:
        """Rounds of a step in which all requests that are here decode, and what they cut. ``plain``: nothing is drafted
        in it, or verified."""
        seconds = self._seconds[plain] or self._seconds[not plain]
        if self._most < 2 or not seconds:
            return 1, None
        usual = most = min(self._most, int(step_seconds(members) / seconds))
        if members.watched or not controller.settled:
            most = min(most, _FEW_ROUNDS, int(ROUND_SECONDS / seconds))
        if most < 2:
            return 1, None
        rounds, cuts = controller.rounds(shares.rids, most, usual)
        if rounds < 2:
            return 1, None
        free = self._kv.num_free - self._step_blocks(running)
        while True:
            # A root and its drafts in each round, and the drafts behind the last one; never behind a request's last
            # token.
            wanted = [
                min(
                    1 + nodes + budget + (rounds - 1) * (1 + budget), request.max_total - request.num_computed
                )
                for nodes, budget, request in zip(
                    shares.num_draft, shares.budgets, members.requests, strict=True
                )
            ]
            if len(wanted) * self._kv.blocks_for(max(wanted)) <= free:
                break
            rounds //= 2
            if rounds < 2:
                return 1, None
        for place in books.room(members, self._kv.block_size, wanted):
            blocks = self._kv.reserve(shares.rids[place], wanted[place])
            assert blocks is not None, "that many were free"
            shares.got(place, blocks)
            self._ahead = True
        return rounds, cuts

    def give_back(self, running: Ordered, waiting: Ordered, places: int) -> dict[int, int]:
        """Where blocks are short for a step without rounds, or for the first ``places`` of those who wait, those that
        rounds asked for go back. Called before a step is planned. Answers with those who lost some: how many blocks
        each has left."""
        if not self._ahead:
            return {}
        kv = self._kv
        entering = islice(waiting, max(places, 0))
        for_waiting = sum([kv.blocks_for(request.num_tokens + _most_nodes(request)) for request in entering])
        if kv.num_free >= self._step_blocks(running) + for_waiting:
            return {}
        self._ahead = False
        left = {}
        for request in running:
            known = request.num_tokens - request.num_computed
            if kv.surplus(request.rid, known):
                left[request.rid] = kv.trim(request.rid, known)
        return left

    def _step_blocks(self, running: Ordered) -> int:
        """Blocks that a step of one round takes at most: for a root, drafts that wait, and drafts to come, of each."""
        known = self._spare
        if known is None or known[0] != running.version:
            blocks = sum([self._kv.blocks_for(1 + 2 * _most_nodes(request)) for request in running])
            known = self._spare = running.version, blocks
        return known[1]


def step_seconds(members: Members | None) -> float:
    """What steps of several rounds of these requests take, at most; None: of requests that are not side by side."""
    return UNREAD_SECONDS if members is not None and members.read_at_end else ROUND_SECONDS


def _most_nodes(request: Request) -> int:
    return most_nodes(request.speculation, 0, {})

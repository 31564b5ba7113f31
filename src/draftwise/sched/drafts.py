"""Room for drafts in a step: blocks before new requests enter, rows after all others have theirs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from draftwise.adapt.controller import Controller
from draftwise.kv.manager import KVManager
from draftwise.sched.shares import Shares, divide, draft_limit
from draftwise.sched.taking import Books, Members
from draftwise.types import Speculation


class DraftRoom:
    """Asks the controller what to draft, and finds room for it as far as there is some."""

    def __init__(self, kv: KVManager, max_rows: int) -> None:
        """``max_rows``: of one step."""
        self._kv = kv
        self._max_rows = max_rows

    def wish(
        self,
        shares: Shares,
        controller: Controller,
        batch_size: int,
        books: Books | None,
        members: Members | None,
    ) -> None:
        """What those who decode would like to verify and to draft, as far as there are blocks: lookahead of who runs
        comes before who waits, but is worth nobody's place. ``members``: all of them, if they all run and no step is on
        its way; ``books``: finds room for these."""
        speculations: Sequence[Speculation]
        if not shares.reading:
            speculations = (
                [request.speculation for request in shares.requests]
                if members is None
                else members.speculations
            )
            shares.num_draft, shares.budgets = controller.wishes(
                shares.rids, speculations, shares.num_draft, batch_size
            )
        else:
            own = shares.decoding()
            speculations = [shares.requests[i].speculation for i in own]
            wished = controller.wishes(
                [shares.rids[i] for i in own], speculations, [shares.num_draft[i] for i in own], batch_size
            )
            for i, num_draft, budget in zip(own, *wished, strict=True):
                shares.num_draft[i], shares.budgets[i] = num_draft, budget
        nodes = list(map(add, shares.num_draft, shares.budgets))
        if not any(nodes):
            return
        if books is None or members is None:
            lacking = [i for i, own_nodes in enumerate(nodes) if own_nodes]
        else:  # nobody is before its one known token
            wanted = [own_nodes and own_nodes + 1 for own_nodes in nodes]
            lacking = books.room(members, self._kv.block_size, wanted)
        for place in lacking:
            self._reserve(shares, place)

    def divide(self, shares: Shares, left: int, controller: Controller, batch_size: int) -> None:
        """Drafts get the ``left`` rows; drafting more than can be verified next would be in vain. Who reaches the end
        of its known tokens in this step drafts from now on."""
        for i in shares.reading:
            if shares.num_new[i] == shares.missing[i]:
                request = shares.requests[i]
                shares.budgets[i] = controller.draft_budget(request.rid, request.speculation, batch_size)
                if shares.budgets[i] or shares.num_draft[i]:
                    self._reserve(shares, i)
        if sum(shares.num_draft) > left:
            shares.num_draft = divide(shares.num_draft, left)
        most = max(shares.budgets, default=0)
        if most:
            limit = draft_limit(shares, self._max_rows)
            if most > limit:
                shares.budgets = [min(budget, limit) for budget in shares.budgets]

    def _reserve(self, shares: Shares, place: int) -> None:
        """Blocks behind the known tokens: for drafts that are verified and for those to come, for the former alone, or
        for none."""
        reserve, rid = self._kv.reserve, shares.rids[place]
        known, num_draft = shares.before[place] + shares.missing[place], shares.num_draft[place]
        blocks = reserve(rid, known + num_draft + shares.budgets[place])
        if blocks is None:
            shares.budgets[place] = 0
            blocks = reserve(rid, known + num_draft)
        if blocks is None:
            shares.num_draft[place] = 0
        else:
            shares.got(place, blocks)

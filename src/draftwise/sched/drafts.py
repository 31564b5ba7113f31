"""Room for drafts in a step: blocks before new requests enter, rows after all others have theirs."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.adapt.controller import Controller
from draftwise.kv.manager import KVManager
from draftwise.sched.shares import Share, divide, draft_limit


class DraftRoom:
    """Asks the controller what to draft, and finds room for it as far as there is some."""

    def __init__(self, kv: KVManager, max_rows: int) -> None:
        """``max_rows``: of one step."""
        self._kv = kv
        self._max_rows = max_rows

    def wish(self, shares: Sequence[Share], controller: Controller, batch_size: int) -> None:
        """What those who decode would like to verify and to draft, as far as there are blocks: lookahead of who runs
        comes before who waits, but is worth nobody's place."""
        for share in shares:
            if share.missing > 1:
                continue
            request = share.request
            rid = request.rid
            if share.num_draft:
                share.num_draft = controller.nodes_to_verify(rid, share.num_draft)
            share.budget = controller.draft_budget(rid, request.speculation, batch_size)
            if share.budget or share.num_draft:
                self._reserve(share)

    def divide(self, shares: Sequence[Share], left: int, controller: Controller, batch_size: int) -> None:
        """Drafts get the ``left`` rows; drafting more than can be verified next would be in vain. Who reaches the end
        of its known tokens in this step drafts from now on."""
        for share in shares:
            if (share.missing > 1 or share.fresh) and share.completes:
                request = share.request
                share.budget = controller.draft_budget(request.rid, request.speculation, batch_size)
                if share.budget or share.num_draft:
                    self._reserve(share)
        wishes = [share.num_draft for share in shares]
        if any(wishes) and sum(wishes) > left:
            for share, rows in zip(shares, divide(wishes, left), strict=True):
                share.num_draft = rows
        limit = draft_limit(shares, self._max_rows)
        for share in shares:
            if share.budget > limit:
                share.budget = limit

    def _reserve(self, share: Share) -> None:
        """Blocks behind the known tokens: for drafts that are verified and for those to come, for the former alone, or
        for none."""
        reserve, rid, known = self._kv.reserve, share.request.rid, share.before + share.missing
        blocks = reserve(rid, known + share.num_draft + share.budget)
        if blocks is None:
            share.budget = 0
            blocks = reserve(rid, known + share.num_draft)
        if blocks is None:
            share.num_draft = 0
        else:
            share.blocks += blocks

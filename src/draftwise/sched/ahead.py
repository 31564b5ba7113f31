"""A request's known state while one of its steps has not been taken in yet."""

from __future__ import annotations

from typing import NamedTuple

from draftwise.sched.request import Request
from draftwise.types import RowPlan


class Outlook(NamedTuple):
    """The state that the next step finds, as far as it is known now.

    How many drafts a step accepts is not known before it is taken in, and need not be: whatever it is, one token is
    left to compute, the new root. Only room has to be there for the most that may be accepted.

    Example: 10 tokens computed of 11 known ones, and a step runs that verifies 4 drafts and drafts 4 more. After it
    11 to 15 tokens are computed, and the next one computes one token and verifies up to 4 nodes: missing 1, proposed 4,
    before 5.
    """

    missing: int  # tokens to compute
    proposed: int  # nodes that wait to be verified, at most
    before: int  # slots that the step on its way fills, at most


def outlook(request: Request, flying: RowPlan) -> Outlook | None:
    """``flying``: the request's row in the step that was not taken in. None if that step surely is its last one."""
    missing = request.num_tokens - request.num_computed - flying.num_new
    if missing:  # a chunk
        return Outlook(missing, 0, flying.num_new)
    if request.num_tokens + 1 >= request.max_total:
        return None
    return Outlook(1, flying.draft_budget, flying.num_new + flying.num_draft)

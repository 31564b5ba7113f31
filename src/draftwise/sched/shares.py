"""How the rows of a step are divided: roots first, then prompts and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.sched.request import Request

_FOR_DRAFTS = 4
"""While prompts want rows, one in so many of those that are left behind the roots is kept for drafts: a step over a
chunk of a prompt is long, and drafts are what lets others get more than one token out of it."""


@dataclass(slots=True)
class Share:
    """A running request's share of the step that is being planned.

    ``num_draft`` and ``budget`` begin as wishes.
    """

    request: Request
    missing: int  # its known tokens to compute
    before: int = 0  # slots that a step on its way may fill before them
    num_new: int = 1
    num_draft: int = 0
    budget: int = 0
    blocks: tuple[int, ...] = ()
    fresh: bool = False  # admitted in this step

    @property
    def completes(self) -> bool:
        """Whether the step reaches the request's last known token."""
        return self.num_new == self.missing


def kept_for_drafts(wanted: int, left: int) -> int:
    """Rows of ``left`` that prompts leave to drafts, of which ``wanted`` are wanted."""
    return min(wanted, left // _FOR_DRAFTS)


def divide(wishes: Sequence[int], rows: int) -> list[int]:
    """Divide ``rows`` among wishes, as evenly as they allow; what one does not want goes to the others.

    How many of a request's drafts are verified may depend on the sizes of proposals, not on their tokens.

    Example: wishes 15, 2, 15 and 20 rows: 9, 2, 9. Of an odd row the first has it.
    """
    if sum(wishes) <= rows:
        return list(wishes)
    parts = [0] * len(wishes)
    order = sorted(range(len(wishes)), key=lambda i: (wishes[i], -i))
    for served, i in enumerate(order):
        parts[i] = min(wishes[i], rows // (len(order) - served))
        rows -= parts[i]
    return parts


def draft_limit(shares: Sequence[Share], max_rows: int) -> int:
    """Nodes that each of those who draft may have verified in the next step, as far as that can be told now: drafting
    more would be in vain.

    Example: 32 rows, 8 requests that decode and want drafts: 24 rows for 8, 3 nodes each. If one of them had 600 tokens
    of its prompt left, a quarter of 24 for 7: 1 node each.
    """
    drafters = sum([share.budget > 0 for share in shares])
    if not drafters:
        return 0
    left = max_rows - len(shares)
    prompts = sum([share.missing - share.num_new for share in shares])
    return -(-max(left - prompts, left // _FOR_DRAFTS) // drafters)

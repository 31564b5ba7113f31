"""How the rows of a step are divided: roots first, then prompts and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwise.adapt.controller import StepShape
from draftwise.sched.request import Request

_FOR_DRAFTS = 4
"""While prompts want rows, one in so many of those that are left behind the roots is kept for drafts: a step over a
chunk of a prompt is long, and drafts are what lets others get more than one token out of it."""


@dataclass(slots=True)
class Shares:
    """Requests' shares of the step that is being planned, side by side: those that run, then those admitted in it.

    ``missing``: known tokens to compute; ``before``: slots that a step on its way may fill before them; ``blocks``: new
    ones by place. ``num_draft`` and ``budgets`` begin as wishes. ``num_running``: how many ran before; ``reading``:
    places of those that do not decode, because they miss more than one token or are admitted.
    """

    requests: list[Request] = field(default_factory=list)
    rids: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    num_draft: list[int] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_running: int = 0
    reading: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rids)

    def add(
        self,
        request: Request,
        missing: int,
        blocks: tuple[int, ...] = (),
        *,
        before: int = 0,
        num_new: int = 1,
        num_draft: int = 0,
        fresh: bool = False,
    ) -> None:
        """One more request; ``fresh``: it is admitted in this step."""
        place = len(self.rids)
        if fresh or missing > 1:
            self.reading.append(place)
        if not fresh:
            self.num_running += 1
        if blocks:
            self.blocks[place] = blocks
        self.requests.append(request)
        self.rids.append(request.rid)
        self.missing.append(missing)
        self.before.append(before)
        self.num_new.append(num_new)
        self.num_draft.append(num_draft)
        self.budgets.append(0)

    def got(self, place: int, blocks: tuple[int, ...]) -> None:
        """More blocks for a request."""
        if blocks:
            self.blocks[place] = self.blocks.get(place, ()) + blocks

    def decoding(self) -> list[int]:
        """Places of those that ran before and miss one token."""
        reading = set(self.reading)
        return [i for i in range(self.num_running) if i not in reading]


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


def draft_limit(shares: Shares, max_rows: int) -> int:
    """Nodes that each of those who draft may have verified in the next step, as far as that can be told now: drafting
    more would be in vain.

    Example: 32 rows, 8 requests that decode and want drafts: 24 rows for 8, 3 nodes each. If one of them had 600 tokens
    of its prompt left, a quarter of 24 for 7: 1 node each.
    """
    count = len(shares.rids)
    drafters = count - shares.budgets.count(0)
    if not drafters:
        return 0
    left = max_rows - count
    prompts = sum([shares.missing[i] - shares.num_new[i] for i in shares.reading]) if shares.reading else 0
    return -(-max(left - prompts, left // _FOR_DRAFTS) // drafters)


def measure(shares: Shares, shape: StepShape, sampled: Sequence[bool] | None) -> None:
    """Write into ``shape`` what the shares add up to, but for its context. ``sampled``: whether each of those that ran
    before draws at a temperature, if that is known."""
    shape.requests, shape.prompt_rows = len(shares.rids), 0
    shape.rows = shape.requests + sum(shares.num_draft)
    for i in shares.reading:
        shape.requests -= 1
        shape.rows -= 1 + shares.num_draft[i]
        shape.prompt_rows += shares.num_new[i] + shares.num_draft[i]
    if sampled is not None and not shares.reading:
        shape.sampled = any(sampled)
    else:
        requests = shares.requests
        shape.sampled = any(requests[i].speculation.rule != "greedy" for i in shares.decoding())

"""Look-ups in steps of seats, in plain torch: what followed the last time that a request's text ended like this. The
kernel behind `graphs.seats.kernels.look_up` does the same.

The tokens of whoever looks up stand on the device, and a step looks in them when it knows what it has accepted: drafts
are those of the n-gram index on the host, although nothing goes there and back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftwise.graphs.seats.memory import (
    ANSWER,
    ANSWERED_WAITING,
    BUDGET,
    KNOWN,
    LIMIT,
    LOOP,
    WAITING,
    SeatMemory,
)


class LookUp(NamedTuple):
    """A look-up's part in steps of seats: most drafts, and the longest and shortest end of a text that it looks for."""

    steps: int
    longest: int
    shortest: int


def look_up(memory: SeatMemory, count: int, number: int, look: LookUp) -> None:
    """Write down what was committed of the seats that draft with this look-up, and look for how it goes on.

    It comes behind `rows.advance`. Done twice, it does the same: the text is written where it was.

    Args:
        memory: see there; ``text``, drafts that wait in ``state``, and drafts in ``answer`` are written.
        count: R.
        number: of the look-up, in column `LOOP`.
        look: see there.

    Example: lengths 2 down to 1, text 1 2 3 4 1 2 3, 3 drafts: the end 2 3 stood at 1..2 before, and 4 1 2 followed.
    A text 5 6 5 6 goes on with itself: 5 6 stood at 0..1, 5 6 followed, and the copy of 5 behind it.
    """
    state, told, drafts = memory.state[:count], memory.told[:count], memory.drafts
    mine = (memory.now[:count, 0] > 0) & (told[:, LOOP] == number)
    text = memory.text[:count]
    spare = text.shape[1] - 1  # a column that nobody reads
    known = state[:, KNOWN]
    accepted = memory.walk.accepted[:count].long()
    row = torch.arange(drafts + 1, device=state.device)
    real = mine[:, None] & (row <= accepted[:, None])
    at = (known - 1 - accepted)[:, None] + row
    text.scatter_(1, torch.where(real, at, spare), memory.walk.tokens[:count])
    # for each place the length of the text's end that ends there, too
    place = torch.arange(spare, device=state.device)
    agree = place < (known * mine - 1)[:, None]
    length = torch.zeros(agree.shape, dtype=torch.int64, device=state.device)
    for i in range(min(look.longest, spare)):
        same = torch.zeros_like(agree)
        last = text.gather(1, (known - 1 - i).clamp(min=0)[:, None])
        same[:, i:] = text[:, : spare - i] == last
        agree = agree & same
        length += agree
    # the longest one, and of those the last
    best = torch.where(length >= look.shortest, length * (spare + 1) + place, -1).amax(1)
    found = best >= 0
    start = torch.where(found, best % (spare + 1) + 1, 0)
    wanted = torch.minimum(told[:, BUDGET], told[:, LIMIT] - known - 1).clamp(0, look.steps) * found
    draft = row[:drafts]
    tokens = text.gather(1, start[:, None] + draft % (known - start).clamp(min=1)[:, None]).long()
    state[:, WAITING].copy_(torch.where(mine, wanted, state[:, WAITING]))
    memory.answer[:count, ANSWERED_WAITING].copy_(
        torch.where(mine, wanted, memory.answer[:count, ANSWERED_WAITING])
    )
    first = ANSWER + drafts + 1
    for kept in (memory.waiting_drafts[:count], memory.answer[:count, first : first + drafts]):
        kept.copy_(torch.where(mine[:, None] & (draft < wanted[:, None]), tokens, kept))

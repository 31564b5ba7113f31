"""Look-ups in steps of seats, in plain torch: what followed the last time that a text ended like a request's. The
kernel behind `graphs.seats.kernels.look_up` does the same.

The tokens of whoever looks up stand on the device, and a step looks in them when it knows what it has accepted. With
`LookUp.past` it also looks in the newest outputs of other requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.graphs.seats import memory as at
from draftwise.graphs.seats.memory import SeatMemory


class LookUp(NamedTuple):
    """A look-up's part in steps of seats: most drafts, and the longest and shortest end of a text that it looks for.

    Behind a match of m tokens there are at most floor(m * ``factor`` + ``offset``) drafts, or ``steps`` of them where
    ``factor`` is None; a draft must have followed in a share ``least`` of the places at which the text has such a
    match, or None: in one. ``past``: look in other requests' outputs, too. ``joins``: what is found is a branch of the
    tree that a loop has drafted.
    """

    steps: int
    longest: int
    shortest: int
    factor: float | None = None
    offset: float = 0.0
    least: float | None = None
    past: bool = False
    joins: bool = False

    @property
    def line(self) -> tuple[float, float]:
        """Slope and height of the most drafts over the length of a match."""
        return (0.0, float(self.steps)) if self.factor is None else (self.factor, self.offset + 1e-4)


class _Places(NamedTuple):
    """Where a text, or the past, ends like each of R texts does: ``lengths`` [R, P] of what agrees, ``best`` [R] the
    longest of them, ``last`` [R] its last place; ``tokens`` [R, P], and how many of them there are, ``filled`` [R]."""

    tokens: Tensor
    filled: Tensor
    lengths: Tensor
    best: Tensor
    last: Tensor


def look_up(memory: SeatMemory, count: int, number: int, look: LookUp) -> None:
    """As `find`, and what is found waits; see `LookUp.joins`."""
    find(memory, count, number, look)
    if look.joins:
        join_found(memory, count)


def find(memory: SeatMemory, count: int, number: int, look: LookUp) -> None:
    """Write down what was committed of the seats with this look-up, and look for how it goes on.

    It comes behind `rows.advance`, and behind the loops: what it finds takes the place of what a loop has drafted. Done
    twice, it does the same: the text is written where it was.

    Args:
        memory: see there; ``text`` is written, the new drafts in ``state`` and ``answer``, and what is said of them.
        count: R.
        number: of the look-up, in column `LOOK`.
        look: see there.

    Example: lengths 2 down to 1, text 1 2 3 4 1 2 3, 3 drafts: the end 2 3 stood at 1..2 before, and 4 1 2 followed.
    A text 5 6 5 6 goes on with itself: 5 6 stood at 0..1, 5 6 followed, and the copy of 5 behind it.
    """
    state, told, drafts = memory.state[:count], memory.told[:count], memory.drafts
    mine = (memory.now[:count, 0] > 0) & (told[:, at.LOOK] == number)
    text = memory.text[:count]
    spare = text.shape[1] - 1  # a column that nobody reads
    known = state[:, at.KNOWN]
    accepted = memory.walk.accepted[:count].long()
    row = torch.arange(drafts + 1, device=state.device)
    real = mine[:, None] & (row <= accepted[:, None])
    places = (known - 1 - accepted)[:, None] + row
    text.scatter_(1, torch.where(real, places, spare), memory.walk.tokens[:count])
    back = known[:, None] - 1 - torch.arange(look.longest, device=state.device)
    # the last token, the one before it, ...
    ends = torch.where(back >= 0, text.gather(1, back.clamp(min=0)), -2)
    found = _search(text[:, :spare], known * mine - 1, known, ends, look.shortest)
    best, draft = found.best, row[:drafts]
    start = found.last + 1
    tokens = text.gather(1, start[:, None] + draft % (known - start).clamp(min=1)[:, None])
    if look.past:
        past = memory.past.expand(count, -1)
        size = torch.full_like(known, past.shape[1])
        other = _search(past, size * mine, size, ends, look.shortest)
        better = other.best > best
        behind = other.last[:, None] + 1 + draft
        theirs = torch.where(behind < past.shape[1], past.gather(1, behind.clamp(max=past.shape[1] - 1)), -1)
        tokens = torch.where(better[:, None], theirs, tokens)
        best = torch.maximum(best, other.best)
    slope, height = look.line
    allowed = (best.float() * slope + height).floor().long()
    wanted = torch.minimum(told[:, at.BUDGET], told[:, at.LIMIT] - known - 1).clamp(0, look.steps)
    wanted = torch.where(best > 0, torch.minimum(wanted, allowed).clamp(min=0), 0)
    wanted = torch.minimum(wanted, (tokens >= 0).long().cumprod(1).sum(1))
    if look.least is not None:
        kept = _frequent(found, tokens, look.least)
        if look.past:
            kept = torch.where(better, _frequent(other, tokens, look.least), kept)
        wanted = torch.minimum(wanted, kept)
    # where nothing is found, what a loop has drafted waits
    if look.joins:
        memory.paths[:count, 0].copy_(wanted * mine)
        memory.paths[:count, 1:].copy_(tokens)
        return
    takes, answer = mine & (wanted > 0), memory.answer[:count]
    for column, value in (
        (state[:, at.WAITING], wanted),
        (state[:, at.STORED], 0),
        (state[:, at.SOURCE], 0),
        (answer[:, at.RAN], 2),
        (answer[:, at.ANSWERED_WAITING], wanted),
    ):
        column.copy_(torch.where(takes, value, column))
    first = at.ANSWER + drafts + 1
    told_back = answer[:, first : first + drafts]
    for place in (memory.waiting_drafts[:count], told_back):
        place.copy_(torch.where(takes[:, None] & (draft < wanted[:, None]), tokens.long(), place))


def join_found(memory: SeatMemory, count: int) -> None:
    """Join what `find` left in ``memory.paths`` with the trees that wait, as `propose.hybrid.join`: at least half of
    the nodes are the tree's, equal beginnings are shared.

    Example: 4 nodes, tree 5 -> 7 and 5 -> 9, found 5 -> 9 -> 2: tokens 5, 7, 9, 2 with parents -1, 0, 0, 2.
    """
    state, answer, drafts = memory.state[:count], memory.answer[:count], memory.drafts
    form, nodes = memory.own_forms[:count], memory.waiting_drafts[:count]
    lengths, found = memory.paths[:count, 0], memory.paths[:count, 1:]
    total = memory.told[:count, at.BUDGET].clamp(max=drafts)
    size = torch.minimum(state[:, at.WAITING], total - torch.minimum(lengths, total // 2))
    size = torch.where(lengths > 0, size, state[:, at.WAITING])
    kept, place = size.clone(), memory.draft_places
    row, on = torch.zeros_like(size), lengths > 0
    for i in range(drafts):
        on = on & (i < lengths)
        token = found[:, i]
        fits = (form[:, 2, 1:] == row[:, None] - 1) & (nodes == token[:, None]) & (place < size[:, None])
        hit = torch.where(fits, place, drafts).amin(1)
        adds = on & (hit == drafts) & (size < total)
        new = adds[:, None] & (place == size[:, None])
        depths, masks = (form[:, part].gather(1, row[:, None]) for part in (0, 1))
        for part, value in ((0, depths + 1), (1, masks | (1 << (place + 1))), (2, row[:, None] - 1)):
            form[:, part, 1:].copy_(torch.where(new, value, form[:, part, 1:]))
        nodes.copy_(torch.where(new, token[:, None], nodes))
        on = on & ((hit < drafts) | adds)
        row = torch.where(on, torch.where(hit < drafts, hit, size) + 1, row)
        size = size + adds
    state[:, at.WAITING].copy_(size)
    answer[:, at.RAN].copy_(torch.where(size > kept, 2, answer[:, at.RAN]))
    said = answer[:, at.ANSWERED_WAITING]
    said.copy_(torch.where(lengths > 0, size, said))
    real = (lengths > 0)[:, None] & (place < size[:, None])
    first = at.ANSWER + drafts + 1
    for begin, value in ((first, nodes), (first + 2 * drafts, form[:, 2, 1:])):
        told_back = answer[:, begin : begin + drafts]
        told_back.copy_(torch.where(real, value, told_back))


def _search(tokens: Tensor, stop: Tensor, filled: Tensor, ends: Tensor, shortest: int) -> _Places:
    """Places before ``stop`` [R] of tokens [R, P] that end like ``ends`` [R, longest], which go backwards."""
    size = tokens.shape[1]
    place = torch.arange(size, device=tokens.device)
    agree = place < stop[:, None]
    lengths = torch.zeros(agree.shape, dtype=torch.int64, device=tokens.device)
    for i in range(min(ends.shape[1], size)):
        same = torch.zeros_like(agree)
        same[:, i:] = tokens[:, : size - i] == ends[:, i : i + 1]
        agree = agree & same
        lengths += agree
    # the longest one, and of those the last
    score = torch.where(lengths >= shortest, lengths * size + place, -1).amax(1)
    some = score >= 0
    return _Places(
        tokens, filled, lengths, torch.where(some, score // size, 0), torch.where(some, score % size, 0)
    )


def _frequent(found: _Places, drafts: Tensor, least: float) -> Tensor:
    """How many of ``drafts`` [R, K] followed, one after the other, at a share ``least`` of the best places: [R]."""
    size = found.tokens.shape[1]
    place = torch.arange(size, device=drafts.device)
    alive = (found.lengths == found.best[:, None]) & (found.best > 0)[:, None]
    enough = (alive.sum(1).float() * least).clamp(min=1.0)
    kept = torch.zeros_like(found.best)
    for i in range(drafts.shape[1]):
        behind = place + 1 + i
        following = found.tokens[:, behind.clamp(max=size - 1)]
        alive = alive & (behind < found.filled[:, None]) & (following == drafts[:, i : i + 1])
        kept += (kept == i) & (alive.sum(1).float() >= enough)
    return kept

"""What the loops of a step read of the target, and what heads keep of it from step to step: features.

A head's rows are those of `models.heads.base`: row s reads token s and the feature of token s - 1. With several layers
(``depths``) layer d reads what layer d - 1 gave for the row before. So of each seat one vector per deeper layer is
*carried* to the next step: what the layer above gave for the last known token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.graphs.buffers import PassSeats
from draftwise.graphs.loop import DraftLoop
from draftwise.graphs.seats.memory import LOOP, SeatMemory
from draftwise.models.heads.base import HeadModel


class DrafterSeats(NamedTuple):
    """A drafter's captured loop. Of a head also itself, and where features of blocks' last tokens are kept,
    [blocks + 1, depths, F], the last one for rows that are none. One with features and without a head drafts from the
    target's hidden states."""

    loop: DraftLoop
    max_len: int  # no token at this position or later is fed to it
    head: HeadModel | None = None
    block_features: Tensor | None = None


class SeatedLoop(NamedTuple):
    """A loop of a step: ``number`` tells it from all others of the engine, ``source`` names the drafter's q."""

    number: int
    source: int
    drafter: DrafterSeats


class SeatFeatures:
    """Features of all seats, by source of the drafter."""

    def __init__(self, memory: SeatMemory) -> None:
        self._memory = memory
        self._read: dict[int, Tensor] = {}
        """[S * (K + 1), F], of what the target read in a seat's newest step."""
        self._carried: dict[int, Tensor] = {}  # [S, depths - 1, F]
        self._ends: dict[int, Tensor] = {}
        """By identity of the loop: [rows of the first pass] int64, see `LoopRows`."""

    def open(self, seated: SeatedLoop) -> None:
        """Make room for a head's, before anything of it is captured."""
        memory, head, loop = self._memory, seated.drafter.head, seated.drafter.loop
        if head is None:
            return
        if seated.source not in self._read:
            shape = (memory.seats * (memory.drafts + 1), head.feature_size)
            self._read[seated.source] = torch.zeros(shape, dtype=head.dtype, device=memory.device)
        if loop.seats.carried is not None:
            self._open_carried(seated.source, loop.seats.carried[0])
        if id(loop) not in self._ends:
            self._ends[id(loop)] = torch.zeros(loop.shape.size, dtype=torch.int64, device=memory.device)

    def _open_carried(self, source: int, one: Tensor) -> Tensor:
        """``one``: of a seat."""
        kept = self._carried.get(source)
        if kept is None:
            kept = self._carried[source] = one.new_zeros((self._memory.seats, *one.shape))
        return kept

    def enter(self, seat: int, source: int, carried: Tensor) -> None:
        """A request takes a seat; ``carried`` [depths - 1, F]."""
        self._open_carried(source, carried)[seat].copy_(carried)

    def move(self, old: int, new: int) -> None:
        """A request takes another seat."""
        for kept in (*self._read.values(), *self._carried.values()):
            by_seat = kept.view(self._memory.seats, -1)
            by_seat[new].copy_(by_seat[old])

    def of(self, seat: int, source: int, accepted: int) -> Tensor | None:
        """[depths, F] a copy: the feature of the last token that the target has read in the seat's newest step, of
        which it accepted so many drafts, and what deeper layers go on from. None: the drafter is no head."""
        read, carried = self._read.get(source), self._carried.get(source)
        if read is None:
            return None
        row = seat * (self._memory.drafts + 1) + accepted
        own = read[row : row + 1]
        return own.clone() if carried is None else torch.cat((own, carried[seat]))

    # ----------------------------------------------------------------------------------- what is captured

    def give(self, target: PassSeats, seated: SeatedLoop) -> Tensor | None:
        """Fill in the features of a loop's first pass. `LoopRows.ends` of a head, to be written; None: it is none."""
        memory, shape, loop, head = self._memory, target.rows.shape, seated.drafter.loop, seated.drafter.head
        count, seats = shape.requests, loop.seats
        if seats.features is None:
            return None
        rows = memory.committed_rows(count, shape.rows)
        if head is None:
            read = rows.gather(1, memory.walk.accepted[:count, None].long())
            newest = memory.numbers[:count] * shape.rows + read.squeeze(1)
            seats.features.copy_(target.output.hidden.index_select(0, newest))
            return None
        # row j of a seat is token known + j, with what the target computed when it read the one before
        width = min(loop.shape.rows, shape.rows)
        combined = head.combine(target.output, slice(0, shape.size)).view(count, shape.rows, -1)
        combined = combined.gather(1, rows[:, :width, None].expand(-1, -1, combined.shape[2]))
        seats.features.view(count, loop.shape.rows, -1)[:, :width].copy_(combined)
        # what `of` reads, of those who take part
        own = self._read[seated.source].view(memory.seats, memory.drafts + 1, -1)[:count, :width]
        own.copy_(torch.where(memory.now[:count, :1, None] > 0, combined, own))
        if seats.carried is not None:
            seats.carried.copy_(self._carried[seated.source][:count])
        return self._ends[id(loop)]

    def keep(self, seated: SeatedLoop) -> None:
        """Behind a loop: keep the features of blocks' last tokens as each layer reads them, and what is carried."""
        memory, loop, blocks = self._memory, seated.drafter.loop, seated.drafter.block_features
        if blocks is None:
            return
        seats, (count, width) = loop.seats, (loop.shape.requests, loop.shape.rows)
        assert seats.features is not None
        ends = self._ends[id(loop)]
        blocks[:, 0].index_copy_(0, ends, seats.features)
        if seats.carried is None:
            return
        mine = (memory.now[:count, :1] > 0) & (memory.told[:count, LOOP : LOOP + 1] == seated.number)
        # the row that reads what the layer above gave for the last token which it has seen
        row = seats.last - memory.numbers[:count] * width + 1
        row = torch.where(seats.length > 0, row, memory.walk.accepted[:count].long())
        for kept, (depth, given) in zip(
            self._carried[seated.source][:count].unbind(1), enumerate(seats.deeper, 1), strict=True
        ):
            blocks[:, depth].index_copy_(0, ends, given[:, :width].flatten(0, 1))
            new = given.gather(1, row[:, None, None].expand(-1, 1, given.shape[2])).squeeze(1)
            kept.copy_(torch.where(mine, new, kept))

"""Between the passes of a step of seats: one launch for the rows of the target's pass, one for what was committed and
the rows of a drafter's first pass, one for its new drafts. The reference is `.rows` and `.rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.seats.memory import RULE, RULES, SeatMemory
from draftwise.graphs.seats.rows import SHAPES, LoopRows, static_of
from draftwise.graphs.seats.rules import Deciding
from draftwise.kernels.triton import verify as rules
from draftwise.kernels.triton.availability import LAUNCH
from draftwise.kernels.triton.rows import compact_paths, power_of_two
from draftwise.kernels.triton.verify import FIELDS, DraftBatch
from draftwise.kernels.walk import Walk
from draftwise.types import StepInput

_KINDS: Final = {"argmax": 0, "draft": 1, "shared": 2}
_TILE: Final = 1024
"""Places of a text that a program looks at together."""


class SeatVerification:
    """Memory of the kernels that verify S seats: the table of their drafts, and the addresses of q.

    ``batch``: S + 1 requests, of which the last one is nobody, without drafts: whoever is under another rule than the
    one that decides just then is that one. ``sources`` [n, 3] int64: address of a source's q, bytes from one seat to
    the next, and from one draft to the next; row 0, of point masses, is 0.
    """

    def __init__(self, memory: SeatMemory, rates: tuple[float, ...], num_sources: int) -> None:
        device = memory.device
        width = FIELDS + 3 * memory.drafts
        table = torch.zeros((memory.seats + 1, width), dtype=torch.int64, device=device)
        self.batch = DraftBatch(table, memory.drafts)
        self.rates = torch.tensor(rates or (0.0,), dtype=torch.float64, device=device)
        self.sources = torch.zeros((num_sources + 1, 3), dtype=torch.int64, device=device)

    def open_source(self, number: int, q: Tensor) -> None:
        """``q`` [S, K, V] float32 of a source."""
        assert q.stride(2) == 1
        strides = [q.stride(0) * q.element_size(), q.stride(1) * q.element_size()]
        self.sources[number].copy_(torch.tensor([q.data_ptr(), *strides]))


def begin(memory: SeatMemory, batch: StepInput, spare_slot: int, verification: SeatVerification) -> None:
    """As `.rows.begin`; besides, the table of drafts is made."""
    from draftwise.kernels.triton.device import seats as device

    static = static_of(batch)
    device.begin_rows[(static.context.shape[0],)](
        memory.state,
        memory.told,
        memory.now,
        memory.tables,
        batch.token_ids,
        batch.positions,
        batch.slots,
        static.context,
        static.is_tree,
        static.ancestors,
        memory.forms,
        verification.batch.table,
        verification.sources,
        memory.told.stride(0),
        memory.tables.shape[1],
        spare_slot,
        memory.drafts,
        memory.shared_forms,
        static.rows,
        FRESH=memory.pages,
        FRESH_PAD=power_of_two(memory.pages),
        PAGE=memory.block_size,
        BLOCK=power_of_two(memory.drafts + 1),
        **LAUNCH,
    )


def verify(memory: SeatMemory, scores: Tensor, step: Deciding, verification: SeatVerification) -> None:
    """As `.rules.verify`. ``scores`` [R * N, V] float32 are consumed."""
    batch, walk, count = verification.batch, memory.walk, step.requests
    p: Tensor | None = None
    if not {"greedy", "coupled", "synthetic"}.issuperset(step.rules):
        p = scores.softmax(-1)
    for rule in step.rules:
        mine = memory.state[:count, RULE] == RULES.index(rule)
        members = _members(memory, mine)
        if rule in ("greedy", "coupled"):
            rules.walk_trees(scores, batch, members, walk, coupled=rule == "coupled")
        elif rule in ("synthetic", "synthetic_sampled"):
            sampled = p if rule != "synthetic" else None
            rules.keep_at_rates(scores, batch, members, walk, verification.rates, sampled)
        elif rule in ("typical", "typical_sampled"):
            assert p is not None
            rules.keep_typical(scores, p, batch, members, walk, sampled=rule != "typical")
        else:
            assert p is not None
            if step.trees:
                branched = memory.branched(count)
                members = _members(memory, mine & ~branched)
                rules.reject_trees(p, batch, _members(memory, mine & branched), walk)
            rules.reject_chains(p, batch, members, walk, block=rule == "block")


def _members(memory: SeatMemory, mine: Tensor) -> Tensor:
    """[R] int32 the seats that a rule decides; in the place of others nobody."""
    return torch.where(mine, memory.numbers[: len(mine)], memory.seats).to(torch.int32)


def advance(memory: SeatMemory, count: int, loop: LoopRows | None = None) -> None:
    """As `.rows.advance`."""
    from draftwise.kernels.triton.device import seats as device

    nothing = memory.now  # where there is no drafter, nothing is written to it
    first = [nothing] * 13
    ends = nothing
    num_pages = draws = rows = levels = number = max_len = spare_slot = spare_block = 0
    source = drafter = kind = 0
    if loop is not None:
        seats, batch = loop.seats, loop.batch
        static = static_of(batch)
        first = [
            static.tables,
            batch.token_ids,
            batch.positions,
            batch.slots,
            static.context,
            static.first_key,
            seats.last,
            seats.start,
            seats.length,
            seats.noise,
            seats.depths,
            seats.nodes,
            seats.reach,
        ]
        num_pages = static.tables.shape[1]
        draws, rows, levels = seats.noise.shape[1], static.rows, len(seats.reach) - 1
        assert seats.noise.is_contiguous()
        number, max_len, spare_slot = loop.number, loop.max_len, loop.spare_slot
        spare_block, source = loop.spare_block, loop.source
        drafter, kind = 1 + loop.head, _KINDS[loop.kind]
        ends = nothing if loop.ends is None else loop.ends
    device.advance_rows[(count,)](
        memory.state,
        memory.told,
        memory.now,
        memory.walk.packed,
        memory.answer,
        *first,
        ends,
        memory.told.stride(0),
        num_pages,
        draws,
        memory.drafts,
        levels,
        number,
        max_len,
        spare_slot,
        spare_block,
        source,
        DRAFTER=drafter,
        TREE=0 if loop is None else SHAPES.index(loop.shape),
        KIND=kind,
        ROWS=rows,
        PAGE=memory.block_size,
        BLOCK=power_of_two(max(memory.drafts + 1, rows)),
        **LAUNCH,
    )


def compact(memory: SeatMemory, count: int, width: int, slots: Tensor, pools: Sequence[Tensor]) -> None:
    """As `.rows.compact`."""
    walk = Walk(memory.walk.packed[:count], memory.drafts)
    for pool in pools:
        compact_paths(pool, slots, memory.numbers[:count] * width, walk)


def finish(memory: SeatMemory, count: int, loop: LoopRows) -> None:
    """As `.rows.finish`."""
    from draftwise.kernels.triton.device import seats as device

    drafted, form = loop.seats.tokens, loop.seats.form
    device.keep_drafts[(count,)](
        drafted,
        drafted if form is None else form,
        memory.state,
        memory.told,
        memory.now,
        memory.answer,
        memory.own_forms,
        drafted.stride(0),
        memory.told.stride(0),
        memory.drafts,
        drafted.shape[1],
        loop.number,
        DYNAMIC=form is not None,
        BLOCK=power_of_two(drafted.shape[1] + 1),
        **LAUNCH,
    )


def look_up(memory: SeatMemory, count: int, number: int, look: LookUp) -> None:
    """As `.lookup.look_up`."""
    from draftwise.kernels.triton.device import lookup as device

    text, past = memory.text, memory.past
    slope, height = look.line
    device.look_up[(count,)](
        memory.state,
        memory.told,
        memory.now,
        memory.walk.packed,
        memory.answer,
        text,
        past if look.past else text,
        memory.paths,
        memory.told.stride(0),
        text.stride(0),
        len(past),
        memory.drafts,
        look.steps,
        number,
        look.longest,
        look.shortest,
        slope,
        height,
        look.least or 0.0,
        PAST=look.past,
        CUT=look.least is not None,
        JOINS=look.joins,
        TILE=_TILE,
        BLOCK=power_of_two(memory.drafts + 1),
        **LAUNCH,
    )
    if look.joins:
        device.join_found[(count,)](
            memory.state,
            memory.told,
            memory.answer,
            memory.own_forms,
            memory.paths,
            memory.told.stride(0),
            memory.drafts,
            BLOCK=power_of_two(memory.drafts),
            **LAUNCH,
        )

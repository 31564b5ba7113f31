"""Between the passes of a step of seats: one launch for the rows of the target's pass, one for what was committed and
the rows of a drafter's first pass, one for its new drafts. The reference is `.rows` and `.rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from draftwise.graphs.buffers import static_of
from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.seats.memory import RULE, RULES, SeatMemory
from draftwise.graphs.seats.rows import SHAPES, LoopRows
from draftwise.graphs.seats.rules import Deciding
from draftwise.kernels.triton import device
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
        self.batch = DraftBatch(table, memory.walk)
        self.rates = torch.tensor(rates or (0.0,), dtype=torch.float64, device=device)
        self.sources = torch.zeros((num_sources + 1, 3), dtype=torch.int64, device=device)

    def open_source(self, number: int, q: Tensor) -> None:
        """``q`` [S, K, V] float32 of a source."""
        assert q.stride(2) == 1
        strides = [q.stride(0) * q.element_size(), q.stride(1) * q.element_size()]
        self.sources[number].copy_(torch.tensor([q.data_ptr(), *strides]))


def begin(memory: SeatMemory, batch: StepInput, spare_slot: int, verification: SeatVerification) -> None:
    """As `.rows.begin`; besides, the table of drafts is made."""
    static, tables = static_of(batch), memory.tables
    given = (memory.state, memory.told, memory.now, tables, batch.token_ids, batch.positions, batch.slots)
    made = (static.context, static.is_tree, static.ancestors)
    known = (memory.forms, verification.batch.table, verification.sources, memory.told.stride(0))
    sizes = (tables.shape[1], spare_slot, memory.drafts, memory.shared_forms, static.rows)
    device.seats.begin_rows[(len(static.context),)](
        *given,
        *made,
        *known,
        *sizes,
        FRESH=memory.pages,
        FRESH_PAD=power_of_two(memory.pages),
        PAGE=memory.block_size,
        BLOCK=power_of_two(memory.drafts + 1),
        **LAUNCH,
    )


def verify(memory: SeatMemory, scores: Tensor, step: Deciding, verification: SeatVerification) -> None:
    """As `.rules.verify`. ``scores`` [R * N, V] float32 are consumed."""
    batch, count = verification.batch, step.requests
    p = scores.softmax(-1) if step.weighs else scores
    for rule in step.rules:
        mine = memory.state[:count, RULE] == RULES.index(rule)
        members = _members(memory, mine)
        if rule in ("greedy", "coupled"):
            rules.walk_trees(scores, batch, members, coupled=rule == "coupled")
        elif rule in ("synthetic", "synthetic_sampled"):
            sampled = p if rule != "synthetic" else None
            rules.keep_at_rates(scores, batch, members, verification.rates, sampled)
        elif rule in ("typical", "typical_sampled"):
            rules.keep_typical(scores, p, batch, members, sampled=rule != "typical")
        else:
            if step.trees:
                branched = memory.branched(count)
                members = _members(memory, mine & ~branched)
                rules.reject_trees(p, batch, _members(memory, mine & branched))
            rules.reject_chains(p, batch, members, block=rule == "block")


def _members(memory: SeatMemory, mine: Tensor) -> Tensor:
    """[R] int32 the seats that a rule decides; in the place of others nobody."""
    return torch.where(mine, memory.numbers[: len(mine)], memory.seats).to(torch.int32)


def advance(memory: SeatMemory, count: int, loop: LoopRows | None = None) -> None:
    """As `.rows.advance`."""
    given = [memory.now] * 14  # where there is no drafter, nothing is written to these
    sizes, rows, flags = [0] * 8, 0, {"DRAFTER": 0, "TREE": 0, "KIND": 0}
    if loop is not None:
        seats, batch, static = loop.seats, loop.batch, static_of(loop.batch)
        rows = static.rows
        assert seats.noise.is_contiguous()
        given = [static.tables, batch.token_ids, batch.positions, batch.slots, static.context]
        given += [static.first_key, seats.last, seats.start, seats.length, seats.noise, seats.depths]
        given += [seats.nodes, seats.reach, memory.now if loop.ends is None else loop.ends]
        sizes = [static.tables.shape[1], seats.noise.shape[1], len(seats.reach) - 1, loop.number]
        sizes += [loop.max_len, loop.spare_slot, loop.spare_block, loop.source]
        flags = {"DRAFTER": 1 + loop.head, "TREE": SHAPES.index(loop.shape), "KIND": _KINDS[loop.kind]}
    device.seats.advance_rows[(count,)](
        *_words(memory),
        *given,
        *sizes,
        **flags,
        ROWS=rows,
        PAGE=memory.block_size,
        BLOCK=power_of_two(max(memory.drafts + 1, rows)),
        **LAUNCH,
    )


def _words(memory: SeatMemory) -> tuple[Tensor | int, ...]:
    """What kernels behind verification are given first."""
    walk = memory.walk.packed
    return memory.state, memory.told, memory.now, walk, memory.answer, memory.told.stride(0), memory.drafts


def compact(memory: SeatMemory, count: int, width: int, slots: Tensor, pools: Sequence[Tensor]) -> None:
    """As `.rows.compact`."""
    walk = Walk(memory.walk.packed[:count], memory.drafts)
    for pool in pools:
        compact_paths(pool, slots, memory.numbers[:count] * width, walk)


def finish(memory: SeatMemory, count: int, loop: LoopRows) -> None:
    """As `.rows.finish`."""
    drafted, form = loop.seats.tokens, loop.seats.form
    assert drafted.is_contiguous()
    steps, kept = drafted.shape[1], drafted if form is None else form
    flags = {"DYNAMIC": form is not None, "BLOCK": power_of_two(steps + 1)}
    device.seats.keep_drafts[(count,)](
        *_words(memory), drafted, kept, memory.own_forms, steps, loop.number, **flags, **LAUNCH
    )


def look_up(memory: SeatMemory, count: int, number: int, look: LookUp) -> None:
    """As `.lookup.look_up`."""
    text, past, paths = memory.text, memory.past, memory.paths
    texts = (text, past if look.past else text, paths, text.stride(0), len(past))
    asked = (look.steps, number, look.longest, look.shortest, *look.line, look.least or 0.0)
    device.lookup.look_up[(count,)](
        *_words(memory),
        *texts,
        *asked,
        PAST=look.past,
        CUT=look.least is not None,
        JOINS=look.joins,
        TILE=_TILE,
        BLOCK=power_of_two(memory.drafts + 1),
        **LAUNCH,
    )
    if look.joins:
        device.lookup.join_found[(count,)](
            *_words(memory), memory.own_forms, paths, BLOCK=power_of_two(memory.drafts), **LAUNCH
        )

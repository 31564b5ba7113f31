"""Between the passes of a resident step: one launch for the rows of the target's pass, one for what was committed and
the rows of the drafter's first pass, one for the new drafts. The reference is `graphs.resident_rows` and
`graphs.resident_rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from draftwise.kernels.resident import LoopSeats, ResidentMemory, ResidentRule
from draftwise.kernels.triton import verify as rules
from draftwise.kernels.triton.availability import LAUNCH
from draftwise.kernels.triton.rows import power_of_two
from draftwise.kernels.triton.verify import FIELDS, DraftBatch
from draftwise.types import StepInput

_KINDS: Final = {"argmax": 0, "draft": 1, "shared": 2}


class ResidentVerification:
    """What kernels keep for the verification of S slots: the table of their drafts, and their numbers."""

    def __init__(self, memory: ResidentMemory, rule: ResidentRule, q: Tensor | None) -> None:
        """``q``: [S, >= K, V] float32, what drafts are drawn from; None: point masses."""
        device = memory.state.device
        width = FIELDS + 3 * memory.drafts
        table = torch.zeros((memory.slots, width), dtype=torch.int64, device=device)
        self.batch = DraftBatch(table, memory.drafts)
        self.members = torch.arange(memory.slots, dtype=torch.int32, device=device)
        self.rule = rule
        self.q = q
        assert q is None or q.stride(2) == 1
        self.rates = torch.tensor(rule.rates or (0.0,), dtype=torch.float64, device=device)


def begin(
    memory: ResidentMemory,
    batch: StepInput,
    tables: Sequence[Tensor],
    spare_slot: int,
    verification: ResidentVerification,
) -> None:
    """As `graphs.resident_rows.begin`; besides, the table of drafts is made."""
    from draftwise.kernels.triton.device import resident as device

    static, q = batch.attention.static, verification.q
    assert static is not None
    device.begin_rows[(memory.slots,)](
        memory.state,
        memory.told,
        memory.now,
        tables[0],
        tables[-1],
        batch.token_ids,
        batch.positions,
        batch.slots,
        static.context,
        verification.batch.table,
        0 if q is None else q.data_ptr(),
        0 if q is None else q.stride(0) * q.element_size(),
        0 if q is None else q.stride(1) * q.element_size(),
        memory.state.stride(0),
        memory.told.stride(0),
        tables[0].stride(0),
        tables[-1].stride(0),
        tables[0].shape[1],
        spare_slot,
        memory.drafts,
        FRESH=memory.pages,
        FRESH_PAD=power_of_two(memory.pages),
        TABLES=len(tables),
        PAGE=memory.block_size,
        BLOCK=power_of_two(memory.drafts + 1),
        **LAUNCH,
    )


def verify(memory: ResidentMemory, logits: Tensor, verification: ResidentVerification) -> None:
    """As `graphs.resident_rules.verify`. ``logits`` [S * (K + 1), V] float32 are consumed."""
    rule, batch, members, walk = verification.rule, verification.batch, verification.members, memory.walk
    if rule.name != "greedy":
        temperatures = memory.temperatures.float()[:, None].expand(-1, memory.drafts + 1)
        logits.div_(temperatures.reshape(-1, 1))
    if rule.name in ("greedy", "coupled"):
        rules.walk_trees(logits, batch, members, walk, coupled=rule.name == "coupled")
    elif rule.name == "synthetic":
        rules.keep_at_rates(logits, batch, members, walk, verification.rates, sampled=rule.sampled)
    else:
        rules.reject_chains(logits.softmax(-1), batch, members, walk, block=rule.name == "block")


def advance(
    memory: ResidentMemory,
    *,
    seats: LoopSeats | None = None,
    batch: StepInput | None = None,
    kind: str = "argmax",
    max_len: int = 0,
    spare_slot: int = 0,
    head: bool = False,
    ends: Tensor | None = None,
    spare_block: int = 0,
) -> None:
    """As `graphs.resident_rows.advance`."""
    from draftwise.kernels.triton.device import resident as device

    nothing = memory.now  # where there is no drafter, nothing is written to it
    first = [nothing] * 10
    table_stride = num_pages = noise_stride = rows = 0
    if seats is not None:
        assert batch is not None and batch.attention.static is not None
        static = batch.attention.static
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
        ]
        table_stride, num_pages = static.tables.stride(0), static.tables.shape[1]
        noise_stride, rows = seats.noise.stride(0), static.rows
    device.advance_rows[(memory.slots,)](
        memory.state,
        memory.told,
        memory.now,
        memory.walk.packed,
        memory.answer,
        *first,
        nothing if ends is None else ends,
        memory.state.stride(0),
        memory.told.stride(0),
        memory.answer.stride(0),
        table_stride,
        num_pages,
        noise_stride,
        memory.drafts,
        max_len,
        spare_slot,
        spare_block,
        DRAFTER=0 if seats is None else 1 + head,
        KIND=_KINDS[kind],
        ROWS=rows,
        PAGE=memory.block_size,
        BLOCK=power_of_two(max(memory.drafts + 1, rows)),
        **LAUNCH,
    )


def finish(memory: ResidentMemory, seats: LoopSeats, target_ids: Tensor | None) -> None:
    """As `graphs.resident_rows.finish`."""
    from draftwise.kernels.triton.device import resident as device

    device.keep_drafts[(memory.slots,)](
        seats.tokens,
        memory.state,
        memory.answer,
        seats.tokens.stride(0),
        memory.state.stride(0),
        memory.answer.stride(0),
        memory.drafts,
        BLOCK=power_of_two(memory.drafts),
        **LAUNCH,
    )
    if memory.q is not None and seats.q is not None:
        assert target_ids is not None
        memory.q.index_copy_(2, target_ids, seats.q[:, : memory.drafts])

"""The rows of a resident step in plain torch: of the target's pass, of the drafter's first pass, and what is kept and
told of it. The kernels in `kernels/triton/resident.py` do the same.

Nothing here reads a value on the host: everything is captured, and done again in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.resident import (
    ACCEPTED,
    ANSWER,
    ANSWERED_FED,
    ANSWERED_KNOWN,
    ANSWERED_WAITING,
    BUDGET,
    FED,
    KNOWN,
    LIMIT,
    NODES,
    RAN,
    ROOT,
    SAMPLE,
    SEED,
    STORED,
    TOLD,
    VERIFIED,
    WAITING,
    LoopSeats,
    ResidentMemory,
)
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.noise import device_keys, uniforms_of_keys
from draftwise.types import StepInput


def begin(memory: ResidentMemory, batch: StepInput, tables: Sequence[Tensor], spare_slot: int) -> None:
    """Fill in the target's pass: of every slot the root, and the drafts that it verifies.

    Args:
        memory: see there; ``now`` is written.
        batch: S requests of K + 1 rows each; its tensors are written.
        tables: [>= S, blocks] int32 each, the target's and the drafter's block tables; the new blocks are added.
        spare_slot: where rows are written that do not count.
    """
    state, told, slots = memory.state, memory.told, memory.slots
    pages, blocks = told[:, TOLD : TOLD + memory.pages], told[:, TOLD + memory.pages :].to(torch.int32)
    for table in tables:
        table[:slots].scatter_(1, pages, blocks)
    known = state[:, KNOWN]
    live = known < told[:, LIMIT]
    nodes = torch.minimum(told[:, NODES], state[:, WAITING]) * live
    memory.now[:, 0].copy_(live)
    memory.now[:, 1].copy_(nodes)
    row = torch.arange(memory.drafts + 1, device=state.device)
    real = live[:, None] & (row <= nodes[:, None])
    tokens = torch.cat((state[:, ROOT : ROOT + 1], memory.waiting_drafts), dim=1)
    keys = known[:, None] - 1 + row
    _put(batch, memory, tokens, keys, keys, real, tables[0], spare_slot)
    static = batch.attention.static
    assert static is not None
    static.context.copy_(torch.where(live, known - 1, 0))


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
    """Take in what was verified (``memory.walk``), and fill in the drafter's first pass.

    Args:
        memory: see there; ``state`` and ``answer`` are written, up to the drafts.
        seats: of the drafter's loop; None: nobody drafts.
        batch: its first pass, S requests of N rows.
        kind: how the loop draws: ``argmax``, ``draft`` or ``shared``.
        max_len: no token at this position or later is fed to the drafter.
        spare_slot: the drafter's.
        head: its rows are those of the committed tokens, at positions one less than their keys; else it is a draft
            model, which has read all but one or two of the known tokens.
        ends: [S * (K + 1)] int64, written: the block of which a row of the target's pass is the last token;
            ``spare_block`` of rows that are none.

    Example: 10 known tokens, drafts 5, 6, 7, of which 5 is accepted, and 8 follows: 12 known tokens, root 8. A head's
    rows are tokens 5 and 8 at keys 10 and 11; a draft model, which has stored 5 and 6, reads 8 at key 11.
    """
    state, told, drafts = memory.state, memory.told, memory.drafts
    live = memory.live
    known, old_root = state[:, KNOWN].clone(), state[:, ROOT].clone()
    accepted = memory.walk.accepted.long() * live
    tokens = memory.walk.tokens.long()  # [S, K + 1]; those behind the last one mean nothing
    last = tokens.gather(1, accepted[:, None]).squeeze(1)
    after = known + (accepted + 1) * live
    root = torch.where(live, last.clamp(min=0), old_root)  # -1: no token could be drawn, the request fails
    wanted = torch.minimum(told[:, BUDGET], told[:, LIMIT] - after - 1)
    wanted = torch.minimum(wanted, max_len - after + 1).clamp(0, drafts) * live
    fed = state[:, FED].clone()
    if seats is not None:
        assert batch is not None
        drafts_on = wanted > 0
        if head:
            first, count, rows = known, accepted + drafts_on, tokens
            if ends is not None:
                _ends(memory, known, accepted, live, batch, ends, spare_block)
            fed = torch.where(live & (fed == known), after - (~drafts_on).long(), fed)
        else:
            fed = fed + torch.minimum(accepted, state[:, STORED]) * live
            first = torch.minimum(fed, after - 1)
            count = (after - first) * drafts_on
            # the token before the root: the last accepted draft, or the root of before
            before = memory.waiting_drafts.gather(1, (accepted - 1).clamp(min=0)[:, None]).squeeze(1)
            before = torch.where(accepted > 0, before, old_root)
            rows = torch.stack((torch.where(count == 2, before, root), root), dim=1)
            fed = torch.where(drafts_on, after, fed)
        width = rows.shape[1]
        row = torch.arange(width, device=state.device)
        real = live[:, None] & (row < count[:, None])
        keys = first[:, None] + row
        static = batch.attention.static
        assert static is not None
        _put(batch, memory, rows, keys, keys - int(head), real, static.tables, spare_slot)
        # rows that fill up must see some key: of nothing no distribution can be made
        first_key = static.first_key.long()
        static.context.copy_(torch.where(live & (count > 0), first, first_key))
        slot = torch.arange(memory.slots, device=state.device)
        seats.last.copy_(slot * width + torch.where(drafts_on, count - 1, 0))
        seats.start.copy_(torch.where(drafts_on, after, first_key))
        seats.length.copy_(wanted)
        _noise(memory, seats, after, kind)
    state[:, KNOWN].copy_(after)
    state[:, ROOT].copy_(root)
    state[:, WAITING].copy_(wanted)
    state[:, FED].copy_(fed)
    state[:, STORED].copy_((wanted - 1).clamp(min=0))
    answer = memory.answer
    answer[:, RAN].copy_(live)
    answer[:, VERIFIED].copy_(memory.now[:, 1])
    answer[:, ACCEPTED].copy_(accepted)
    answer[:, ANSWERED_KNOWN].copy_(after)
    answer[:, ANSWERED_WAITING].copy_(wanted)
    answer[:, ANSWERED_FED].copy_(fed)
    answer[:, ANSWER : ANSWER + drafts + 1].copy_(tokens)


def finish(memory: ResidentMemory, seats: LoopSeats, target_ids: Tensor | None) -> None:
    """Keep what was drafted. ``target_ids``: as `HeadModel.target_ids`, for distributions over the draft vocabulary."""
    drafted = seats.tokens[:, : memory.drafts]
    memory.waiting_drafts.copy_(drafted)
    memory.answer[:, ANSWER + memory.drafts + 1 :].copy_(drafted)
    if memory.q is not None and seats.q is not None:
        assert target_ids is not None
        # other tokens stay at 0
        memory.q.index_copy_(2, target_ids, seats.q[:, : memory.drafts])


def _put(
    batch: StepInput,
    memory: ResidentMemory,
    tokens: Tensor,
    keys: Tensor,
    positions: Tensor,
    real: Tensor,
    table: Tensor,
    spare_slot: int,
) -> None:
    """Rows [S, N] of a pass; those that are not ``real`` fill up."""
    size = memory.block_size
    pages = (keys // size).clamp(0, table.shape[1] - 1)
    slots = table[: memory.slots].gather(1, pages).long() * size + keys % size
    batch.token_ids.view(keys.shape).copy_(tokens * real)
    batch.positions.view(keys.shape).copy_(positions * real)
    batch.slots.view(keys.shape).copy_(torch.where(real, slots, spare_slot))


def _ends(
    memory: ResidentMemory,
    known: Tensor,
    accepted: Tensor,
    live: Tensor,
    batch: StepInput,
    ends: Tensor,
    spare_block: int,
) -> None:
    """Row j of a slot read token known - 1 + j; of blocks' last tokens the feature is kept.

    Example: blocks of 4, 7 known tokens, two drafts accepted: rows 0..2 read tokens 6, 7 and 8; row 1 is the end of
    block number 1 of the request.
    """
    static = batch.attention.static
    assert static is not None
    size, table = memory.block_size, static.tables
    row = torch.arange(memory.drafts + 1, device=known.device)
    read = known[:, None] - 1 + row
    final = live[:, None] & (row <= accepted[:, None]) & ((read + 1) % size == 0)
    pages = (read // size).clamp(0, table.shape[1] - 1)
    blocks = table[: memory.slots].gather(1, pages).long()
    ends.view(read.shape).copy_(torch.where(final, blocks, spare_block))


def _noise(memory: ResidentMemory, seats: LoopSeats, after: Tensor, kind: str) -> None:
    """As `ChainLoop.run` gets it from the host: draft i stands at position ``after + i``, node i of its step."""
    if kind == "argmax":
        return
    seeds, samples = memory.state[:, SEED, None], memory.state[:, SAMPLE, None]
    node = torch.arange(memory.drafts, device=after.device)
    base = after[:, None]
    if kind == "shared":
        noise = device_keys(SHARED, seeds, samples, base + node, node, base)
    else:
        keys = device_keys(DRAFT, seeds, samples, base + node, node, base)
        noise = uniforms_of_keys(keys).view(torch.int64)
    seats.noise[:, : memory.drafts].copy_(noise)

"""The rows of a step of seats in plain torch: of the target's pass, of the drafter's first pass, and what is kept and
told of it. The kernels behind `graphs.seats.kernels` do the same.

Nothing here reads a value on the host: everything is captured, and done again in every step. R of the S seats take
part, the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from draftwise.graphs.buffers import static_of
from draftwise.graphs.loop import LoopKind, LoopSeats
from draftwise.graphs.seats import memory as at
from draftwise.graphs.seats.memory import SeatMemory
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.noise import device_keys, uniforms_of_keys
from draftwise.types import StepInput

DraftShape = Literal["chain", "static", "dynamic", "masked"]
SHAPES: Final[tuple[DraftShape, ...]] = ("chain", "static", "dynamic", "masked")
"""How the drafts of a loop stand: one below the other, or in a tree, which is the same for all requests or not; masked:
one below the other, all from one pass."""


class LoopRows(NamedTuple):
    """A draft loop that seats draft with: its number, what it reads, its first pass of R requests, and its kind.

    ``max_len``: no token at this position or later is fed to the drafter. ``head``: its rows are those of the committed
    tokens, at positions one less than their keys; else it is a draft model, which has read all but one or two of the
    known tokens. ``shape``: see `SHAPES`; drafts of a chain alone stay stored, and of others all that a step commits
    is read again. ``ends`` [R * rows] int64, of heads, written: the block of which a row of the target's pass is the
    last token; ``spare_block`` of rows that are none. ``source``: of its drafts, see `memory.SOURCE`.
    """

    number: int
    seats: LoopSeats
    batch: StepInput
    kind: LoopKind
    max_len: int
    spare_slot: int
    head: bool = False
    shape: DraftShape = "chain"
    ends: Tensor | None = None
    spare_block: int = 0
    source: int = 0


def begin(memory: SeatMemory, batch: StepInput, spare_slot: int) -> None:
    """Fill in the target's pass: of every seat the root, and the drafts that it verifies.

    Args:
        memory: see there; ``now`` is written, and new blocks are added to ``tables``.
        batch: R requests of N rows each; its tensors are written.
        spare_slot: where rows are written that do not count.
    """
    static = static_of(batch)
    count, width = static.context.shape[0], static.rows
    state, told = memory.state[:count], memory.told[:count]
    pages = told[:, at.TOLD : at.TOLD + memory.pages]
    blocks = told[:, at.TOLD + memory.pages :].to(torch.int32)
    live = state[:, at.KNOWN] < told[:, at.LIMIT]
    # seats that take no part: the block that stands there is written again
    table = memory.tables[:count]
    table.scatter_(1, pages, torch.where(live[:, None], blocks, table.gather(1, pages)))
    known = state[:, at.KNOWN]
    forms = memory.forms_of(count)[..., :width]
    nodes = torch.minimum(told[:, at.NODES], state[:, at.WAITING]).clamp(max=width - 1) * live
    memory.now[:count, 0].copy_(live)
    memory.now[:count, 1].copy_(nodes)
    row = torch.arange(width, device=state.device)
    real = live[:, None] & (row <= nodes[:, None])
    tokens = torch.cat((state[:, at.ROOT : at.ROOT + 1], memory.waiting_drafts[:count, : width - 1]), dim=1)
    keys = known[:, None] - 1 + row
    _put(batch, memory, tokens, keys, known[:, None] - 1 + forms[:, 0], real, table, spare_slot)
    static.ancestors.view(keys.shape).copy_(torch.where(real, forms[:, 1], 1))
    static.is_tree.copy_(forms[:, 3, 0])
    static.context.copy_(torch.where(live, known - 1, 0))


def advance(memory: SeatMemory, count: int, loop: LoopRows | None = None) -> None:
    """Take in what was verified of the seats that draft with this loop (``memory.walk``), and fill in its first pass.

    Args:
        memory: see there; ``state`` and ``answer`` are written, up to the drafts.
        count: R.
        loop: None: of those with whom nobody drafts, or a look-up.

    Example: 10 known tokens, drafts 5, 6, 7, of which 5 is accepted, and 8 follows: 12 known tokens, root 8. A head's
    rows are tokens 5 and 8 at keys 10 and 11; a draft model, which has stored 5 and 6, reads 8 at key 11.
    """
    state, told, drafts, now = memory.state[:count], memory.told[:count], memory.drafts, memory.now[:count]
    mine = told[:, at.LOOP] == (0 if loop is None else loop.number)
    live = now[:, 0].bool() & mine
    known, old_root = state[:, at.KNOWN].clone(), state[:, at.ROOT].clone()
    accepted = memory.walk.accepted[:count].long() * live
    tokens = memory.walk.tokens[:count].long()  # [R, K + 1]; those behind the last one mean nothing
    last = tokens.gather(1, accepted[:, None]).squeeze(1)
    after = known + (accepted + 1) * live
    root = torch.where(live, last.clamp(min=0), old_root)  # -1: no token could be drawn, the request fails
    wanted = torch.zeros_like(after)
    fed = state[:, at.FED].clone()
    if loop is not None:
        seats, batch = loop.seats, loop.batch
        levels = torch.minimum(told[:, at.LIMIT] - after - 1, loop.max_len - after + 1)
        levels = levels.clamp(0, len(seats.reach) - 1)
        reach = seats.reach[levels]
        wanted = torch.minimum(told[:, at.BUDGET], reach).clamp(min=0) * live
        drafts_on = wanted > 0
        static = static_of(batch)
        width = static.rows
        if loop.head:
            first, count_of = known, accepted + drafts_on
            if loop.ends is not None:
                _ends(memory, known, accepted, live, loop)
            fed = torch.where(live & (fed == known), after - (~drafts_on).long(), fed)
        else:
            fed = fed + torch.minimum(accepted, state[:, at.STORED]) * live
            # one row: of a drafter that has no storage
            first = after - 1 if width == 1 else torch.minimum(fed, after - 1)
            count_of = (after - first) * drafts_on
            fed = torch.where(drafts_on, after, fed)
        row = torch.arange(width, device=state.device)
        keys = first[:, None] + row
        behind = keys - known[:, None]
        rows = tokens.clamp(min=0).gather(1, behind.clamp(0, drafts))
        rows = torch.where(behind < 0, old_root[:, None], rows)
        rows = torch.where(row < count_of[:, None], rows, 0)
        masks = (wanted - 1).clamp(min=0) if loop.shape == "masked" else 0
        real = live[:, None] & (row < (count_of + masks)[:, None])
        _put(batch, memory, rows, keys, keys - int(loop.head), real, static.tables, loop.spare_slot)
        # rows that fill up must see some key: of nothing no distribution can be made
        first_key = state[:, at.FIRST_KEY]
        static.first_key.copy_(first_key)
        static.context.copy_(torch.where(live & (count_of > 0), first, first_key))
        slot = torch.arange(len(after), device=state.device)
        seats.last.copy_(slot * width + (count_of - 1).clamp(min=0))
        seats.start.copy_(torch.where(drafts_on, after, first_key))
        seats.length.copy_(reach * drafts_on if loop.shape == "dynamic" else wanted)
        _noise(memory, loop, after)
    state[:, at.KNOWN].copy_(after)
    state[:, at.ROOT].copy_(root)
    state[:, at.WAITING].copy_(torch.where(live, wanted, state[:, at.WAITING]))
    state[:, at.FED].copy_(fed)
    chain = loop is None or loop.shape == "chain"
    stored = (wanted - 1).clamp(min=0) if chain else torch.zeros_like(wanted)
    state[:, at.STORED].copy_(torch.where(live, stored, state[:, at.STORED]))
    source = 0 if loop is None else loop.source
    state[:, at.SOURCE].copy_(torch.where(live, source, state[:, at.SOURCE]))
    answer = memory.answer[:count]
    told_back = torch.stack((live.long(), now[:, 1], accepted, after, wanted, fed), dim=1)
    told_back = torch.cat((told_back, tokens), dim=1)
    path = at.ANSWER + 2 * drafts + 1
    paths = memory.walk.paths[:count].long()
    for columns, new in (
        (answer[:, : at.ANSWER + drafts + 1], told_back),
        (answer[:, path : path + drafts], paths),
    ):
        columns.copy_(torch.where(mine[:, None], new, columns))


_STACKED = at.RAN, at.VERIFIED, at.ACCEPTED, at.ANSWERED_KNOWN, at.ANSWERED_WAITING, at.ANSWERED_FED
assert tuple(range(at.ANSWER)) == _STACKED


def finish(memory: SeatMemory, count: int, loop: LoopRows) -> None:
    """Keep what was drafted."""
    drafted, form = loop.seats.tokens, loop.seats.form
    steps, drafts, answer = drafted.shape[1], memory.drafts, memory.answer[:count]
    first = at.ANSWER + drafts + 1
    mine = (memory.now[:count, :1] > 0) & (memory.told[:count, at.LOOP : at.LOOP + 1] == loop.number)
    for kept in (memory.waiting_drafts[:count, :steps], answer[:, first : first + steps]):
        kept.copy_(torch.where(mine, drafted, kept))
    if form is not None:
        kept = memory.own_forms[:count, :3, 1 : steps + 1]
        parents = answer[:, first + 2 * drafts :][:, :steps]
        kept.copy_(torch.where(mine[..., None], form[..., 1:], kept))
        parents.copy_(torch.where(mine, form[:, 2, 1:], parents))


def compact(memory: SeatMemory, count: int, width: int, slots: Tensor, pools: Sequence[Tensor]) -> None:
    """Move K/V of accepted paths up behind their roots, as `kernels.triton.rows.compact_paths`.

    Args:
        memory: ``walk`` is read.
        count: R.
        width: N rows of a request.
        slots: [R * N] int64, of the pass.
        pools: see `KVStorage.pools`; written.
    """
    own = slots.view(count, width)[:, : memory.drafts + 1]
    moved = own.gather(1, memory.committed_rows(count, width))
    row = torch.arange(own.shape[1], device=slots.device)
    sources = torch.where(row <= memory.walk.accepted[:count, None], moved, own).flatten()
    for pool in pools:
        pool.index_copy_(1, own.flatten(), pool.index_select(1, sources))


def _put(
    batch: StepInput,
    memory: SeatMemory,
    tokens: Tensor,
    keys: Tensor,
    positions: Tensor,
    real: Tensor,
    table: Tensor,
    spare_slot: int,
) -> None:
    """Rows [R, N] of a pass; those that are not ``real`` fill up."""
    size = memory.block_size
    pages = (keys // size).clamp(0, table.shape[1] - 1)
    slots = table.gather(1, pages).long() * size + keys % size
    batch.token_ids.view(keys.shape).copy_(tokens * real)
    batch.positions.view(keys.shape).copy_(positions * real)
    batch.slots.view(keys.shape).copy_(torch.where(real, slots, spare_slot))


def _ends(memory: SeatMemory, known: Tensor, accepted: Tensor, live: Tensor, loop: LoopRows) -> None:
    """Row j of a seat read token known - 1 + j; of blocks' last tokens the feature is kept.

    Example: blocks of 4, 7 known tokens, two drafts accepted: rows 0..2 read tokens 6, 7 and 8; row 1 is the end of
    block number 1 of the request.
    """
    assert loop.ends is not None
    static = static_of(loop.batch)
    size, table = memory.block_size, static.tables
    row = torch.arange(static.rows, device=known.device)
    read = known[:, None] - 1 + row
    final = live[:, None] & (row <= accepted[:, None]) & ((read + 1) % size == 0)
    pages = (read // size).clamp(0, table.shape[1] - 1)
    # scratch blocks have no features: they are met in a capture, which goes a step further than a plan
    blocks = table.gather(1, pages).long().clamp(max=loop.spare_block)
    loop.ends.view(read.shape).copy_(torch.where(final, blocks, loop.spare_block))


def _noise(memory: SeatMemory, loop: LoopRows, after: Tensor) -> None:
    """As `ChainLoop.run` gets it from the host: of a chain, draft i stands at position ``after + i``, node i of its
    step. Chains are drawn by uniforms; children of trees, of which several are, by Gumbel noise."""
    if loop.kind == "argmax":
        return
    count, noise = len(after), loop.seats.noise
    seeds, samples = memory.state[:count, at.SEED, None], memory.state[:count, at.SAMPLE, None]
    base = after[:, None]
    places, nodes = base + loop.seats.depths, loop.seats.nodes
    keys = device_keys(SHARED if loop.kind == "shared" else DRAFT, seeds, samples, places, nodes, base)
    if loop.kind == "draft" and loop.shape in ("chain", "masked"):
        keys = uniforms_of_keys(keys).view(torch.int64)
    noise.copy_(keys)

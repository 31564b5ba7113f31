"""Paged attention that promises no equal bits. Launched by `kernels.triton.attention`, which documents the arguments'
shapes; `combine_partitions` adds its slots up."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.tiles import keys_and_values, scores_of, with_tile


@triton.jit
def over_tiles(
    query,
    kv,
    scales,
    table,
    bits,
    pos,
    end,
    live,
    head,
    ctx,
    floor,
    stop,
    first,
    last,
    slots,
    window,
    scale,
    softcap,
    best,
    total,
    acc,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CODES: tl.constexpr,
    FP8: tl.constexpr,
    NODES: tl.constexpr,
):
    """Add every ``slots``-th tile of keys from ``first`` to before ``last`` to the lanes' sums. NODES: keys from the
    context on are a tree's, of which a lane sees those in its ``bits``."""
    offsets = tl.arange(0, BLOCK_N)
    for tile in tl.range(first, last, slots):
        p = tile * BLOCK_N + offsets
        taken = (p >= floor) & (p < stop)
        k, v = keys_and_values(
            query, kv, scales, table, p, taken, head, PAGE, KV_HEADS, DIM, DIM_PAD, CODES, FP8
        )
        scores = scores_of(query, k, scale, softcap, CAPPED)
        seen = live[:, None] & taken[None, :] & (p[None, :] <= end[:, None])
        near = seen
        if WINDOWED:
            near = seen & (pos[:, None] - p[None, :] < window)
        if NODES:
            node = tl.maximum(p - ctx, 0).to(tl.int64)
            own = ((bits[:, None] >> node[None, :]) & 1) != 0
            near = tl.where((p < ctx)[None, :], near, seen & own)
        scores = tl.where(near, scores, float("-inf"))
        best, total, acc = with_tile(query, scores, v, best, total, acc)
    return best, total, acc


@kernel("q", "kv", "scales", "part_acc", "part_max", "part_sum", "q_stride", "scale", "softcap")
def split_attention(
    q,
    kv,
    scales,
    tables,
    tasks,
    context,
    first_key,
    is_tree,
    positions,
    ends,
    masks,
    part_acc,
    part_max,
    part_sum,
    q_stride,
    table_stride,
    row_base,
    num_slots,
    scale,
    softcap,
    window,
    slots,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CODES: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`partial_attention` for those who do not ask that a tree's rows have the bits of a chain's: keys are taken as
    they stand, a tile of a tree's is done once for all lanes, and partitions are tiles. Slot i is a program of its own.

    ``ends``: of a row of a tree its last key. A window is no shorter than the deepest tree, so that nodes on a row's
    path are always in it.
    """
    task = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.program_id(2)
    r = tl.load(tasks + task * 3)
    first_row = tl.load(tasks + task * 3 + 1)
    num_rows = tl.load(tasks + task * 3 + 2)
    ctx = tl.load(context + r)
    tree = tl.load(is_tree + r)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane = tl.arange(0, BLOCK_M)
    row = lane // GROUP
    live = (row < num_rows) & (row < ROWS)
    pos = tl.load(positions + first_row + row, mask=live, other=-1)
    end = tl.load(ends + first_row + row, mask=live, other=-1)
    floor = tl.load(first_key + r)
    stop = tl.max(end, 0) + 1
    begin = slot
    if WINDOWED:
        seen_from = tl.maximum(tl.min(tl.where(live, pos, 2147483647), 0) - window + 1, 0)
        floor = tl.maximum(floor, seen_from)
        # the first tile from there on that belongs here. Example: 4 slots, slot 1, tile 6: 9
        begin = seen_from // BLOCK_N
        begin += (slot + slots - begin % slots) % slots
    last = (stop + BLOCK_N - 1) // BLOCK_N
    if begin >= last:  # `combine_partitions` reads a row's own slots only
        return
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    q_at = (first_row + row).to(tl.int64) * q_stride + (head * GROUP + lane % GROUP) * DIM
    query = tl.load(q + q_at[:, None] + d[None, :], mask=live[:, None] & in_dim[None, :], other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    acc = tl.zeros((BLOCK_M, DIM_PAD), dtype=tl.float32)
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    table = tables + r * table_stride
    skipped = floor // BLOCK_N  # keys before it are seen by nobody
    first = tl.maximum(begin, skipped + (slot + slots - skipped % slots) % slots)
    plain = last  # from this tile on there are nodes
    if tree != 0:
        plain = tl.minimum(ctx // BLOCK_N, last)
    # fmt: off
    best, total, acc = over_tiles(
        query, kv, scales, table, 0, pos, end, live, head, ctx, floor, stop, first, plain, slots, window, scale,
        softcap, best, total, acc, PAGE, KV_HEADS, DIM, DIM_PAD, BLOCK_N, CAPPED, WINDOWED, CODES, FP8, False,
    )
    if tree != 0:
        bits = tl.load(masks + first_row + row, mask=live, other=0)
        nodes = tl.maximum(first, plain + (slot + slots - plain % slots) % slots)
        best, total, acc = over_tiles(
            query, kv, scales, table, bits, pos, end, live, head, ctx, floor, stop, nodes, last, slots, window,
            scale, softcap, best, total, acc, PAGE, KV_HEADS, DIM, DIM_PAD, BLOCK_N, CAPPED, WINDOWED, CODES, FP8,
            True,
        )
    # fmt: on
    at_slot = (
        (first_row + row - row_base).to(tl.int64) * HEADS + head * GROUP + lane % GROUP
    ) * num_slots + slot
    tl.store(part_max + at_slot, best, mask=live)
    tl.store(part_sum + at_slot, total, mask=live)
    tl.store(part_acc + at_slot[:, None] * DIM + d[None, :], acc, mask=live[:, None] & in_dim[None, :])

"""Paged attention for ragged batches. Launched by `kernels.triton.attention`, which documents the arguments' shapes."""

import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.tiles import keys_and_values, scores_of, with_tile


@kernel("positions", "lasts", "paths")
def tree_rows(masks, row_request, query_start, context, is_tree, positions, lasts, paths):
    """Per row: its position, its last key, and for a row of a tree its path: paths[row, d] = the d-th set bit of its
    mask.

    Example: context 10, mask 0b1011: position 12, last key 13, path 0, 1, 3: positions 10, 11, 12 are keys 10, 11 and
    13.
    """
    row = tl.program_id(0)
    r = tl.load(row_request + row)
    start = tl.load(query_start + r)
    ctx = tl.load(context + r)
    tree = tl.load(is_tree + r)
    bit = tl.arange(0, 64)
    mask = tl.load(masks + row)
    # the shift copies the sign; the lowest bit is right
    set_bits = ((mask >> bit.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(set_bits, 0) - 1
    tl.store(paths + row * 64 + rank, bit, mask=tl.where(tree != 0, set_bits, 0) > 0)
    depth = tl.sum(set_bits, 0) - 1
    tl.store(positions + row, tl.where(tree != 0, ctx + depth, ctx + row - start))
    last = tl.max(tl.where(set_bits > 0, bit, -1), 0)
    tl.store(lasts + row, tl.where(tree != 0, ctx + last, ctx + row - start))


@kernel("q", "kv", "scales", "part_acc", "part_max", "part_sum", "q_stride", "scale", "softcap")
def partial_attention(
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
    paths,
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
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTITION: tl.constexpr,
    SLOTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CODES: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One task (up to ROWS rows of one request), one key/value head, and every so manieth slot of partial results, each
    of which is a sum over every SLOTS-th partition of the positions: which program does a slot changes no bit.

    A lane is (row, query head of the group). Keys are taken by *position*, tile by tile: what a position adds to a
    row, and in which order, depends neither on where keys stand, nor on the batch, nor on whether the row is a tree's.
    The positions of a tree behind the context are other keys for every row: those tiles are done once per row, and
    only that row's lanes keep the result. Both kinds of tile run through the same instructions. Tiles that a row does
    not see leave its sums as they are, so that rows of a task may end in different partitions.

    Example: positions up to 1100 in partitions of 256, SLOTS 4: partitions 0 and 4 are summed in slot 0, one after the
    other, the others have slots of their own. Of two programs one does slots 0 and 2, the other 1 and 3.
    """
    task = tl.program_id(0)
    head = tl.program_id(1)
    r = tl.load(tasks + task * 3)
    first_row = tl.load(tasks + task * 3 + 1)
    num_rows = tl.load(tasks + task * 3 + 2)
    ctx = tl.load(context + r)
    low = tl.load(first_key + r)
    tree = tl.load(is_tree + r)
    GROUP: tl.constexpr = HEADS // KV_HEADS

    lane = tl.arange(0, BLOCK_M)
    row = lane // GROUP
    live = (row < num_rows) & (row < ROWS)
    pos = tl.load(positions + first_row + row, mask=live, other=-1)
    end = tl.load(ends + first_row + row, mask=live, other=-1)
    top = tl.max(end, 0)
    floor = low
    first_part = 0
    if WINDOWED:
        seen_from = tl.maximum(tl.min(tl.where(live, pos, 2147483647), 0) - window + 1, 0)
        floor = tl.maximum(low, seen_from)
        first_part = seen_from // PARTITION
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    q_at = (first_row + row).to(tl.int64) * q_stride + (head * GROUP + lane % GROUP) * DIM
    query = tl.load(q + q_at[:, None] + d[None, :], mask=live[:, None] & in_dim[None, :], other=0.0)
    if WIDE:
        query = query.to(tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    out_row = (first_row + row - row_base).to(tl.int64)
    at_slot = (out_row * HEADS + head * GROUP + lane % GROUP) * num_slots
    last_part = top // PARTITION + 1
    for slot in range(tl.program_id(2), tl.minimum(SLOTS, last_part), tl.num_programs(2)):
        acc = tl.zeros((BLOCK_M, DIM_PAD), dtype=tl.float32)
        best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        # the first one from `first_part` on that belongs here. Example: SLOTS 4, slot 1, first_part 6: 9
        begin_part = first_part + (slot + SLOTS - first_part % SLOTS) % SLOTS
        for part in range(begin_part, last_part, SLOTS):
            start = part * PARTITION
            stop = tl.minimum(start + PARTITION, top + 1)
            begin = tl.maximum(start, floor)
            first_tile = begin // BLOCK_N
            num_tiles = tl.maximum((stop + BLOCK_N - 1) // BLOCK_N - first_tile, 0)
            shared = num_tiles
            if tree != 0:
                shared = tl.minimum(tl.maximum(ctx // BLOCK_N - first_tile, 0), num_tiles)
            tail = num_tiles - shared
            steps = shared + tail * num_rows
            divisor = tl.maximum(tail, 1)
            for i in range(steps):
                own = i >= shared
                behind = tl.maximum(i - shared, 0)
                which = behind // divisor  # the row whose path this is, if own
                tile = first_tile + tl.where(own, shared + behind % divisor, i)
                p = tile * BLOCK_N + offsets
                limit = tl.where(own, tl.load(positions + first_row + which) + 1, stop)
                taken = (p >= begin) & (p < tl.minimum(limit, stop))
                # scalars choose bounds and are in no mask: the interpreter makes integers of masks that mix both
                in_tree = taken & (p >= tl.where(own, ctx, 2147483647))
                node = tl.load(paths + (first_row + which) * 64 + (p - ctx), mask=in_tree, other=0)
                key = tl.where(in_tree, ctx + node, p)
                # fmt: off
                k, v = keys_and_values(
                    query, kv, scales, tables + r * table_stride, key, taken, head, PAGE, KV_HEADS, DIM, DIM_PAD, CODES,
                    FP8,
                )
                # fmt: on
                scores = scores_of(query, k, scale, softcap, CAPPED)
                seen = live[:, None] & taken[None, :] & (p[None, :] <= end[:, None])
                if WINDOWED:
                    seen = seen & (pos[:, None] - p[None, :] < window)
                scores = tl.where(seen, scores, float("-inf"))
                new_best, new_total, new_acc = with_tile(query, scores, v, best, total, acc)
                mine = (row >= tl.where(own, which, 0)) & (row <= tl.where(own, which, BLOCK_M))
                best = tl.where(mine, new_best, best)
                total = tl.where(mine, new_total, total)
                acc = tl.where(mine[:, None], new_acc, acc)
        if begin_part < last_part:  # `combine_partitions` reads a row's own slots only
            tl.store(part_max + at_slot + slot, best, mask=live)
            tl.store(part_sum + at_slot + slot, total, mask=live)
            at_acc = (at_slot + slot)[:, None] * DIM + d[None, :]
            tl.store(part_acc + at_acc, acc, mask=live[:, None] & in_dim[None, :])


@kernel("part_acc", "part_max", "part_sum", "sinks", "out")
def combine_partitions(
    part_acc,
    part_max,
    part_sum,
    positions,
    ends,
    sinks,
    out,
    row_base,
    num_slots,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PARTITION: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One row and query head: the slots of its partitions at once, and the head's sink, which weighs and gives nothing.

    Example: SLOTS 4, partitions 2 to 4 of a window: slots 2, 3 and 0.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    pos = tl.load(positions + row_base + row)
    first = pos * 0
    if WINDOWED:
        first = tl.maximum(pos - window + 1, 0) // PARTITION
    count = tl.load(ends + row_base + row) // PARTITION + 1 - first
    slot = tl.arange(0, SLOTS_PAD)
    own = (slot < SLOTS) & ((slot + SLOTS - first % SLOTS) % SLOTS < count)
    at = (row.to(tl.int64) * HEADS + head) * num_slots + slot
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    most = tl.load(part_max + at, mask=own, other=float("-inf"))
    sums = tl.load(part_sum + at, mask=own, other=0.0)
    acc = tl.load(part_acc + at[:, None] * DIM + d[None, :], mask=own[:, None] & in_dim[None, :], other=0.0)
    best = tl.max(most, 0)
    if SINKS:
        best = tl.maximum(best, tl.load(sinks + head))
    factor = tl.exp(most - best)
    total = tl.sum(sums * factor, 0)
    if SINKS:
        total += tl.exp(tl.load(sinks + head) - best)
    result = tl.sum(acc * factor[:, None], 0) / total
    to = ((row_base + row).to(tl.int64) * HEADS + head) * DIM
    tl.store(out + to + d, result.to(out.dtype.element_ty), mask=in_dim)

"""Low-rank additions to a linear layer, each request with an adapter of its own. Launched by `..low_rank`."""

import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel


@kernel("x", "down", "inputs", "x_stride")
def low_rank_down(
    x,
    down,
    places,
    low,
    rows,
    inputs,
    columns,
    part_inputs,
    x_stride,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of one request times BLOCK_R columns of its adapter's ``down`` [places, columns, K], over one part of k.

    A request has ``rows`` rows, in TILES of BLOCK_M. ``low`` [T, PARTS, columns] float32: sums of the parts.
    """
    request = tl.program_id(0) // TILES
    place = tl.load(places + request)
    if place > 0:
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        m = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        j = tl.arange(0, BLOCK_K)
        in_m = m < rows
        in_r = r < columns
        row = (request * rows + m).to(tl.int64)
        weight = down + (place - 1).to(tl.int64) * columns * inputs
        acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        part = tl.program_id(2)
        for start in tl.range(part * part_inputs, tl.minimum((part + 1) * part_inputs, inputs), BLOCK_K):
            k = start + j
            in_k = k < inputs
            values = tl.load(
                x + row[:, None] * x_stride + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0
            )
            w = tl.load(
                weight + r[None, :] * inputs + k[:, None], mask=in_r[None, :] & in_k[:, None], other=0.0
            )
            if WIDE:
                values = values.to(tl.float32)
            acc = tl.dot(values, w.to(values.dtype), acc, input_precision="ieee")
        at = (row[:, None] * PARTS + part) * columns + r[None, :]
        tl.store(low + at, acc, mask=in_m[:, None] & in_r[None, :])


@kernel("up", "out")
def low_rank_up(
    low,
    up,
    bounds,
    places,
    out,
    rows,
    outputs,
    columns,
    out_stride,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``out`` += the first product, rounded, times ``up`` [places, N, RANK], rounded: BLOCK_N outputs of one part of
    the layer, of rows of one request. ``bounds`` [parts, 3]: see `kernels.stacked.Stack`."""
    request = tl.program_id(0) // TILES
    place = tl.load(places + request)
    bound = bounds + tl.program_id(2) * 3
    first = tl.load(bound) + tl.program_id(1) * BLOCK_N
    stop = tl.load(bound + 1)
    if (place > 0) & (first < stop):
        n = first + tl.arange(0, BLOCK_N)
        m = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        r = tl.arange(0, RANK)
        in_m = m < rows
        in_n = n < stop
        row = (request * rows + m).to(tl.int64)
        column = tl.load(bound + 2) * RANK + r
        sums = tl.zeros((BLOCK_M, RANK), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            at = (row[:, None] * PARTS + part) * columns + column[None, :]
            sums += tl.load(low + at, mask=in_m[:, None], other=0.0)
        kind = out.dtype.element_ty
        values = sums.to(kind)
        weight = up + (place - 1).to(tl.int64) * outputs * RANK
        w = tl.load(weight + n[None, :] * RANK + r[:, None], mask=in_n[None, :], other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        added = tl.dot(values, w.to(values.dtype), input_precision="ieee").to(kind)
        at = row[:, None] * out_stride + n[None, :]
        inside = in_m[:, None] & in_n[None, :]
        before = tl.load(out + at, mask=inside, other=0.0)
        tl.store(out + at, (before.to(tl.float32) + added.to(tl.float32)).to(kind), mask=inside)

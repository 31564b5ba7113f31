"""Row by row: norms, rotation and writing of K/V, activation, gathering, compaction. Launched by `..rows`."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel
from draftwise.kernels.triton.device.fp8 import to_fp8


@triton.jit
def rms_norm(
    x, residual, weight, out, x_stride, out_stride, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. ADD: the residual becomes residual + x first, rounded to its type, and that is normalised."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    values = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        old = tl.load(residual + row * size + i, mask=inside, other=0.0).to(tl.float32)
        total = (old + values).to(residual.dtype.element_ty)
        tl.store(residual + row * size + i, total, mask=inside)
        values = total.to(tl.float32)
    root = tl.sqrt(tl.sum(values * values, 0) / size + eps)
    scaled = values / root * tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + row * out_stride + i, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, out, size, stride, BLOCK: tl.constexpr):
    """One block of one row: out = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + i, mask=inside, other=0.0).to(tl.float32)
    # the smaller exponential of the two forms: exp never overflows
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * size + i, (gate * sigmoid * up).to(out.dtype.element_ty), mask=inside)


@kernel("table", "out", "size")
def gather_rows(table, index, out, size, BLOCK: tl.constexpr):
    """One block of one row: out[row] = table[index[row]]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    source = tl.load(index + row)
    tl.store(out + row * size + i, tl.load(table + source * size + i, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_write(
    qkv,
    angles,
    q_weight,
    q_eps,
    k_weight,
    k_eps,
    queries,
    kv,
    scales,
    slots,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """One head of one row, its halves apart: (a, b) -> (a cos - b sin, b cos + a sin)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    i = tl.arange(0, HALF_PAD)
    inside = i < HALF
    at = row * qkv_stride + head * DIM
    a = tl.load(qkv + at + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + at + HALF + i, mask=inside, other=0.0).to(tl.float32)
    is_query = head < HEADS
    if head < HEADS + KV_HEADS:
        root = tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / DIM + tl.where(is_query, q_eps, k_eps))
        if Q_NORM:  # noqa: SIM102 - one is known to the compiler, the other to the program
            if is_query:
                a = a / root * tl.load(q_weight + i, mask=inside, other=0.0)
                b = b / root * tl.load(q_weight + HALF + i, mask=inside, other=0.0)
        if K_NORM:  # noqa: SIM102
            if head >= HEADS:
                a = a / root * tl.load(k_weight + i, mask=inside, other=0.0)
                b = b / root * tl.load(k_weight + HALF + i, mask=inside, other=0.0)
        cos = tl.load(angles + row * 2 * HALF + i, mask=inside, other=0.0)
        sin = tl.load(angles + row * 2 * HALF + HALF + i, mask=inside, other=0.0)
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    # what a cache holds is rounded to the activations' type first, as if it were the rotated row itself
    a = a.to(qkv.dtype.element_ty)
    b = b.to(qkv.dtype.element_ty)
    if is_query:
        to = (row * HEADS + head) * DIM
        tl.store(queries + to + i, a, mask=inside)
        tl.store(queries + to + HALF + i, b, mask=inside)
    else:
        entry = tl.load(slots + row) * (2 * KV_HEADS) + head - HEADS
        wide_a = a.to(tl.float32)
        wide_b = b.to(tl.float32)
        if LARGEST > 0:  # of a code: 127 in int8, 448 in fp8
            top = tl.maximum(tl.max(tl.abs(wide_a), 0), tl.max(tl.abs(wide_b), 0))
            factor = tl.where(top > 0, LARGEST / tl.where(top > 0, top, 1.0), 0.0)
            wide_a = wide_a * factor
            wide_b = wide_b * factor
            if LARGEST == 448.0:
                wide_a = to_fp8(wide_a)
                wide_b = to_fp8(wide_b)
            else:
                # to the nearest, halves to even: adding and taking away 1.5 * 2^23 leaves no fraction
                wide_a = (wide_a + 12582912.0) - 12582912.0
                wide_b = (wide_b + 12582912.0) - 12582912.0
            tl.store(scales + entry, top / LARGEST)
        if CLAMP:  # float16's largest number, not infinity
            wide_a = tl.minimum(tl.maximum(wide_a, -65504.0), 65504.0)
            wide_b = tl.minimum(tl.maximum(wide_b, -65504.0), 65504.0)
        tl.store(kv + entry * DIM + i, wide_a.to(kv.dtype.element_ty), mask=inside)
        tl.store(kv + entry * DIM + HALF + i, wide_b.to(kv.dtype.element_ty), mask=inside)


@kernel("pool", "size", "layer_stride")
def compact_paths(
    pool, slots, roots, walk, size, layer_stride, num_nodes, NODES_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """One request, one layer, one block of an entry: the accepted path's entries move up behind the root's.

    All of them are read before any is written. Example: slots 10..14 of root and nodes, path (1, 3), accepted 2:
    slots 12 and 14 are copied to 11 and 12.
    """
    r = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    e = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, NODES_PAD)
    path = walk + r * (2 * num_nodes + 2)
    node = tl.load(path + 1 + n, mask=n < tl.load(path), other=-1)
    moved = (node >= 0) & (node != n)  # what stands where it should is not touched
    row = slots + tl.load(roots + r)
    source = tl.load(row + 1 + node, mask=moved, other=0)
    target = tl.load(row + 1 + n, mask=moved, other=0)
    base = pool + layer * layer_stride
    both = moved[:, None] & (e < size)[None, :]
    entries = tl.load(base + source[:, None] * size + e[None, :], mask=both, other=0)
    tl.debug_barrier()
    tl.store(base + target[:, None] * size + e[None, :], entries, mask=both)

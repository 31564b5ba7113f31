"""Products with weights whose order of summation is the same for any number of rows. Launched by `..linear`."""

import triton
import triton.language as tl

from draftwise.kernels.triton.device.fp8 import from_fp8, to_fp8


@triton.jit
def numbers_of(codes, more, which, in_n, NUMBERS: tl.constexpr):
    """What codes of four bits [k, n] stand for, before their scale; see `linear`."""
    numbers = codes
    if NUMBERS == 0:
        numbers = codes - 8
    if NUMBERS == 1:
        numbers = codes - tl.load(more + which, mask=in_n, other=0).to(tl.int32)[None, :]
    if NUMBERS == 2:
        numbers = tl.load(more + codes)
    return numbers


@triton.jit
def offset_of(x, more, which, in_n):
    """What offsets of a group add: the sum of each row's inputs, times the group's offset."""
    return tl.sum(x.to(tl.float32), 1)[:, None] * tl.load(more + which, mask=in_n, other=0.0)[None, :]


@triton.jit
def dot_block(
    acc,
    x_row,
    weight,
    scales,
    more,
    n,
    in_m,
    in_n,
    start,
    inputs,
    row_bytes,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile's sum, and BLOCK_K more inputs from ``start`` on."""
    which = n * groups + start // GROUP
    if BITS == 4:
        HALF: tl.constexpr = BLOCK_K // 2
        j = tl.arange(0, HALF)
        low_k = start + j
        high_k = low_k + HALF
        low_x = tl.load(x_row + low_k[None, :], mask=in_m[:, None] & (low_k < inputs)[None, :], other=0.0)
        high_x = tl.load(x_row + high_k[None, :], mask=in_m[:, None] & (high_k < inputs)[None, :], other=0.0)
        at = n.to(tl.int64)[None, :] * row_bytes + start // 2 + j[:, None]
        codes = tl.load(weight + at, mask=in_n[None, :], other=0).to(tl.int32)
        scale = tl.load(scales + which, mask=in_n, other=0.0)
        if WIDE:
            low_x = low_x.to(tl.float32)
            high_x = high_x.to(tl.float32)
        low = numbers_of(codes & 15, more, which, in_n, NUMBERS).to(low_x.dtype)
        part = tl.dot(low_x, low, input_precision="ieee")
        if HALF < GROUP:
            high = numbers_of(codes >> 4, more, which, in_n, NUMBERS).to(low_x.dtype)
            part = tl.dot(high_x, high, part, input_precision="ieee")
            acc += part * scale[None, :]
            if NUMBERS == 3:
                acc += offset_of(low_x, more, which, in_n) + offset_of(high_x, more, which, in_n)
        else:
            # a group of 16 is half a block, and the other half is the next group, which the last block may lack
            there = in_n & (start + HALF < inputs)
            high = numbers_of(codes >> 4, more, which + 1, there, NUMBERS).to(low_x.dtype)
            next_scale = tl.load(scales + which + 1, mask=there, other=0.0)
            acc += part * scale[None, :]
            acc += tl.dot(high_x, high, input_precision="ieee") * next_scale[None, :]
            if NUMBERS == 3:
                acc += offset_of(low_x, more, which, in_n) + offset_of(high_x, more, which + 1, there)
    else:
        k = start + tl.arange(0, BLOCK_K)
        values = tl.load(x_row + k[None, :], mask=in_m[:, None] & (k < inputs)[None, :], other=0.0)
        at = n.to(tl.int64)[None, :] * inputs + k[:, None]
        w = tl.load(weight + at, mask=in_n[None, :] & (k < inputs)[:, None], other=0.0)
        if weight.dtype.element_ty == tl.uint8:
            w = from_fp8(w)
            if CODES:
                values = from_fp8(values)
        if CODES and acc.dtype == tl.float32:
            values = values.to(tl.float16)
        if WIDE:
            values = values.to(tl.float32)
        if GROUP > 1:
            part = tl.dot(values, w.to(values.dtype), input_precision="ieee", out_dtype=acc.dtype)
            acc += part * tl.load(scales + which, mask=in_n, other=0.0)[None, :]
        else:
            acc = tl.dot(values, w.to(values.dtype), acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit(do_not_specialize=["rows", "groups"])
def linear(
    x,
    x_scales,
    weight,
    scales,
    more,
    bias,
    out,
    parts,
    rows,
    outputs,
    inputs,
    x_stride,
    groups,
    part_inputs,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    NUMBERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the output; k in parts of ``part_inputs``, each in blocks of fixed size, first to last, summed in
    float32; then the parts' sums, first to last. APART: this program sums one part, for `add_parts`.

    CODES: rows are codes of the weights' kind, too, with a scale each. Those of int8 are summed exactly, those of fp8
    widened to float16, which holds them all.

    BITS 16: weight [N, K] floats; 8: int8 or fp8 codes (bytes where the device does not read fp8) [N, K], one scale per
    output or, with GROUP over 1, per output and group; 4: two codes per byte [N, K' / 2]: byte j of a block of BLOCK_K
    inputs holds input j of the block (low half) and input BLOCK_K / 2 + j (high half), a scale per output and group. A
    block is a part of a group, or, of four bits, two groups.

    NUMBERS, of four bits: a code stands for itself less 8 (0), for itself less the group's zero (1; ``more`` uint8
    [N, groups]), for a number of a table (2; ``more`` float32 [16]), or for itself, where every weight of the group has
    an offset besides (3; ``more`` float32 [N, groups]).
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = m < rows
    in_n = n < outputs
    x_row = x + m.to(tl.int64)[:, None] * x_stride
    row_bytes = (inputs + BLOCK_K - 1) // BLOCK_K * (BLOCK_K // 2)
    first = tl.program_id(2)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=parts.dtype.element_ty)
    for part in range(first, first + (1 if APART else PARTS)):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=parts.dtype.element_ty)
        for start in range(part * part_inputs, tl.minimum((part + 1) * part_inputs, inputs), BLOCK_K):
            acc = dot_block(
                acc, x_row, weight, scales, more, n, in_m, in_n, start, inputs, row_bytes, groups,
                GROUP, BITS, CODES, NUMBERS, WIDE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        total += acc
    at_out = m.to(tl.int64)[:, None] * outputs + n[None, :]
    inside = in_m[:, None] & in_n[None, :]
    if APART:
        tl.store(parts + first.to(tl.int64) * rows * outputs + at_out, total, mask=inside)
    else:
        result = total.to(tl.float32)
        if CODES:
            result = result * tl.load(x_scales + m, mask=in_m, other=0.0)[:, None]
        if BITS == 8 and GROUP == 1:
            result = result * tl.load(scales + n, mask=in_n, other=0.0)[None, :]
        if HAS_BIAS:
            result += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts,
    x_scales,
    scales,
    bias,
    out,
    rows,
    outputs,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's block of outputs: the sums of the parts [PARTS, T, N], first to last, then scales and bias as where one
    program has all parts."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outputs
    total = tl.zeros((BLOCK,), dtype=parts.dtype.element_ty)
    for part in range(PARTS):
        # ``row`` is wide; ``rows`` is no tensor where it is 1, for the compiler is told such arguments
        total += tl.load(parts + (row + part * rows) * outputs + n, mask=inside, other=0)
    result = total.to(tl.float32)
    if CODES:
        result = result * tl.load(x_scales + row)
    if BITS == 8 and GROUP == 1:
        result = result * tl.load(scales + n, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "count", "groups"])
def widen(
    weight,
    scales,
    more,
    out,
    first,
    count,
    inputs,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K inputs of BLOCK_N of the ``count`` outputs from ``first`` on, as the numbers that `linear`'s codes stand
    for: ``out`` [count, K]."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = row < count
    n = first + row
    start = tl.program_id(1) * BLOCK_K
    to = out + row.to(tl.int64)[None, :] * inputs
    which = n * groups + start // GROUP
    if BITS == 4:
        HALF: tl.constexpr = BLOCK_K // 2
        j = tl.arange(0, HALF)
        row_bytes = (inputs + BLOCK_K - 1) // BLOCK_K * HALF
        at = n.to(tl.int64)[None, :] * row_bytes + start // 2 + j[:, None]
        codes = tl.load(weight + at, mask=in_n[None, :], other=0).to(tl.int32)
        for half in tl.static_range(2):
            k = start + half * HALF + j
            # the next group, if half a block is one, which the last block may lack
            group = which + (half if HALF >= GROUP else 0)
            there = in_n & (start + half * HALF < inputs)
            values = numbers_of((codes >> (4 * half)) & 15, more, group, there, NUMBERS).to(tl.float32)
            values = values * tl.load(scales + group, mask=there, other=0.0)[None, :]
            if NUMBERS == 3:
                values += tl.load(more + group, mask=there, other=0.0)[None, :]
            tl.store(
                to + k[:, None], values.to(out.dtype.element_ty), mask=there[None, :] & (k < inputs)[:, None]
            )
    else:
        k = start + tl.arange(0, BLOCK_K)
        inside = in_n[None, :] & (k < inputs)[:, None]
        values = tl.load(weight + n.to(tl.int64)[None, :] * inputs + k[:, None], mask=inside, other=0.0)
        if weight.dtype.element_ty == tl.uint8:
            values = from_fp8(values)
        if GROUP == 1:
            which = n
        values = values.to(tl.float32) * tl.load(scales + which, mask=in_n, other=0.0)[None, :]
        tl.store(to + k[:, None], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows(x, codes, scales, size, stride, FLOATS: tl.constexpr, BLOCK: tl.constexpr):
    """One row to int8, or to the bytes of fp8 (FLOATS), with a scale of its own: its largest magnitude becomes 127 or
    448."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    values = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(values), 0)
    largest = 448.0 if FLOATS else 127.0
    values = values * tl.where(top > 0, largest / tl.where(top > 0, top, 1.0), 0.0)
    rounded = to_fp8(values) if FLOATS else (values + 12582912.0) - 12582912.0
    tl.store(codes + row * size + i, rounded.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, top / largest)

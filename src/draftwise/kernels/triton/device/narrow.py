"""Products of a few rows with weights of floats, which promise no equal bits. Launched by `..linear`."""

import triton.language as tl

from draftwise.kernels.triton.device.compiled import kernel


@kernel("x", "weight", "out", "inputs", "x_stride")
def narrow_linear(
    x,
    weight,
    out,
    rows,
    outputs,
    inputs,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """BLOCK_N outputs of all rows, up to BLOCK_M of them: ``weight`` [N, K], K a multiple of BLOCK_K.

    What takes the time is to read the weights: each is read once, by programs that have several blocks on their way.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_K)
    in_n = n < outputs
    in_m = m < rows
    line = weight + n.to(tl.int64)[None, :] * inputs + j[:, None]
    x_row = x + m[:, None] * x_stride + j[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, inputs, BLOCK_K):
        w = tl.load(line + start, mask=in_n[None, :], other=0.0, eviction_policy="evict_first")
        values = tl.load(x_row + start, mask=in_m[:, None], other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        acc = tl.dot(values, w.to(values.dtype), acc, input_precision="ieee")
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])

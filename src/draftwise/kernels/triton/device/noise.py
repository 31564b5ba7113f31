"""The noise of `sampling.noise`, made where it is used: the same integers, in signed words.

A right shift copies the sign, so what it shifts in is masked off; products wrap around.
"""

import triton
import triton.language as tl


@triton.jit
def finalise(z):
    """splitmix64's finaliser, of int64."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def row_key(seed, sample, STREAM: tl.constexpr, position, node, base):
    """`sampling.noise.row_key`; all int64. Of the shared stream (0) node and base must be -1 and 0."""
    h = finalise(seed + -7046029254386353131)
    h = finalise(h ^ ((position << 32) | base))
    return finalise(h ^ ((sample << 24) | ((node + 1) << 8) | STREAM))


@triton.jit
def uniform(seed, sample, STREAM: tl.constexpr, position, node, base):
    """`sampling.noise.uniform`: float64 in [0, 1), the same bits."""
    z = finalise(row_key(seed, sample, STREAM, position, node, base) + -7046029254386353131)
    return ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def gumbel(key, v):
    """Standard Gumbel noise of tokens ``v`` under a row's key, float32; see `sampling.noise.gumbel`."""
    z = finalise((v.to(tl.int64) + 1) * -7046029254386353131 + key)
    bits = ((z >> 24) & 0xFFFFFFFFFF).to(tl.float32)
    u = tl.minimum((bits + 0.5) * 9.094947017729282e-13, 0.99999994)  # 2^-40; below 1
    # log(1 - u) to the last bits for small u: log(w) u / (1 - w) with w the rounded 1 - u
    w = 1.0 - u
    taken = 1.0 - w
    exponential = tl.where(taken == 0.0, u, -tl.log(w) * (u / tl.where(taken == 0.0, 1.0, taken)))
    return -tl.log(exponential)

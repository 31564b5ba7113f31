"""Numbers of float8_e4m3fn as bytes: a sign, four bits of exponent less 7, three of fraction, no infinity. With whole
numbers alone, since devices before capability 8.9 have no instructions for them."""

import triton
import triton.language as tl


@triton.jit
def to_fp8(x):
    """Numbers below 464 -> codes of float8_e4m3fn, to the nearest, halves to even, as uint8.

    Example: 3.3 = 0x40533333 lies between codes 0x45 (3.25) and 0x46 (3.5): 0x40533333 >> 20 = 0x405, less 960 is 0x45.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # 2^14 has the steps of subnormal numbers, 2^-9
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)  # 2^-6, the smallest normal number
    return (code + ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_fp8(codes):
    """uint8 -> float32, exactly. The exponent of float16 is larger by 8, and in the same place once the sign is apart:
    subnormal numbers, too."""
    wide = codes.to(tl.int32)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0

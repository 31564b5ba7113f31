"""The types of tensors in GGUF files: blocks of 32 or 256 numbers with scales of their own.

Source: ggml's ``ggml-quants.c`` and ``ggml-common.h`` (layouts of ``block_q8_0`` and its kin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.quantization.weights import QuantizedWeight

BLOCK = 32
"""Numbers that share a scale in the types whose codes are kept."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How numbers of one type lie in a file. Floats are blocks of one."""

    code: int  # of the file
    name: str
    numbers: int  # of a block
    size: int  # bytes of a block


_TYPES = {
    t.code: t
    for t in (
        BlockType(0, "F32", 1, 4), BlockType(1, "F16", 1, 2), BlockType(30, "BF16", 1, 2), BlockType(28, "F64", 1, 8),
        BlockType(2, "Q4_0", 32, 18), BlockType(3, "Q4_1", 32, 20), BlockType(6, "Q5_0", 32, 22),
        BlockType(7, "Q5_1", 32, 24), BlockType(8, "Q8_0", 32, 34), BlockType(10, "Q2_K", 256, 84),
        BlockType(11, "Q3_K", 256, 110), BlockType(12, "Q4_K", 256, 144), BlockType(13, "Q5_K", 256, 176),
        BlockType(14, "Q6_K", 256, 210), BlockType(20, "IQ4_NL", 32, 18), BlockType(23, "IQ4_XS", 256, 136),
    )
}  # fmt: skip
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
KEPT = ("Q8_0", "Q4_0", "Q4_1")
"""Types whose codes go to kernels as they are."""


def block_type(code: int) -> BlockType:
    """The type that a file's number stands for. Raises ModelLoadError if it is none that is read."""
    if code not in _TYPES:
        names = ", ".join(t.name for t in _TYPES.values())
        raise ModelLoadError(f"tensors of type {code} are not supported (supported: {names})")
    return _TYPES[code]


def values_of(data: Tensor, kind: BlockType) -> Tensor:
    """``data`` [rows, bytes] uint8 -> [rows, numbers], float32 for blocks, a type of its own for floats."""
    rows = data.shape[0]
    if kind.name in FLOATS:
        return data.view(FLOATS[kind.name])
    blocks = data.reshape(-1, kind.size)
    if kind.name in _OWN:
        return _OWN[kind.name](blocks).view(rows, -1)
    from transformers.integrations.gguf.dequant import dequantize  # a model's first K-quant imports it

    found: Tensor = dequantize(blocks.reshape(-1), kind.code, torch.float32)
    return found.view(rows, -1)


def codes_of(data: Tensor, kind: BlockType) -> QuantizedWeight:
    """``data`` [rows, bytes] uint8 of a type in `KEPT` -> the same numbers as codes, scales and zero points.

    Example of Q4_1: a block with scale 0.5 and minimum -3 stands for 0.5 q - 3, and is kept as a code with the float
    zero point 6.
    """
    rows = data.shape[0]
    blocks = data.reshape(-1, kind.size)
    scales = _half(blocks, 0).view(rows, -1)
    if kind.name == "Q8_0":
        return QuantizedWeight(8, blocks[:, 2:].view(torch.int8).reshape(rows, -1), scales, None, BLOCK)
    if kind.name == "Q4_0":
        return QuantizedWeight(4, _nibbles(blocks[:, 2:]).view(rows, -1), scales, None, BLOCK)
    assert kind.name == "Q4_1"
    offsets = _half(blocks, 2).view(rows, -1)
    return QuantizedWeight(4, _nibbles(blocks[:, 4:]).view(rows, -1), scales, None, BLOCK, offsets)


def _half(blocks: Tensor, start: int) -> Tensor:
    """A float16 of each block, [n, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, 16] bytes -> [n, 32] uint8: the lower halves are numbers 0..15, the upper ones 16..31."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """[n, 32] uint8, 0 or 16: bit j of a little-endian word of 32 bits is the fifth of number j."""
    word = blocks[:, start : start + 4].contiguous().view(torch.int32)
    return ((word >> torch.arange(32, dtype=torch.int32)) & 1).to(torch.uint8) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes + _half(blocks, 2)


_OWN = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1}

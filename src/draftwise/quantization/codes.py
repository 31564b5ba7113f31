"""Codes of four and eight bits as checkpoints pack them, and layers in groups made of these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.quantization.weights import QuantizedWeight


def nibbles(words: Tensor, order: Sequence[int] = tuple(range(8))) -> Tensor:
    """[..., n] int32 -> [..., n, 8] uint8: element ``order[i]`` from bits 4 i .. 4 i + 3."""
    found = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for place, column in enumerate(order):  # one by one: all at once are 32 times the bytes of a code
        found[..., column] = (words >> (4 * place)).bitwise_and_(15)
    return found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., n, 32 / bits] uint8, lowest bits first."""
    if bits == 4:
        return nibbles(words)
    found = torch.empty((*words.shape, 4), dtype=torch.uint8)
    for place in range(4):
        found[..., place] = (words >> (8 * place)).bitwise_and_(255)
    return found


def scattered(codes: Tensor, scales: Tensor, zeros: Tensor, of_input: Tensor) -> QuantizedWeight:
    """A layer whose groups are of inputs that do not lie together ("act order"): kernels have no such codes, so that it
    becomes floats.

    Args:
        codes: [out, in]; scales, zeros: [out, groups]; of_input: [in] each input's group.

    Raises:
        ModelLoadError: a group that there is not.
    """
    index = of_input.to(torch.int64)
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < scales.shape[1]:
        found = f"{int(index.min())} to {int(index.max())}"
        raise ModelLoadError(f"groups {found} of inputs, of which there are {scales.shape[1]}")
    values = codes.float()
    for row, of_zeros, of_scales in zip(values, zeros.float(), scales.float(), strict=True):
        row -= of_zeros[index]
        row *= of_scales[index]
    return QuantizedWeight.of_values(values)


def eight_bits(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> QuantizedWeight:
    """Codes 0..255 [out, in] in groups; zero points of 128 alone, for kernels have no others."""
    if bool((zeros != 128).any()):
        raise ModelLoadError("eight bits with zero points (asymmetric) are not supported")
    return QuantizedWeight(8, signed(codes), scales.float().contiguous(), None, group)


def signed(codes: Tensor) -> Tensor:
    """0..255 uint8 -> -128..127 int8, 128 less. Example: 125 = 0b01111101 becomes 0b11111101, which is -3."""
    return codes.bitwise_xor(128).view(torch.int8).contiguous()


def groups_of(inputs: int, group: int) -> int:
    """How many groups the inputs have. Raises ModelLoadError if some are left over."""
    if inputs % group != 0 or group % 8 != 0:
        raise ModelLoadError(f"groups of {group} do not divide {inputs} inputs")
    return inputs // group


def four_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> QuantizedWeight:
    """Codes 0..15 [out, in] in groups; zero points [out, groups], or None: 8, which kernels need not be told."""
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    return QuantizedWeight(
        4,
        codes.contiguous(),
        scales.float().contiguous(),
        None if zeros is None else zeros.contiguous(),
        group,
    )

"""Linear layers whose results do not depend on how many rows there are, in floats and in 8- and 4-bit weights.

A tile has a fixed size, and k is cut into parts that the shape of the layer decides: a row's sum runs over the same
blocks of k in the same order alone and among 500 others. Up to ``block_m`` rows cost one pass over the weights; then
each part is a program of its own, so that a device is busy with few outputs, too.

A layer that need not promise that is left to torch (cuBLAS) where its weights are floats, or fp8 codes that meet fp8
rows on a device with such products; but a few rows with not too many weights of floats are `narrow`'s, which reads
those faster. Many rows that meet codes as they are meet them widened (`widened`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from draftwise.kernels.handles import Linear
from draftwise.kernels.triton import device
from draftwise.kernels.triton.availability import LAUNCH, interpreted, reads_fp8
from draftwise.kernels.triton.rows import as_bytes, power_of_two
from draftwise.quantization.weights import QuantizedWeight

NARROW_ROWS: Final = 16
"""Up to so many rows a product with floats that promises no equal bits may be `narrow`'s, not torch's."""

_NARROW_INPUTS: Final = 8192
_NARROW_WEIGHTS: Final = 1 << 26
"""Most inputs and weights of a layer that `narrow` does. Measured on an H200 with one to eight rows, against cuBLAS:
0.86 to 0.88 of its time for 4096 outputs of 4096 inputs, 0.94 to 0.98 for 6144 of 4096 and of 8192, but 1.03 to 1.06
for 28672 of 4096 and for 4096 of 14336."""

WIDENED_ROWS: Final = 256
"""From so many rows on a product with codes that promises no equal bits is torch's, with weights that are widened
before. Not measured; counted for an H100 or an H200. Widening moves 4.5 bytes per weight of four bits, 1.1 ps at
4 TB/s, and cuBLAS takes 2.9 fs per weight and row at 700 TFLOP/s. A kernel that widens inside its tiles takes some
8 fs."""

_WIDENED_BYTES: Final = 64 << 20
"""Of widened weights at a time: they stay in the device's cache, or nearly so, and take little memory."""

_NARROW_N: Final = 16
_NARROW_K: Final = 128


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """Sizes that decide the order of every sum; ``block_k`` / 2 and the others are powers of two of at least 16."""

    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    programs: int = 256
    """Tiles and parts together that keep a device busy. It is no device's own number, so that bits are the same on all
    that compute a tile alike."""

    def part_inputs(self, outputs: int, inputs: int, block_k: int) -> int:
        """Inputs of a part of k, a multiple of ``block_k``: as many parts as there are programs to fill, none with
        fewer than eight blocks.

        Example: 4096 outputs are 64 tiles, of 256 wanted programs: four parts, of 1024 of 4096 inputs each.
        """
        tiles = -(-outputs // self.block_n)
        blocks = -(-inputs // block_k)
        parts = max(1, min(-(-self.programs // tiles), blocks // 8))
        return -(-blocks // parts) * block_k

    def block_k_for(self, group: int, bits: int) -> int:
        """The block of k for weights with ``group`` inputs to a scale, a multiple of 16: as large as divides the group;
        of 4 bits, whose products take half a block each, 32 at least, which are two groups of 16."""
        block, least = self.block_k, 32 if bits == 4 else 16
        while group % block and block > least:
            block //= 2
        return block


class Numbers(IntEnum):
    """What a code of four bits stands for, times its scale, and what `TritonLinear.more` then is."""

    LESS_EIGHT = 0  # itself less 8
    LESS_ZEROS = 1  # itself less the group's zero, uint8 [N, groups]
    LEVELS = 2  # a number of a table, float32 [16]
    AND_OFFSETS = 3  # itself; the group's offset is added to the product, float32 [N, groups]


@dataclass(slots=True, eq=False)
class TritonLinear(Linear):
    """``weight`` as the kernel reads it: [N, K] floats, int8 or fp8, or packed pairs [N, K' / 2] uint8."""

    weight: Tensor
    bias: Tensor | None
    tiling: LinearTiling
    bits: int = 16
    inputs: int = 0  # 0: as many as the weight says
    scales: Tensor | None = None  # float32: [N], or [N, groups]
    numbers: Numbers = Numbers.LESS_EIGHT  # what codes of 4 bits stand for
    more: Tensor | None = None  # what `numbers` says
    group: int = 1  # inputs to a scale; 1: of 8 bits, all
    shared: bool = False  # the memory of ``weight`` is another parameter's
    dynamic: bool = False  # rows are rounded to codes of the weight's kind, each with a scale of its own
    invariant: bool = True  # whether a row's bits may not depend on the number of rows
    block_k: int = field(init=False)
    part_inputs: int = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = self.inputs or self.weight.shape[1]
        grouped = self.group > 1
        self.block_k = self.tiling.block_k_for(self.group, self.bits) if grouped else self.tiling.block_k
        self.part_inputs = self.tiling.part_inputs(self.weight.shape[0], self.inputs, self.block_k)

    @property
    def groups(self) -> int:
        """Groups of an output's inputs, each with a scale."""
        return 1 if self.scales is None or self.scales.dim() == 1 else self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        held = (None if self.shared else self.weight, self.bias, self.scales, self.more)
        return sum(part.numel() * part.element_size() for part in held if part is not None)


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether the kernel reads these codes as they are: 8 bits with a scale per output or group of a multiple of 16, or
    4 bits with groups of 16 or a multiple of 32."""
    if weight.group is None:
        return weight.bits == 8
    return weight.group % 16 == 0 and (weight.bits == 8 or weight.group == 16 or weight.group % 32 == 0)


def pack_quantized(
    weight: QuantizedWeight,
    bias: Tensor | None,
    tiling: LinearTiling,
    device: torch.device,
    *,
    dynamic: bool = False,
    invariant: bool = True,
) -> TritonLinear:
    """Codes in the kernel's order; `can_pack` must hold. ``dynamic``: rows are rounded, too; of 8-bit weights only."""
    scales = weight.scales.float().contiguous().to(device)
    assert can_pack(weight)
    if weight.bits == 8:
        codes, group = weight.codes.contiguous().to(device), weight.group or 1
        assert not dynamic or group == 1
        return TritonLinear(
            codes, bias, tiling, bits=8, scales=scales, group=group, dynamic=dynamic, invariant=invariant
        )
    assert not dynamic and weight.group is not None
    numbers, more = Numbers.LESS_EIGHT, None
    if weight.levels is not None:
        numbers, more = Numbers.LEVELS, torch.tensor(weight.levels, dtype=torch.float32)
    elif weight.zeros is not None:
        numbers, more = Numbers.LESS_ZEROS, weight.zeros.contiguous()
    elif weight.offsets is not None:
        numbers, more = Numbers.AND_OFFSETS, weight.offsets.float().contiguous()
    return TritonLinear(
        pack_pairs(weight.codes, tiling.block_k_for(weight.group, 4)).to(device),
        bias,
        tiling,
        bits=4,
        inputs=weight.codes.shape[1],
        scales=scales,
        numbers=numbers,
        more=None if more is None else more.to(device),
        group=weight.group,
        invariant=invariant,
    )


def pack_pairs(codes: Tensor, block_k: int) -> Tensor:
    """``codes`` [N, K] uint8 of 0..15 -> [N, ceil(K / block_k) * block_k / 2] uint8.

    Example, block_k 4: codes 1 2 3 4 | 5 6 -> bytes 0x31 0x42 | 0x05 0x06 (K is padded with code 0).
    """
    outputs, inputs = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -inputs % block_k)).view(outputs, -1, 2, block_k // 2)
    return (padded[:, :, 0] | padded[:, :, 1] << 4).reshape(outputs, -1).contiguous()


def linear(
    x: Tensor, layer: TritonLinear, out: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``x`` [T, K] (rows may be strided) -> [T, N] of ``dtype`` (default: x's)."""
    rows, outputs = x.shape[0], layer.weight.shape[0]
    assert x.shape[1] == layer.inputs
    if layer.bits == 16 and not layer.invariant:
        if x.is_cuda and 0 < rows <= NARROW_ROWS and _is_narrow(x, layer):
            return narrow(x, layer.weight, x.new_empty(rows, outputs, dtype=dtype) if out is None else out)
        if dtype is torch.float32 and layer.bias is None and x.is_cuda and x.dtype is not dtype:
            # in float32 as it was summed: logits are then not rounded, and read and written once less
            return torch.mm(x, layer.weight.t(), out_dtype=dtype, **({} if out is None else {"out": out}))
        product = torch.nn.functional.linear(x, layer.weight, layer.bias)
        return product.to(dtype or x.dtype) if out is None else out.copy_(product)
    result = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return result
    if rows >= WIDENED_ROWS and x.is_cuda and _may_be_widened(x, layer, result):
        return widened(x, layer, result)
    x = x if x.stride(1) == 1 else x.contiguous()
    x_scales = None
    if layer.dynamic:
        assert layer.scales is not None and layer.bits == 8
        codes, x_scales = quantize_rows(x, layer.weight.dtype)
        if not layer.invariant and scaled_product_serves(x, layer):
            product = torch._scaled_mm(
                codes,
                layer.weight.t(),
                scale_a=x_scales[:, None],
                scale_b=layer.scales[None, :],
                bias=layer.bias,
                out_dtype=torch.bfloat16,
            )
            return result.copy_(product)
        x = _readable(codes)
    tiling, weight = layer.tiling, _readable(layer.weight)
    scales, more, bias = (weight if t is None else t for t in (layer.scales, layer.more, layer.bias))
    row_scales = scales if x_scales is None else x_scales
    # up to so many rows each part of k is a program of its own
    parts = -(-layer.inputs // layer.part_inputs)
    apart = parts > 1 and rows <= tiling.block_m
    kind = torch.int32 if x.dtype is torch.int8 else torch.float32
    sums = torch.empty((parts, rows, outputs) if apart else (1,), dtype=kind, device=x.device)
    flags = {
        "GROUP": layer.group,
        "BITS": layer.bits,
        "CODES": layer.dynamic,
        "HAS_BIAS": layer.bias is not None,
    }
    sizes = (rows, outputs, layer.inputs, x.stride(0), layer.groups, layer.part_inputs)
    device.linear.linear[(-(-outputs // tiling.block_n), -(-rows // tiling.block_m), parts if apart else 1)](
        x,
        row_scales,
        weight,
        scales,
        more,
        bias,
        result,
        sums,
        *sizes,
        PARTS=parts,
        APART=apart,
        NUMBERS=int(layer.numbers),
        **flags,
        # the interpreter's product of bfloat16 is not one
        WIDE=interpreted() and x.dtype is torch.bfloat16,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=layer.block_k,
        **LAUNCH,
    )
    if apart:
        block = min(1024, power_of_two(outputs))
        device.linear.add_parts[(rows, -(-outputs // block))](
            sums, row_scales, scales, bias, result, rows, outputs, PARTS=parts, BLOCK=block, **flags, **LAUNCH
        )
    return result


def _may_be_widened(x: Tensor, layer: TritonLinear, result: Tensor) -> bool:
    codes = layer.bits < 16 and not layer.dynamic and not layer.invariant
    return codes and x.dtype is result.dtype and x.dtype in (torch.float16, torch.bfloat16)


def widened(x: Tensor, layer: TritonLinear, out: Tensor) -> Tensor:
    """``x`` [T, K] times the layer's weights -> ``out`` [T, N]; codes become floats of x's type, some outputs at a
    time, and torch multiplies."""
    outputs, inputs = layer.weight.shape[0], layer.inputs
    at_once = max(16, min(outputs, _WIDENED_BYTES // (inputs * x.element_size()) // 16 * 16))
    floats = x.new_empty(at_once, inputs)
    assert layer.scales is not None
    weight, more = _readable(layer.weight), layer.more
    for first in range(0, outputs, at_once):
        part = floats[: outputs - first]
        tiles = -(-len(part) // layer.tiling.block_n)
        device.linear.widen[(tiles, -(-inputs // layer.block_k))](
            weight,
            layer.scales,
            weight if more is None else more,
            part,
            first,
            len(part),
            inputs,
            layer.groups,
            GROUP=layer.group,
            BITS=layer.bits,
            NUMBERS=int(layer.numbers),
            BLOCK_N=layer.tiling.block_n,
            BLOCK_K=layer.block_k,
            **LAUNCH,
        )
        bias = None if layer.bias is None else layer.bias[first : first + len(part)]
        out[:, first : first + len(part)] = torch.nn.functional.linear(x, part, bias)
    return out


def _is_narrow(x: Tensor, layer: TritonLinear) -> bool:
    """Whether `narrow` takes the layer: numbers of 16 bits, whole blocks of inputs, no bias, few outputs, for which
    cuBLAS cuts k and adds up in a second kernel."""
    return (
        layer.bias is None
        and x.dtype is layer.weight.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and layer.inputs % _NARROW_K == 0
        and layer.inputs <= _NARROW_INPUTS
        and layer.weight.numel() <= _NARROW_WEIGHTS
        and x.stride(1) == 1
    )


def narrow(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``x`` [T, K] @ ``weight`` [N, K].T -> ``out`` [T, N], of any type; T is at most `NARROW_ROWS`."""
    blocks = {"BLOCK_M": 16, "BLOCK_N": _NARROW_N, "BLOCK_K": _NARROW_K}
    wide = interpreted() and x.dtype is torch.bfloat16
    options = {"num_warps": 2, "num_stages": 6, **LAUNCH}
    device.narrow.narrow_linear[(-(-weight.shape[0] // _NARROW_N),)](
        x, weight, out, x.shape[0], *weight.shape, x.stride(0), WIDE=wide, **blocks, **options
    )
    return out


def _readable(codes: Tensor) -> Tensor:
    """What a kernel is given: codes of fp8 as bytes where the device does not read them; others as they are."""
    return codes if reads_fp8(codes.device) else as_bytes(codes)


def quantize_rows(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` [T, K] -> codes [T, K] of ``kind`` (int8 or float8_e4m3fn), scales [T] float32, one per row; see
    `quantization.weights.quantize_rows`."""
    rows, size = x.shape
    codes = torch.empty((rows, size), dtype=kind, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        floats = kind is torch.float8_e4m3fn
        device.linear.quantize_rows[(rows,)](
            x, as_bytes(codes), scales, size, x.stride(0), FLOATS=floats, BLOCK=power_of_two(size), **LAUNCH
        )
    return codes, scales


def scaled_product_serves(x: Tensor, layer: TritonLinear) -> bool:
    """Whether torch's product of fp8 codes with a scale per row and output takes the layer: sizes of a multiple of 16,
    bfloat16 results, compute capability 9.0 or more."""
    return (
        layer.weight.dtype is torch.float8_e4m3fn
        and x.dtype is torch.bfloat16
        and (layer.bias is None or layer.bias.dtype is torch.bfloat16)
        and layer.inputs % 16 == 0
        and layer.weight.shape[0] % 16 == 0
        and x.device.type == "cuda"
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )

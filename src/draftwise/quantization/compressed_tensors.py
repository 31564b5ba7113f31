"""Checkpoints of compressed-tensors with one form for all layers; those with several are in `grouped`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.quantization.checkpoint import INT32, SCALES, CheckpointFormat, RawTensor
from draftwise.quantization.codes import (
    eight_bits,
    four_bits,
    groups_of,
    nibbles,
    scattered,
    signed,
    unpacked,
)
from draftwise.quantization.weights import FP8, QuantizedWeight


@dataclass(frozen=True)
class PackedFormat(CheckpointFormat):
    """compressed-tensors "pack-quantized": w4a16, and w8a16 with a scale per output.

    A code of -128 (which a symmetric quantiser makes by clipping only) is taken as -127: kernels that keep rows as
    they are store sign and magnitude.
    """

    bits: int
    group_size: int | None  # None: all inputs
    symmetric: bool
    scattered: bool = False  # inputs of a group stand anywhere: ".weight_g_idx" says where
    dynamic = False
    marker = ".weight_packed"

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return (".weight_shape",) if self.scattered else (".weight_shape", ".weight_g_idx")

    @property
    def name(self) -> str:
        return f"compressed-tensors w{self.bits}a16"

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        per_word = 32 // self.bits
        groups = 1 if self.group_size is None else groups_of(inputs, self.group_size)
        found = {
            ".weight_packed": RawTensor((outputs, -(-inputs // per_word)), torch.int32, INT32),
            ".weight_scale": RawTensor((outputs, groups), torch.float32, SCALES),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = RawTensor((-(-outputs // per_word), groups), torch.int32, INT32)
        if self.scattered:
            found[".weight_g_idx"] = RawTensor((inputs,), torch.int32, (*INT32, "I64"))
        return found

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        outputs, words = stored(".weight_packed")
        return outputs, words * (
            32 // self.bits
        )  # of inputs that fill no word, too many: refused where it matters

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        words, scales = raw[".weight_packed"], raw[".weight_scale"]
        if self.bits == 8:
            stored = unpacked(words, 8).view(outputs, -1)[:, :inputs]
            if self.group_size is not None:
                eights = torch.full(scales.shape, 128, dtype=torch.int16)
                if self.scattered:
                    return scattered(stored, scales, eights, raw[".weight_g_idx"])
                return eight_bits(stored, scales, eights, self.group_size)
            return QuantizedWeight(8, signed(stored).clamp_(min=-127), scales[:, 0])
        codes = nibbles(words).view(outputs, -1)[:, :inputs]
        zeros = None
        if not self.symmetric:
            # packed along the outputs: word [o, g] holds zero points 8 o .. 8 o + 7
            zeros = nibbles(raw[".weight_zero_point"]).transpose(1, 2).reshape(-1, scales.shape[1])[:outputs]
        if self.scattered:
            return scattered(
                codes, scales, torch.full(scales.shape, 8) if zeros is None else zeros, raw[".weight_g_idx"]
            )
        return four_bits(codes, scales, zeros, self.group_size or -(-inputs // 8) * 8)


@dataclass(frozen=True)
class Int8Format(CheckpointFormat):
    """compressed-tensors "int-quantized": w8a8 with a scale per output and dynamic scales per token."""

    dynamic = True
    bits = 8
    name = "compressed-tensors w8a8"
    marker = ".weight_scale"

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        return {
            ".weight": RawTensor((outputs, inputs), torch.int8, ("I8",)),
            ".weight_scale": RawTensor((outputs, 1), torch.float32, SCALES),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight(8, raw[".weight"], raw[".weight_scale"][:, 0])


@dataclass(frozen=True)
class Fp8Format(CheckpointFormat):
    """compressed-tensors "float-quantized": fp8 (e4m3) with a scale per output, rows with dynamic scales per token.
    ModelOpt and Quark write the same, with scales [outputs].

    Kernels without products of fp8 take the weights as floats, and the rows as they are.
    """

    column: bool = True  # scales are [outputs, 1]
    dynamic = True
    bits = None
    name = "compressed-tensors fp8"
    marker = ".weight_scale"
    optional = (".input_scale",)

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        return {
            ".weight": RawTensor((outputs, inputs), FP8, ("F8_E4M3",)),
            ".weight_scale": RawTensor((outputs, 1) if self.column else (outputs,), torch.float32, SCALES),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight(8, raw[".weight"], raw[".weight_scale"].view(-1))

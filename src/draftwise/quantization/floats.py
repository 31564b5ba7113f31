"""Checkpoints whose weights are fp8 (e4m3) with few scales. Triton's kernels keep the codes; a
CPU takes them as floats. Rows stay as they are, but for one scale per output (`checkpoint.Fp8Format`) on a GPU: scales
of activations are not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwise.quantization.checkpoint import CheckpointFormat, RawTensor
from draftwise.quantization.fp4 import EXPONENTS, powers
from draftwise.quantization.weights import FP8, QuantizedWeight

_SCALES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Fp8BlockFormat(CheckpointFormat):
    """Blocks of (usually) 128 x 128 weights that share a scale: DeepSeek-V3, Qwen3-FP8 (``weight_scale_inv``, which a
    weight is multiplied by), compressed-tensors "block" (``weight_scale``), ModelOpt (the same, with two more
    dimensions of 1). MXFP8: blocks of 1 x 32, whose scales are powers of two, kept as exponents."""

    block_outputs: int
    block_inputs: int
    suffix: str  # of the scales
    spread: bool = False  # they are [blocks of outputs, 1, blocks of inputs, 1]
    exponents: bool = False
    bits = None
    optional = (".input_scale", ".activation_scale")

    @property
    def name(self) -> str:
        return "mxfp8" if self.exponents else "fp8 in blocks"

    @property
    def marker(self) -> str:
        return self.suffix

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        down, across = -(-outputs // self.block_outputs), -(-inputs // self.block_inputs)
        blocks = (down, 1, across, 1) if self.spread else (down, across)
        scales = (torch.uint8, EXPONENTS) if self.exponents else (torch.float32, _SCALES)
        return {
            ".weight": RawTensor((outputs, inputs), FP8, ("F8_E4M3",)),
            self.suffix: RawTensor(blocks, *scales),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        scales = raw[self.suffix].view(-(-outputs // self.block_outputs), -1)
        if self.exponents:
            scales = powers(scales)
        scales = scales.repeat_interleave(self.block_outputs, 0)[:outputs]
        return QuantizedWeight(8, raw[".weight"], scales.contiguous(), None, self.block_inputs)


@dataclass(frozen=True)
class Fp8TensorFormat(CheckpointFormat):
    """One scale for a whole weight, which is multiplied by it: ``weight_scale``, or as Transformers calls it
    ``weight_scale_inv`` (Ministral 3, Devstral 2)."""

    suffix: str = ".weight_scale"
    bits = None
    name = "fp8, one scale"
    optional = (".input_scale", ".activation_scale")

    @property
    def marker(self) -> str:
        return self.suffix

    def of(self, bases: Sequence[str], names: Collection[str]) -> CheckpointFormat | None:
        suffix = ".weight_scale_inv"
        other = any(base + suffix in names for base in bases)
        return CheckpointFormat.of(replace(self, suffix=suffix) if other else self, bases, names)

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        return {
            ".weight": RawTensor((outputs, inputs), FP8, ("F8_E4M3",)),
            self.suffix: RawTensor((), torch.float32, _SCALES),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight(8, raw[".weight"], raw[self.suffix].view(1).expand(outputs).contiguous())

"""Checkpoints of AWQ and GPTQ: codes in words of 32 bits, with scales and zero points of groups of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.quantization.checkpoint import INT32, SCALES, CheckpointFormat, RawTensor
from draftwise.quantization.codes import eight_bits, four_bits, groups_of, nibbles, scattered, unpacked
from draftwise.quantization.weights import QuantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's "gemm" layout: nibble i of a word holds column ``_AWQ_ORDER[i]`` of its eight."""


@dataclass(frozen=True)
class AwqFormat(CheckpointFormat):
    """AutoAWQ, 4 bits, layout "gemm". Lin et al. 2023, "AWQ: Activation-aware Weight Quantization"."""

    group_size: int  # -1: all inputs
    bits = 4
    name = "awq, 4 bits"
    marker = ".qweight"

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        if outputs % 8 != 0:
            raise ModelLoadError(f"{outputs} outputs are not a multiple of 8")
        groups = groups_of(inputs, self._group(inputs))
        return {
            ".qweight": RawTensor((inputs, outputs // 8), torch.int32, INT32),
            ".qzeros": RawTensor((groups, outputs // 8), torch.int32, INT32),
            ".scales": RawTensor((groups, outputs), torch.float32, SCALES),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        inputs, words = stored(".qweight")
        return 8 * words, inputs

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        codes = nibbles(raw[".qweight"], _AWQ_ORDER).view(inputs, outputs)
        zeros = nibbles(raw[".qzeros"], _AWQ_ORDER).view(-1, outputs)
        return four_bits(codes.t(), raw[".scales"].t(), zeros.t(), self._group(inputs))

    def _group(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size


@dataclass(frozen=True)
class AwqGemvFormat(CheckpointFormat):
    """AutoAWQ, 4 bits, layout "gemv": rows of outputs, nibbles in order. Rows of zero points are filled up to whole
    words, of 64 inputs in a group to 2 words, of 32 to 4; rows of scales to as many numbers.

    Example: 96 inputs in groups of 32 have 3 groups: 4 words of zero points, of which 3 nibbles count, and 32 scales,
    of which 3 do.
    """

    group_size: int  # -1: all inputs
    bits = 4
    name = "awq, 4 bits, gemv"
    marker = ".qweight"

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        if inputs % 8 != 0:
            raise ModelLoadError(f"{inputs} inputs are not a multiple of 8")
        words = self._words(inputs)
        return {
            ".qweight": RawTensor((outputs, inputs // 8), torch.int32, INT32),
            ".qzeros": RawTensor((outputs, words), torch.int32, INT32),
            ".scales": RawTensor((outputs, 8 * words), torch.float32, SCALES),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        outputs, words = stored(".qweight")
        return outputs, 8 * words

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        group = self._group(inputs)
        groups = groups_of(inputs, group)
        codes = nibbles(raw[".qweight"]).view(outputs, inputs)
        zeros = nibbles(raw[".qzeros"]).view(outputs, -1)[:, :groups]
        return four_bits(codes, raw[".scales"][:, :groups], zeros, group)

    def pads(self, inputs: int) -> bool:
        return 8 * self._words(inputs) != groups_of(inputs, self._group(inputs))

    def _group(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

    def _words(self, inputs: int) -> int:
        """Words of zero points of an output."""
        group = self._group(inputs)
        step = 1 if group >= 128 else {64: 2, 32: 4}.get(group)
        if step is None:
            raise ModelLoadError(f"awq: groups of {group} in layout gemv are not supported")
        return -(-groups_of(inputs, group) // (8 * step)) * step


@dataclass(frozen=True)
class GptqFormat(CheckpointFormat):
    """AutoGPTQ and GPTQModel, 4 or 8 bits. Frantar et al. 2022, "GPTQ"."""

    group_size: int  # -1: all inputs
    zero_offset: int  # 1: zero points are stored less one (every writer but "gptq_v2")
    bits: int = 4
    marker = ".qweight"

    @property
    def name(self) -> str:
        return f"gptq, {self.bits} bits"

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        per_word = 32 // self.bits
        if outputs % per_word != 0:
            raise ModelLoadError(f"{outputs} outputs are not a multiple of {per_word}")
        groups = groups_of(inputs, self._group(inputs))
        return {
            ".qweight": RawTensor((inputs // per_word, outputs), torch.int32, INT32),
            ".qzeros": RawTensor((groups, outputs // per_word), torch.int32, INT32),
            ".scales": RawTensor((groups, outputs), torch.float32, SCALES),
            ".g_idx": RawTensor((inputs,), torch.int32, INT32),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        words, outputs = stored(".qweight")
        return outputs, words * (32 // self.bits)

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        group = self._group(inputs)
        codes = unpacked(raw[".qweight"].t().contiguous(), self.bits).view(outputs, inputs)
        zeros = unpacked(raw[".qzeros"], self.bits).view(-1, outputs).to(torch.int16) + self.zero_offset
        scales, of_input = raw[".scales"].t(), raw[".g_idx"]
        most = 1 << self.bits
        if int(zeros.max()) == most:  # the highest code, plus 1: writers mean 0 or this, they do not agree
            raise ModelLoadError(f"a GPTQ zero point of {most} is not supported")
        if not torch.equal(of_input, torch.arange(inputs, dtype=torch.int32) // group):
            return scattered(codes, scales, zeros.t(), of_input)
        if self.bits == 8:
            return eight_bits(codes, scales, zeros.t(), group)
        return four_bits(codes, scales, zeros.to(torch.uint8).t(), group)

    def _group(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

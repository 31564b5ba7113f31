"""Checkpoints whose linear layers are quantised already: AWQ, GPTQ and compressed-tensors.

A float checkpoint has ``<layer>.weight``; these have, for the layers that are quantised, several tensors under the
same prefix. `CheckpointFormat` says which, with their shapes, and turns them into codes and scales without rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.quantization.scheme import DEFAULT_GROUP, Scheme
from draftwise.quantization.weights import FP8, QuantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's "gemm" layout: nibble i of a word holds column ``_AWQ_ORDER[i]`` of its eight."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor of a checkpoint as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: tuple[str, ...]  # dtypes of the file that are taken, as safetensors names them


_INT32, _SCALES = ("I32",), ("F16", "BF16", "F32")


class CheckpointFormat(ABC):
    """How one kind of checkpoint stores a quantised linear layer [outputs, inputs]."""

    dynamic = False
    """Whether rows are quantised as they come: to int8, those of fp8 weights to fp8."""

    bits: int | None
    """Bits of a weight's integer code; None: weights are no integers."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The format's origin and bits, as a text."""

    @property
    @abstractmethod
    def marker(self) -> str:
        """Suffix of the tensor that only quantised layers have."""

    @abstractmethod
    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        """Suffix -> tensor of a layer. Raises ModelLoadError if the format cannot hold such a layer."""

    @abstractmethod
    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """The layer from its tensors, by suffix. Raises ModelLoadError if they say what kernels cannot do."""

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        """Outputs and inputs of a layer, by the shapes of its tensors: ``stored(suffix)``."""
        outputs, inputs = stored(".weight")
        return outputs, inputs

    def pads(self, inputs: int) -> bool:
        """Whether rows of scales are filled up to a width: those of a part of the inputs are then no part of them."""
        return False

    def renamed(self, origins: Mapping[str, str]) -> CheckpointFormat:
        """The format for layers that go by other names: ``origins`` maps these to the checkpoint's, without suffix."""
        return self

    optional: tuple[str, ...] = ()
    """Suffixes of tensors that may be missing or stand there without being needed."""

    def of(self, bases: Sequence[str], names: Collection[str]) -> CheckpointFormat | None:
        """The form of a layer that is stacked of ``bases`` (names without suffix); None: its weights are floats.

        Args:
            names: all tensors of the checkpoint.

        Raises:
            ModelLoadError: some of the parts are quantised and some are not.
        """
        found = [base + self.marker in names for base in bases]
        if not any(found):
            return None
        if not all(found):
            raise ModelLoadError(f"of {', '.join(bases)} only some are quantised; that is not supported")
        return self

    def unneeded(self, bases: Sequence[str]) -> set[str]:
        """Tensors beside a layer's own that a checkpoint may have and nobody reads."""
        return {base + suffix for base in bases for suffix in self.optional}

    def check_scheme(self, scheme: Scheme, name: str | None) -> None:
        """``quantization=name`` beside a checkpoint that is quantised already may say that rows are rounded, too: its
        weights stay as they are. Raises ModelLoadError where it asks for other weights."""
        rounds_less = self.dynamic and not scheme.dynamic
        if (
            scheme.floats
            or self.bits != scheme.bits
            or rounds_less
            or scheme.group not in (None, DEFAULT_GROUP)
        ):
            form = "fp8" if self.bits is None else f"int{self.bits}" + ("_dynamic" if self.dynamic else "")
            raise ModelLoadError(f"it is quantised already, as {form}: quantization {name!r} is not for it")


def _nibbles(words: Tensor, order: Sequence[int] = tuple(range(8))) -> Tensor:
    """[..., n] int32 -> [..., n, 8] uint8: element ``order[i]`` from bits 4 i .. 4 i + 3."""
    found = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for place, column in enumerate(order):  # one by one: all at once are 32 times the bytes of a code
        found[..., column] = (words >> (4 * place)).bitwise_and_(15)
    return found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., n, 32 / bits] uint8, lowest bits first."""
    if bits == 4:
        return _nibbles(words)
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


def _eight_bits(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> QuantizedWeight:
    """Codes 0..255 [out, in] in groups; zero points of 128 alone, for kernels have no others."""
    if bool((zeros != 128).any()):
        raise ModelLoadError("eight bits with zero points (asymmetric) are not supported")
    return QuantizedWeight(8, _signed(codes), scales.float().contiguous(), None, group)


def _signed(codes: Tensor) -> Tensor:
    """0..255 uint8 -> -128..127 int8, 128 less. Example: 125 = 0b01111101 becomes 0b11111101, which is -3."""
    return codes.bitwise_xor(128).view(torch.int8).contiguous()


def _groups(inputs: int, group: int) -> int:
    if inputs % group != 0 or group % 8 != 0:
        raise ModelLoadError(f"groups of {group} do not divide {inputs} inputs")
    return inputs // group


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
        groups = _groups(inputs, self._group(inputs))
        return {
            ".qweight": RawTensor((inputs, outputs // 8), torch.int32, _INT32),
            ".qzeros": RawTensor((groups, outputs // 8), torch.int32, _INT32),
            ".scales": RawTensor((groups, outputs), torch.float32, _SCALES),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        inputs, words = stored(".qweight")
        return 8 * words, inputs

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        codes = _nibbles(raw[".qweight"], _AWQ_ORDER).view(inputs, outputs)
        zeros = _nibbles(raw[".qzeros"], _AWQ_ORDER).view(-1, outputs)
        return _grouped(codes.t(), raw[".scales"].t(), zeros.t(), self._group(inputs))

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
            ".qweight": RawTensor((outputs, inputs // 8), torch.int32, _INT32),
            ".qzeros": RawTensor((outputs, words), torch.int32, _INT32),
            ".scales": RawTensor((outputs, 8 * words), torch.float32, _SCALES),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        outputs, words = stored(".qweight")
        return outputs, 8 * words

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        group = self._group(inputs)
        groups = _groups(inputs, group)
        codes = _nibbles(raw[".qweight"]).view(outputs, inputs)
        zeros = _nibbles(raw[".qzeros"]).view(outputs, -1)[:, :groups]
        return _grouped(codes, raw[".scales"][:, :groups], zeros, group)

    def pads(self, inputs: int) -> bool:
        return 8 * self._words(inputs) != _groups(inputs, self._group(inputs))

    def _group(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

    def _words(self, inputs: int) -> int:
        """Words of zero points of an output."""
        group = self._group(inputs)
        step = 1 if group >= 128 else {64: 2, 32: 4}.get(group)
        if step is None:
            raise ModelLoadError(f"awq: groups of {group} in layout gemv are not supported")
        return -(-_groups(inputs, group) // (8 * step)) * step


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
        groups = _groups(inputs, self._group(inputs))
        return {
            ".qweight": RawTensor((inputs // per_word, outputs), torch.int32, _INT32),
            ".qzeros": RawTensor((groups, outputs // per_word), torch.int32, _INT32),
            ".scales": RawTensor((groups, outputs), torch.float32, _SCALES),
            ".g_idx": RawTensor((inputs,), torch.int32, _INT32),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        words, outputs = stored(".qweight")
        return outputs, words * (32 // self.bits)

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        group = self._group(inputs)
        codes = unpacked(raw[".qweight"].t().contiguous(), self.bits).view(outputs, inputs)
        zeros = unpacked(raw[".qzeros"], self.bits).view(-1, outputs).to(torch.int16) + self.zero_offset
        scales, of_input = raw[".scales"].t(), raw[".g_idx"]
        if not torch.equal(of_input, torch.arange(inputs, dtype=torch.int32) // group):
            return scattered(codes, scales, zeros.t(), of_input)
        if self.bits == 8:
            return _eight_bits(codes, scales, zeros.t(), group)
        if int(zeros.max()) > 15:  # 15 + 1, from a writer that means 0 ... or 16: they do not agree
            raise ModelLoadError("a GPTQ zero point of 16 is not supported")
        return _grouped(codes, scales, zeros.to(torch.uint8).t(), group)

    def _group(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size


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
        groups = 1 if self.group_size is None else _groups(inputs, self.group_size)
        found = {
            ".weight_packed": RawTensor((outputs, -(-inputs // per_word)), torch.int32, _INT32),
            ".weight_scale": RawTensor((outputs, groups), torch.float32, _SCALES),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = RawTensor((-(-outputs // per_word), groups), torch.int32, _INT32)
        if self.scattered:
            found[".weight_g_idx"] = RawTensor((inputs,), torch.int32, (*_INT32, "I64"))
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
                return _eight_bits(stored, scales, eights, self.group_size)
            return QuantizedWeight(8, _signed(stored).clamp_(min=-127), scales[:, 0])
        codes = _nibbles(words).view(outputs, -1)[:, :inputs]
        zeros = None
        if not self.symmetric:
            # packed along the outputs: word [o, g] holds zero points 8 o .. 8 o + 7
            zeros = _nibbles(raw[".weight_zero_point"]).transpose(1, 2).reshape(-1, scales.shape[1])[:outputs]
        if self.scattered:
            return scattered(
                codes, scales, torch.full(scales.shape, 8) if zeros is None else zeros, raw[".weight_g_idx"]
            )
        return _grouped(codes, scales, zeros, self.group_size or -(-inputs // 8) * 8)


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
            ".weight_scale": RawTensor((outputs, 1), torch.float32, _SCALES),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight(8, raw[".weight"], raw[".weight_scale"][:, 0])


@dataclass(frozen=True)
class Fp8Format(CheckpointFormat):
    """compressed-tensors "float-quantized": fp8 (e4m3) with a scale per output, rows with dynamic scales per token.

    Kernels without products of fp8 take the weights as floats, and the rows as they are.
    """

    dynamic = True
    bits = None
    name = "compressed-tensors fp8"
    marker = ".weight_scale"

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        return {
            ".weight": RawTensor((outputs, inputs), FP8, ("F8_E4M3",)),
            ".weight_scale": RawTensor((outputs, 1), torch.float32, _SCALES),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight(8, raw[".weight"], raw[".weight_scale"][:, 0])


def _grouped(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> QuantizedWeight:
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    return QuantizedWeight(
        4,
        codes.contiguous(),
        scales.float().contiguous(),
        None if zeros is None else zeros.contiguous(),
        group,
    )

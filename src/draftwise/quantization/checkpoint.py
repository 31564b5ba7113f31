"""Checkpoints whose linear layers are quantised already.

A float checkpoint has ``<layer>.weight``; these have, for the layers that are quantised, several tensors under the
same prefix. `CheckpointFormat` says which, with their shapes, and turns them into codes and scales without rounding.
AWQ and GPTQ are in `awq_gptq`, compressed-tensors in `compressed_tensors`, others in `bitsandbytes` and `floats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.quantization.scheme import DEFAULT_GROUP, Scheme
from draftwise.quantization.weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor of a checkpoint as it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: tuple[str, ...]  # dtypes of the file that are taken, as safetensors names them


INT32, SCALES = ("I32",), ("F16", "BF16", "F32")
"""What words of codes, and scales, are stored as."""


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


class LayerwiseFormat(CheckpointFormat):
    """Layers in several forms: `of` gives a layer's own, and this one is never asked how it stores anything."""

    bits = None
    marker = ""

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        raise AssertionError("a layer's own format is asked")

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        raise AssertionError("a layer's own format is asked")

"""Checkpoints that bitsandbytes has quantised (Dettmers et al. 2022, "LLM.int8()", 2023, "QLoRA"), without its library.

Four bits: a layer's numbers, row by row in one line, are cut into blocks (of 64, as a rule) that share a largest
magnitude. A code says which of 16 levels of that a number has; two codes lie in a byte, the first one in its upper
half. The levels of NF4 are quantiles of the normal distribution. The largest magnitudes are floats, or codes of eight
bits themselves ("double quantisation"). `models.bitsandbytes` puts the tensors of a layer into the two that are read
here: codes and scales, or, where no kernel has such codes, numbers.

Eight bits: int8 with a largest magnitude per output, ``w = code * SCB / 127``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.quantization.checkpoint import CheckpointFormat, LayerwiseFormat, RawTensor
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import NF4, QuantizedWeight

BLOCK = 64
"""Numbers that share a scale, of layers that keep their codes."""
CODES, SCALES, VALUES = ".nf4_codes", ".nf4_scales", ".bnb_values"


@dataclass(frozen=True)
class Bnb4Format(LayerwiseFormat):
    """Layers of four bits: those of NF4 whose blocks do not run over the end of a row keep their codes."""

    name = "bitsandbytes, 4 bits"

    def of(self, bases: Sequence[str], names: Collection[str]) -> CheckpointFormat | None:
        for form in (Nf4Format(), BnbValuesFormat()):
            found = form.of(bases, names)
            if found is not None:
                return found
        return None

    def check_scheme(self, scheme: Scheme, name: str | None) -> None:
        _check_rounding(scheme, name)


@dataclass(frozen=True)
class Nf4Format(CheckpointFormat):
    """A layer in blocks of 64 codes of NF4, none of which runs over the end of a row."""

    bits = None
    name = "bitsandbytes nf4"
    marker = CODES

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        if inputs % BLOCK:
            raise ModelLoadError(f"blocks of {BLOCK} do not divide {inputs} inputs")
        return {
            CODES: RawTensor((outputs, inputs // 2), torch.uint8, ("U8",)),
            SCALES: RawTensor((outputs, inputs // BLOCK), torch.float32, ("F32",)),
        }

    def shape(self, stored: object) -> tuple[int, int]:
        assert callable(stored)
        outputs, pairs = stored(CODES)
        return outputs, 2 * pairs

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        pairs = raw[CODES]
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).view(outputs, inputs)
        # code 8, with which kernels fill up, is to be the number 0, which is code 7 in the file: 7 ^ 15 = 8
        middle = (codes == 7) | (codes == 8)
        codes.bitwise_xor_(middle.to(torch.uint8).mul_(15))
        return QuantizedWeight(4, codes, raw[SCALES], None, BLOCK, levels=NF4)


@dataclass(frozen=True)
class BnbValuesFormat(CheckpointFormat):
    """A layer whose numbers are read: FP4, other blocks, blocks that run over the end of a row."""

    bits = None
    name = "bitsandbytes, 4 bits"
    marker = VALUES

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        return {VALUES: RawTensor((outputs, inputs), torch.float32, ("F32",))}

    def shape(self, stored: object) -> tuple[int, int]:
        assert callable(stored)
        outputs, inputs = stored(VALUES)
        return outputs, inputs

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight.of_values(raw[VALUES])


@dataclass(frozen=True)
class BnbInt8Format(CheckpointFormat):
    """Eight bits, one scale per output. Rows stay as they are: outliers among them need no treatment of their own."""

    bits = 8
    name = "bitsandbytes, 8 bits"
    marker = ".SCB"
    optional = (".weight_format",)

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        return {
            ".weight": RawTensor((outputs, inputs), torch.int8, ("I8",)),
            ".SCB": RawTensor((outputs,), torch.float32, ("F32", "F16", "BF16")),
        }

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        # kernels that keep rows as they are store sign and magnitude; the writer makes no -128
        return QuantizedWeight(8, raw[".weight"].clamp_(min=-127), raw[".SCB"] / 127)


def _check_rounding(scheme: Scheme, name: str | None) -> None:
    if scheme.floats:
        raise ConfigError(
            f"quantization: {name!r} is not for checkpoints of bitsandbytes; int8 and int4 round them"
        )

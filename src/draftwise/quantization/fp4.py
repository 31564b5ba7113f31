"""Checkpoints whose weights are floats of four bits (e2m1) in small groups with a scale each: MXFP4 and NVFP4.

Two numbers lie in a byte, the first one in its lower half: the byte 0xB2 is 1.0, -1.5. MXFP4 (OCP Microscaling Formats
1.0): groups of 32, a scale is a power of two, kept as its exponent. NVFP4: groups of 16, a scale is an fp8 number
(e4m3), and the whole layer has a float beside.

Some checkpoints are made for activations of four bits, too ("W4A4"). Their rows are rounded to int8, with a scale for
each row, which loses less: twice a number is an integer from -12 to 12, so that products with bytes are exact. Rows of
the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.quantization.checkpoint import CheckpointFormat, RawTensor
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import E2M1, FP8, QuantizedWeight

EXPONENTS = ("U8",)
"""What exponents of scales are stored as."""


def powers(exponents: Tensor) -> Tensor:
    """Scales of microscaling formats, float32: uint8 exponents of two, plus 127."""
    ones = torch.ones(exponents.shape, dtype=torch.float32, device=exponents.device)
    return torch.ldexp(ones, exponents.int() - 127)


def mxfp4_codes(packed: Tensor, exponents: Tensor) -> QuantizedWeight:
    """MXFP4 as it is kept.

    Args:
        packed: [out, in / 2] uint8, or [out, in / 32, 16].
        exponents: [out, in / 32] uint8.

    Example: the byte 0xB2 with the exponent 128 is 1.0 * 2, -1.5 * 2: codes 2 and 11, scale 2.
    """
    codes = _codes(packed.flatten(1))
    # of a group of zeros the scale says nothing, and may be anything
    empty = ((codes.view(*exponents.shape, -1) & 7) == 0).all(-1)
    scales = powers(exponents)
    scales = torch.where(empty, scales.amax(), scales)
    return QuantizedWeight(4, codes, scales, group=32, levels=E2M1)


def _codes(packed: Tensor) -> Tensor:
    """[out, in / 2] -> [out, in] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class Fp4Format(CheckpointFormat):
    """One of the ways in which layers of either form are written.

    Args:
        kind: MXFP4 or NVFP4.
        codes: suffix of the numbers; scales are under ``.weight_scale`` always.
        whole: NVFP4: suffix of the layer's float. compressed-tensors divides by it, the others multiply.
        dynamic: the checkpoint is made for activations of four bits.
    """

    kind: Literal["mxfp4", "nvfp4"]
    codes: str
    whole: str | None = None
    dynamic: bool = False
    bits = None

    @property
    def name(self) -> str:
        return self.kind

    @property
    def optional(self) -> tuple[str, ...]:  # type: ignore[override]
        return (".input_scale", ".input_global_scale", ".weight_shape")

    @property
    def marker(self) -> str:
        return self.whole or ".weight_scale"

    @property
    def group(self) -> int:
        return 32 if self.kind == "mxfp4" else 16

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        if inputs % self.group:
            raise ModelLoadError(f"groups of {self.group} do not divide {inputs} inputs ({self.kind})")
        scales = (outputs, inputs // self.group)
        found = {self.codes: RawTensor((outputs, inputs // 2), torch.uint8, ("U8",))}
        if self.whole is None:
            return found | {".weight_scale": RawTensor(scales, torch.uint8, EXPONENTS)}
        return found | {
            ".weight_scale": RawTensor(scales, FP8, ("F8_E4M3",)),
            self.whole: RawTensor((), torch.float32, ("F32",)),
        }

    def shape(self, stored: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
        outputs, pairs = stored(self.codes)
        return outputs, 2 * pairs

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        if self.whole is None:
            return mxfp4_codes(raw[self.codes], raw[".weight_scale"])
        whole = raw[self.whole].view(())
        scales = raw[".weight_scale"].float()
        scales = scales / whole if self.whole == ".weight_global_scale" else scales * whole
        if not bool(torch.isfinite(scales).all()):
            raise ModelLoadError("scales that are no finite numbers (nvfp4)")
        return QuantizedWeight(4, _codes(raw[self.codes]), scales, group=16, levels=E2M1)

    def check_scheme(self, scheme: Scheme, name: str | None) -> None:
        """int8 and int4 leave the numbers alone, and say whether rows are rounded."""
        if scheme.floats:
            raise ConfigError(
                f"quantization: {name!r} is not for checkpoints in {self.kind}; int8 and int4 leave its numbers as "
                "they are and round rows, int8_weight_only and int4_weight_only round neither"
            )

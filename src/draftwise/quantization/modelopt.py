"""Checkpoints of NVIDIA's Model Optimizer: fp8, NVFP4, MXFP8, and several of these in one model.

What they are is said in config.json, or in ``hf_quant_config.json`` beside it (`models.source`). Which layers are
quantised shows by their tensors, so that lists of modules left out need not be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwise.quantization.checkpoint import CheckpointFormat, LayerwiseFormat
from draftwise.quantization.compressed_tensors import Fp8Format
from draftwise.quantization.floats import Fp8BlockFormat, Fp8TensorFormat
from draftwise.quantization.fp4 import Fp4Format
from draftwise.quantization.grouped import GroupsFormat
from draftwise.quantization.scheme import Scheme

_FORMS: dict[str, CheckpointFormat] = {
    "FP8": Fp8TensorFormat(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Format(column=False),
    "FP8_PB_WO": Fp8BlockFormat(128, 128, ".weight_scale", spread=True),
    "NVFP4": Fp4Format("nvfp4", ".weight", ".weight_scale_2", dynamic=True),
    "W4A16_NVFP4": Fp4Format("nvfp4", ".weight", ".weight_scale_2"),
    "MXFP8": Fp8BlockFormat(1, 32, ".weight_scale", exponents=True),
}
"""By the name of the algorithm."""
MIXED = "MIXED_PRECISION"
SUPPORTED = (*_FORMS, MIXED)


def modelopt_form(raw: Mapping[str, Any]) -> CheckpointFormat | str:
    """The format that a ``quantization_config`` describes; a text: what of it is not supported."""
    if raw.get("quant_algo") is None and (raw.get("kv_cache_quant_algo") or raw.get("kv_cache_scheme")):
        return GroupsFormat(())  # nothing but keys and values
    algorithm = str(raw.get("quant_algo")).upper()
    if algorithm != MIXED:
        return _FORMS.get(algorithm) or f"quant_algo {raw.get('quant_algo')!r}"
    layers = raw.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        return "quant_algo MIXED_PRECISION without quantized_layers"
    names = {str(layer.get("quant_algo")).upper() for layer in layers.values()}
    if "W4A16_NVFP4" in names:  # their tensors are alike: all rows stay as they are
        names.discard("NVFP4")
    for name in sorted(names - _FORMS.keys()):
        return f"quant_algo {name!r} in quantized_layers"
    found = dict.fromkeys(_FORMS[name] for name in sorted(names))
    plain = [form for form in found if form.marker == ".weight_scale"]
    if len(plain) > 1:
        return f"{' and '.join(form.name for form in plain)} in one model"
    return MixedFormat(tuple(sorted(found, key=lambda form: form.marker == ".weight_scale")))


@dataclass(frozen=True)
class MixedFormat(LayerwiseFormat):
    """Layers in NVFP4 beside others: a layer's tensors tell. ``forms``: the one whose tensors others have, too, is the
    last."""

    forms: tuple[CheckpointFormat, ...]

    @property
    def name(self) -> str:
        return " and ".join(form.name for form in self.forms)

    def of(self, bases: Sequence[str], names: Collection[str]) -> CheckpointFormat | None:
        for form in self.forms:
            if any(base + form.marker in names for base in bases):
                return form.of(bases, names)
        return None

    def unneeded(self, bases: Sequence[str]) -> set[str]:
        return set().union(*(form.unneeded(bases) for form in self.forms))

    def check_scheme(self, scheme: Scheme, name: str | None) -> None:
        for form in self.forms:
            form.check_scheme(scheme, name)

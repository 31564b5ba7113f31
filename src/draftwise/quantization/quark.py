"""Checkpoints of AMD's Quark: fp8 with one scale or one per output, MXFP4.

Which layers are quantised shows by their tensors, so that lists of modules left out need not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftwise.quantization.checkpoint import CheckpointFormat
from draftwise.quantization.compressed_tensors import Fp8Format
from draftwise.quantization.floats import Fp8TensorFormat
from draftwise.quantization.fp4 import Fp4Format


def quark_form(raw: Mapping[str, Any]) -> CheckpointFormat | str:
    """The format that a ``quantization_config`` describes; a text: what of it is not supported."""
    found: dict[CheckpointFormat, None] = {}
    parts = list(_parts(raw))
    rounds_rows = any(part.get("input_tensors") is not None for part in parts)
    for part in parts:
        form = _form(part["weight"], rounds_rows)
        if isinstance(form, str):
            return form
        found[form] = None
    if not found:
        return "a configuration without quantised weights"
    if len(found) > 1:
        return f"{' and '.join(form.name for form in found)} in one model"
    return next(iter(found))


def _parts(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What says something of weights: of all layers, of some, and of some kinds."""
    parts: list[Any] = [raw.get("global_quant_config")]
    for name in ("layer_quant_config", "layer_type_quant_config"):
        more = raw.get(name)
        parts += more.values() if isinstance(more, Mapping) else []
    for part in parts:
        if isinstance(part, Mapping) and part.get("weight") is not None:
            yield part


def _form(weights: Any, rounds_rows: bool) -> CheckpointFormat | str:
    if not isinstance(weights, Mapping):  # a list: rounded twice, as fp8 and then as int4
        return "weights that are rounded twice"
    kind, scheme = weights.get("dtype"), weights.get("qscheme")
    if kind == "fp8_e4m3" and scheme == "per_tensor":
        return Fp8TensorFormat()
    if kind == "fp8_e4m3" and scheme == "per_channel":
        return Fp8Format(column=False)
    exponents = weights.get("scale_format") == "e8m0"
    if kind == "fp4" and scheme == "per_group" and weights.get("group_size") == 32 and exponents:
        return Fp4Format("mxfp4", ".weight", dynamic=rounds_rows)
    return f"weights of type {kind} with {scheme}"

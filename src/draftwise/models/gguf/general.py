"""A Transformers model filled from a GGUF file, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry, copy_tensors, shorten
from draftwise.models.config import ModelConfig
from draftwise.models.gguf.tensors import scan_gguf

_EXPERTS = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")


def build_from_gguf(path: Path, config: ModelConfig, model_config: Any, dtype: torch.dtype) -> Any:
    """The causal model of Transformers that ``config`` describes, with a file's weights in ``dtype``.

    Peak memory is the weights and one window of the file.

    Args:
        model_config: Transformers' configuration object.

    Raises:
        ModelLoadError: Transformers cannot build it, or the file's tensors are not its parameters; names them.
    """
    import transformers
    from transformers.initialization import no_init_weights

    entries = scan_gguf(path)
    maker: Any = transformers.AutoModelForCausalLM
    try:
        with no_init_weights():
            model = maker.from_config(model_config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(
            f"{path}: Transformers cannot build it: {type(error).__name__}: {error}"
        ) from error
    if type(model).__name__ != config.architecture:
        raise ModelLoadError(f"{path}: Transformers takes {config.architecture} for a {type(model).__name__}")
    model.tie_weights()
    used: set[str] = set()
    missing: list[str] = []
    seen: set[int] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            parts = _parts(name, parameter.data)
            absent = [part for part in parts if part not in entries]
            if absent:
                missing += absent
                continue
            wrong = [part for part, place in parts.items() if entries[part].shape != tuple(place.shape)]
            if wrong:
                raise ModelLoadError(f"{path}: tensors of another shape: {shorten(wrong)}")
            copy_tensors(entries, parts)
            used.update(parts)
    surplus = sorted(name for name in _plain(entries) if name not in used)
    if missing or surplus:
        what, names = ("missing", missing) if missing else ("not of this architecture", surplus)
        raise ModelLoadError(f"{path}: tensors are {what}: {shorten(sorted(names))}")
    return model


def _parts(name: str, place: Tensor) -> dict[str, Tensor]:
    """Names of a checkpoint's tensors that fill a parameter, and where each goes. Experts lie in one stack each:
    ``gate_up_proj`` [E, 2 I, H] (gate first), ``down_proj`` [E, H, I]."""
    found = _EXPERTS.match(name)
    if found is None:
        return {name: place}
    base, kind = found.groups()
    parts: dict[str, Tensor] = {}
    for i in range(place.shape[0]):
        if kind == "down_proj":
            parts[f"{base}.{i}.down_proj.weight"] = place[i]
        else:
            half = place.shape[1] // 2
            parts[f"{base}.{i}.gate_proj.weight"] = place[i, :half]
            parts[f"{base}.{i}.up_proj.weight"] = place[i, half:]
    return parts


def _plain(entries: Mapping[str, TensorEntry]) -> list[str]:
    """Names without those of the bytes of layers that can be kept in codes."""
    return [name for name, entry in entries.items() if entry.dtype != "U8"]

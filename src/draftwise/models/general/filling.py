"""A Transformers model filled from what it cannot read itself, or not without twice the memory: GGUF files, and
checkpoints whose linear layers are quantised, whose weights become floats. Tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry, copy_tensors
from draftwise.models.weights import release_freed_memory
from draftwise.models.words import shorten
from draftwise.quantization.checkpoint import CheckpointFormat

_EXPERTS = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_RELEASED = 64 << 20  # bytes filled after which freed memory is given back


def build_filled(
    place: Path,
    entries: Mapping[str, TensorEntry],
    layout: CheckpointFormat | None,
    cls: Any,
    model_config: Any,
    dtype: torch.dtype,
    *,
    whole: bool,
) -> Any:
    """A model of Transformers with a checkpoint's weights in ``dtype``. Peak memory is the weights and one layer.

    Args:
        place: what errors name.
        entries: the checkpoint's tensors.
        layout: how quantised layers are stored; None: there are none.
        cls, model_config: Transformers' class and configuration object.
        whole: a tensor that is no parameter of the model is an error.

    Raises:
        ModelLoadError: Transformers cannot build it, or the tensors are not its parameters; names them.
    """
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights():
            model = cls._from_config(model_config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(
            f"{place}: Transformers cannot build it: {type(error).__name__}: {error}"
        ) from error
    model.tie_weights()
    filler = _Filler(place, entries, layout)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones once
            for part, target in _parts(name, parameter.data).items():
                filler.fill(part, target)
    surplus = sorted(
        name for name, entry in entries.items() if entry.dtype != "U8" and name not in filler.used
    )
    if filler.missing:
        raise ModelLoadError(f"{place}: tensors are missing: {shorten(sorted(filler.missing))}")
    if whole and surplus:
        raise ModelLoadError(f"{place}: tensors are not of this architecture: {shorten(surplus)}")
    return model


class _Filler:
    """Fills one tensor after the other and notes what was read."""

    def __init__(
        self, place: Path, entries: Mapping[str, TensorEntry], layout: CheckpointFormat | None
    ) -> None:
        self._place, self._entries, self._layout = place, entries, layout
        self._filled = 0  # bytes since freed memory was given back
        self.used: set[str] = set()
        self.missing: list[str] = []

    def fill(self, name: str, target: Tensor) -> None:
        base = name.removesuffix(".weight")
        form = None
        if self._layout is not None and base != name and target.ndim == 2:
            form = self._layout.of([base], self._entries.keys())
        if form is not None:
            self._dequantize(base, form, target)
        elif name in self._entries:
            self._check({name: target})
            copy_tensors(self._entries, {name: target})
            self.used.add(name)
        else:
            self.missing.append(name)
            return
        self._filled += target.numel() * target.element_size()
        if self._filled > _RELEASED:
            self._filled = 0
            release_freed_memory()

    def _dequantize(self, base: str, form: CheckpointFormat, target: Tensor) -> None:
        outputs, inputs = target.shape
        try:
            raw = {s: torch.empty(t.shape, dtype=t.dtype) for s, t in form.tensors(outputs, inputs).items()}
            places = {base + suffix: value for suffix, value in raw.items()}
            absent = [name for name in places if name not in self._entries]
            if absent:
                self.missing += absent
                return
            self._check(places)
            copy_tensors(self._entries, places)
            target.copy_(form.decode(raw, outputs, inputs).dequantize())
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._place}: {base}: {error}") from error
        self.used.update(places)
        self.used.update(form.unneeded([base]))

    def _check(self, places: Mapping[str, Tensor]) -> None:
        for name, target in places.items():
            shape = self._entries[name].shape
            if shape != tuple(target.shape) and not (torch.Size(shape).numel() == target.numel() == 1):
                raise ModelLoadError(
                    f"{self._place}: {name} has shape {list(shape)}, expected {list(target.shape)}"
                )


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

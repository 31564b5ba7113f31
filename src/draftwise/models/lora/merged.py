"""An adapter merged into a checkpoint as it is read: for a drafter, which has one adapter or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry, read_rows
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.lora.peft import read_adapter
from draftwise.models.words import shorten


@dataclass(frozen=True, slots=True)
class _Merged:
    """Rows of ``W + scale * B A``, in float32."""

    name: str
    entry: TensorEntry
    low: LowRank

    def rows(self, start: int, end: int) -> Tensor:
        added = self.low.up[start:end].float() @ self.low.down.float()
        return read_rows(self.entry, self.name, start, end).float() + self.low.scale * added


def with_adapter(entries: Mapping[str, TensorEntry], path: str) -> dict[str, TensorEntry]:
    """``entries`` of a float checkpoint, the weights that an adapter changes in its sense.

    Raises:
        ModelLoadError: as `read_adapter`, or the adapter is for another model, or for layers that are quantised.
    """
    out = dict(entries)
    parts = read_adapter(path)
    missing = sorted(module for module in parts if f"{module}.weight" not in entries)
    if missing:
        raise ModelLoadError(f"{path}: the model has no float weights of these layers: {shorten(missing)}")
    for module, low in parts.items():
        name = f"{module}.weight"
        shape = (low.up.shape[0], low.down.shape[1])
        if entries[name].shape != shape:
            raise ModelLoadError(
                f"{path}: {module}: the adapter is for {list(shape)}, the model's layer is {list(entries[name].shape)}"
            )
        out[name] = replace(entries[name], dtype="F32", source=_Merged(name, entries[name], low))
    return out

"""The tensors of a head's folder, whatever kind of file they lie in."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import (
    TensorEntry,
    copy_tensors,
    read_json,
    scan_checkpoint,
    scan_file,
)
from draftwise.models.weights import WeightPlan
from draftwise.models.words import shorten

logger = logging.getLogger("draftwise")

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
_TORCH_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")

Rename = Callable[[str], str | None]
"""The name that the engine's heads use for a tensor of a folder; None: it is not of the head."""


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor: its name in the file, its shape, and where its values are."""

    origin: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    source: TensorEntry | Tensor  # in a safetensors file, or mapped from a pickled one


class HeadTensors(Mapping[str, HeadTensor]):
    """Name -> tensor. Only headers are read until `copy` or `read`."""

    def __init__(self, folder: Path, tensors: Mapping[str, HeadTensor]) -> None:
        self.folder = folder
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> HeadTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def renamed(self, rename: Rename) -> HeadTensors:
        """The same tensors under the names that ``rename`` gives, without those that it gives none.

        Raises:
            ModelLoadError: two tensors get one name.
        """
        out: dict[str, HeadTensor] = {}
        for name, tensor in self._tensors.items():
            new = rename(name)
            if new is None:
                continue
            if new in out:
                raise ModelLoadError(
                    f"{self.folder}: {out[new].origin} and {tensor.origin} are two names of one tensor"
                )
            out[new] = tensor
        return HeadTensors(self.folder, out)

    def read(self, name: str) -> Tensor:
        """The whole tensor, as it is stored."""
        tensor = self._tensors[name]
        if isinstance(tensor.source, Tensor):
            return tensor.source.clone()
        from safetensors import safe_open

        with safe_open(tensor.source.file, framework="pt") as handle:
            value: Tensor = handle.get_tensor(tensor.origin)
        return value

    def copy(self, targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets[name]`` (equal shapes), converting dtype and device."""
        entries: dict[str, TensorEntry] = {}
        places: dict[str, Tensor] = {}
        for name, dest in targets.items():
            tensor = self._tensors[name]
            if isinstance(tensor.source, Tensor):
                dest.copy_(tensor.source)
            else:
                entries[tensor.origin], places[tensor.origin] = tensor.source, dest
        copy_tensors(entries, places)

    def fill(self, plan: WeightPlan) -> None:
        """Let a plan's parameters be filled from here, after `check`."""
        self.check(plan)
        plan.fill_with(self.copy)

    def check(self, plan: WeightPlan) -> None:
        """All that a plan declares is here in the right shape.

        Raises:
            ModelLoadError: tensors are missing, have another shape, or are no floats; all are named.
        """
        missing = sorted(plan.targets.keys() - self.keys())
        if missing:
            raise ModelLoadError(f"{self.folder}: tensors are missing: {shorten(missing)}")
        wrong = [
            f"{self[name].origin} has shape {list(self[name].shape)}, expected {list(target.dest.shape)}"
            for name, target in plan.targets.items()
            if self[name].shape != tuple(target.dest.shape)
        ]
        if wrong:
            raise ModelLoadError(f"{self.folder}: {'; '.join(wrong[:4])}")
        odd = sorted(self[name].origin for name in plan.targets if self[name].dtype not in _FLOATS)
        if odd:
            raise ModelLoadError(f"{self.folder}: quantised tensors are not supported: {shorten(odd)}")

    def note_unused(self, used: Iterator[str] | set[str]) -> None:
        """Log unused tensors, once."""
        names = set(used)
        left = sorted(tensor.origin for name, tensor in self._tensors.items() if name not in names)
        if left:
            logger.warning("%s: tensors that are not used: %s", self.folder, shorten(left))


def scan_head(folder: Path, *preferred: str) -> HeadTensors:
    """The tensors of a head's folder: safetensors (one file of any name, or several with an index), else what
    ``torch.save`` wrote (``pytorch_model.bin``, with an index or without, ``medusa_lm_head.pt``), of which nothing but
    tensors is ever unpickled.

    ``preferred``: names of files that are taken first if they are there.

    Raises:
        ModelLoadError: there is none, there are several without an index, or one cannot be read.
    """
    for name in preferred:
        if (folder / name).is_file():
            return _scan_one(folder, folder / name)
    if any((folder / name).is_file() for name in _SAFETENSORS):
        return _from_entries(folder, scan_checkpoint(folder))
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return _scan_one(folder, single[0])
    if single:
        names = shorten([file.name for file in single])
        raise ModelLoadError(f"{folder} has several weight files and no index: {names}")
    if (folder / _PICKLE_INDEX).is_file():
        weight_map = read_json(folder / _PICKLE_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{folder / _PICKLE_INDEX} has no weight_map")
        tensors: dict[str, HeadTensor] = {}
        for name in sorted({str(file) for file in weight_map.values()}):
            if not (folder / name).is_file():
                raise ModelLoadError(f"{folder}: {_PICKLE_INDEX} names {name}, which is missing")
            tensors.update(_scan_pickle(folder / name))
        return HeadTensors(folder, tensors)
    for name in _PICKLES:
        if (folder / name).is_file():
            return _scan_one(folder, folder / name)
    raise ModelLoadError(
        f"{folder} has no weights: expected model.safetensors, {', '.join(_PICKLES)} or one other safetensors file"
    )


def _scan_one(folder: Path, file: Path) -> HeadTensors:
    if file.suffix == ".safetensors":
        return _from_entries(folder, scan_file(file))
    return HeadTensors(folder, _scan_pickle(file))


def _from_entries(folder: Path, entries: Mapping[str, TensorEntry]) -> HeadTensors:
    return HeadTensors(folder, {n: HeadTensor(n, e.shape, e.dtype, e) for n, e in entries.items()})


def _scan_pickle(file: Path) -> dict[str, HeadTensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise ModelLoadError(f"{file} is truncated or damaged: {error}") from error
        loaded = _load_old(file)  # the format before torch 1.6 cannot be mapped
    except (pickle.UnpicklingError, OSError, EOFError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read, or holds more than tensors: {error}") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ModelLoadError(f"{file} must hold a mapping of names to tensors")
    return {
        str(name): HeadTensor(str(name), tuple(t.shape), _TORCH_NAMES.get(t.dtype, str(t.dtype)), t)
        for name, t in loaded.items()
    }


def _load_old(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read, or holds more than tensors: {error}") from error

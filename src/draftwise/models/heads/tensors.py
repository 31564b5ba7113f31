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
from draftwise.models.bitsandbytes import bitsandbytes_tensors
from draftwise.models.checkpoint import (
    TensorEntry,
    copy_tensors,
    read_index,
    read_json,
    scan_checkpoint,
    scan_file,
)
from draftwise.models.source import is_bitsandbytes, with_form, written_form
from draftwise.models.weights import WeightPlan, same_shape
from draftwise.models.words import shorten
from draftwise.quantization.checkpoint import CheckpointFormat
from draftwise.quantization.parsing import parse_checkpoint_format

logger = logging.getLogger("draftwise")

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
_OTHERS = frozenset({"I64", "BOOL"})  # tables of ids
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

    def __init__(
        self, folder: Path, tensors: Mapping[str, HeadTensor], layout: CheckpointFormat | None = None
    ) -> None:
        """``layout``: how quantised linear layers are stored; None: there are none."""
        self.folder = folder
        self.layout = layout
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

    def stored(self) -> HeadTensors:
        """The same tensors, read as the folder's ``quantization_config`` says, where some of them are codes.

        Raises:
            ModelLoadError: a form that is not supported.
        """
        written = _quantization(self.folder)
        floats = all(tensor.dtype in _FLOATS | _OTHERS for tensor in self._tensors.values())
        if written is None or (floats and not is_bitsandbytes(written)):  # that may give numbers for codes
            return self
        origins = {
            new.rpartition(".")[0]: tensor.origin.rpartition(".")[0] for new, tensor in self._tensors.items()
        }
        return HeadTensors(self.folder, self._tensors, parse_checkpoint_format(written).renamed(origins))

    def plan(self, dtype: torch.dtype, device: torch.device) -> WeightPlan:
        """A plan for parameters that are filled from here."""
        return WeightPlan(dtype, device, self.layout, self.keys())

    def linear_shape(self, base: str) -> tuple[int, int] | None:
        """Outputs and inputs of a linear layer, quantised or not; None: it is not here.

        Example: ``layers.0.self_attn.q_proj``, whose tensors are ``.weight``, or ``.qweight``, ``.qzeros``, ...
        """
        form = None if self.layout is None else self.layout.of([base], self.keys())
        if form is not None:
            return form.shape(lambda suffix: self[base + suffix].shape)
        found = self.get(f"{base}.weight")
        return None if found is None else (found.shape[0], found.shape[1])

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
        """Fill ``targets[name]`` (`same_shape`), converting dtype and device."""
        entries: dict[str, TensorEntry] = {}
        places: dict[str, Tensor] = {}
        for name, dest in targets.items():
            tensor = self._tensors[name]
            if isinstance(tensor.source, Tensor):
                dest.copy_(tensor.source.reshape(dest.shape))
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
            if not same_shape(self[name].shape, tuple(target.dest.shape))
        ]
        if wrong:
            raise ModelLoadError(f"{self.folder}: {'; '.join(wrong[:4])}")
        odd = sorted(
            self[name].origin
            for name, target in plan.targets.items()
            if self[name].dtype not in (target.stored or _FLOATS)
        )
        if odd:
            raise ModelLoadError(
                f"{self.folder}: quantised tensors need a quantization_config in config.json, and Medusa heads "
                f"may have none: {shorten(odd)}"
            )

    def note_unused(self, used: Iterator[str] | set[str]) -> None:
        """Log unused tensors, once.

        Raises:
            ModelLoadError: codes of a layer that is read as floats only, such as an output layer, are among them.
        """
        names = set(used)
        unused = [tensor for name, tensor in self._tensors.items() if name not in names]
        codes = sorted(tensor.origin for tensor in unused if tensor.dtype not in _FLOATS | _OTHERS)
        if codes:
            raise ModelLoadError(
                f"{self.folder}: these are quantised, and read as floats only: {shorten(codes)}"
            )
        left = sorted(tensor.origin for tensor in unused)
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
        tensors: dict[str, HeadTensor] = {}
        for name in sorted(set(read_index(folder / _PICKLE_INDEX).values())):
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


def _quantization(folder: Path) -> object:
    """``quantization_config`` of a folder's config.json, of its text part if it is there; None: it has none."""
    path = folder / "config.json"
    return written_form(with_form(folder, read_json(path))) if path.is_file() else None


def _from_entries(folder: Path, entries: Mapping[str, TensorEntry]) -> HeadTensors:
    if is_bitsandbytes(_quantization(folder)):
        entries = bitsandbytes_tensors(entries)
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

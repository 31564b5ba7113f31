"""Reading safetensors: headers first, then tensor by tensor in bounded pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.cuts import Cut, Reader, copy_part
from draftwise.models.progress import count
from draftwise.models.words import shorten

_INDEX = "model.safetensors.index.json"
_WINDOW_BYTES = 16 << 20
"""Pages of the mapped file that may be resident at once: the file is mapped anew after each window, because pages
once read would count as this process's memory until it is unmapped."""


class RowSource(Protocol):
    """Gives the values of a tensor in pieces."""

    def rows(self, start: int, end: int) -> Tensor:
        """``[start:end]`` of the tensor, in whatever dtype its values have; of a scalar the whole."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies, and its shape as the file's header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored: str | None = None  # its name in the file, if it goes by another
    source: RowSource | None = None  # where its values are, if not under its name in a safetensors file
    cut: Cut | None = None  # the part of it that is read; ``shape`` is then that part's


def scan_checkpoint(folder: Path) -> dict[str, TensorEntry]:
    """Headers of every safetensors file of a model folder: name -> entry. No tensor data is read.

    Raises:
        ModelLoadError: no weights, only weights in another format, a file that the index names is missing, a file
            is truncated or damaged, or a tensor is not in the file the index says.
    """
    entries: dict[str, TensorEntry] = {}
    index = _read_index(folder)
    for file in _weight_files(folder, index):
        for name, entry in scan_file(file).items():
            if name in entries:
                raise ModelLoadError(f"tensor {name} is both in {entries[name].file.name} and in {file.name}")
            entries[name] = entry
    if index is not None:
        lost = sorted(
            name for name, file in index.items() if name not in entries or entries[name].file.name != file
        )
        if lost:
            raise ModelLoadError(f"{_INDEX} names tensors that are not where it says: {shorten(lost)}")
    return entries


def copy_tensors(entries: Mapping[str, TensorEntry], targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets[name]`` from ``entries[name]`` (equal shapes), converting dtype and device, file by file.

    Peak memory beyond the targets is about one window (16 MiB) or one row, whichever is more.
    """
    by_file: dict[Path, list[str]] = {}
    for name, dest in targets.items():
        source, cut = entries[name].source, entries[name].cut
        if source is not None:
            if cut is None:
                _copy_rows(source, dest)
            else:
                copy_part(_columns_of(source), cut, dest, _WINDOW_BYTES)
            count(dest.numel())
            continue
        by_file.setdefault(entries[name].file, []).append(name)
    for file, names in by_file.items():
        try:
            whole = {name: entries[name].stored or name for name in names if entries[name].cut is None}
            _copy_file(file, whole, targets)
            for name in names:
                cut = entries[name].cut
                if cut is not None:
                    copy_part(_slices(file, entries[name].stored or name), cut, targets[name], _WINDOW_BYTES)
                    count(targets[name].numel())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}") from error


def read_rows(entry: TensorEntry, name: str, start: int, end: int, *, of: int | None = None) -> Tensor:
    """``[start:end]`` of a tensor, or of its matrix ``of`` [E, outputs, inputs], as it is stored. Raises ModelLoadError
    if its file cannot be read."""
    if entry.source is not None:
        return entry.source.rows(start, end) if of is None else entry.source.rows(of, of + 1)[0, start:end]
    try:
        with safe_open(entry.file, framework="pt") as handle:
            part = handle.get_slice(entry.stored or name)
            found: Tensor = part[start:end] if of is None else part[of : of + 1, start:end][0]
            return found
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{entry.file} cannot be read: {error}") from error


def read_part(entry: TensorEntry, name: str, cut: Cut, dest: Tensor) -> None:
    """Fill ``dest``, of ``cut.own_shape``, with a part of a tensor, converting its type. Raises ModelLoadError if its
    file cannot be read."""
    if entry.source is not None:
        copy_part(_columns_of(entry.source), cut, dest, _WINDOW_BYTES)
        return
    try:
        copy_part(_slices(entry.file, entry.stored or name), cut, dest, _WINDOW_BYTES)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{entry.file} cannot be read: {error}") from error


def _copy_rows(source: RowSource, dest: Tensor) -> None:
    if dest.ndim == 0:
        dest.copy_(source.rows(0, 1))
        return
    # four bytes a number while it is converted
    step = max(1, _WINDOW_BYTES // (4 * max(1, dest[0].numel())))
    for start in range(0, dest.shape[0], step):
        end = min(start + step, dest.shape[0])
        dest[start:end].copy_(source.rows(start, end))


def _slices(file: Path, stored: str) -> Reader:
    """Rows, and of these some columns, of a tensor of a file; it is mapped anew for each piece, see `_WINDOW_BYTES`."""

    def read(start: int, end: int, *columns: slice) -> Tensor:
        with safe_open(file, framework="pt") as handle:
            found: Tensor = handle.get_slice(stored)[(slice(start, end), *columns)]
            return found

    return read


def _columns_of(source: RowSource) -> Reader:
    """The same of what gives whole rows."""
    return lambda start, end, *columns: source.rows(start, end)[(slice(None), *columns)]


def _copy_file(file: Path, names: Mapping[str, str], targets: Mapping[str, Tensor]) -> None:
    """``names``: of targets, and theirs in the file."""
    handle: Any = safe_open(file, framework="pt")
    touched = 0
    for name, stored in names.items():
        dest = targets[name]
        if dest.numel() == 1:  # files write one number with and without dimensions
            dest.copy_(handle.get_tensor(stored).reshape(dest.shape))
            continue
        row_bytes = max(1, dest[0].numel() * dest.element_size())
        step = max(1, _WINDOW_BYTES // row_bytes)
        for start in range(0, dest.shape[0], step):
            end = min(start + step, dest.shape[0])
            if touched and touched + (end - start) * row_bytes > _WINDOW_BYTES:
                handle = safe_open(file, framework="pt")
                touched = 0
            dest[start:end].copy_(handle.get_slice(stored)[start:end])
            touched += (end - start) * row_bytes
            count(dest[start:end].numel())


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / _INDEX
    return read_index(path) if path.is_file() else None


def read_index(path: Path) -> dict[str, str]:
    """Which of the files beside an index has each tensor. Raises ModelLoadError if it cannot be read, or names a file
    that is elsewhere: who wrote the index must not choose what is read."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path} has no weight_map")
    files = {str(name): str(file) for name, file in weight_map.items()}
    elsewhere = sorted({file for file in files.values() if Path(file).name != file})
    if elsewhere:
        raise ModelLoadError(f"{path} names files that are not in its folder: {shorten(elsewhere)}")
    return files


def _weight_files(folder: Path, index: Mapping[str, str] | None) -> list[Path]:
    if index is not None:
        files = [folder / name for name in sorted(set(index.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(f"{folder}: weight files named by {_INDEX} are missing: {shorten(missing)}")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        raise ModelLoadError(f"{folder} has {shorten(others)}, but neither model.safetensors nor {_INDEX}")
    old = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if old:
        raise ModelLoadError(
            f"{folder} has no safetensors, only {shorten(old)}: convert it, for example with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ModelLoadError(f"{folder} has no weights (model.safetensors or {_INDEX})")


def scan_file(file: Path) -> dict[str, TensorEntry]:
    """The header of one safetensors file: name -> entry. Raises ModelLoadError if it is truncated or damaged."""
    try:
        # for numpy, which maps the file for reading: for torch, it must fit into the memory that could be written to
        with safe_open(file, framework="np") as handle:
            entries = {}
            for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                part = handle.get_slice(name)
                entries[name] = TensorEntry(file, tuple(part.get_shape()), str(part.get_dtype()))
            return entries
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is truncated or damaged: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelLoadError naming the file when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value

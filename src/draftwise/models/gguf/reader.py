"""The header of a GGUF file: metadata, and where each tensor lies.

Source: the format's specification, ggml's ``docs/gguf.md``::

    "GGUF" | version u32 | tensors u64 | entries u64 | entries | tensors' names, shapes, types, offsets | padding | data
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.gguf.blocks import BlockType, block_type

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file."""

    file: Path
    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it; the file has it the other way round
    kind: BlockType
    start: int  # bytes from the beginning of the file

    @property
    def row_bytes(self) -> int:
        """Bytes of the innermost dimension."""
        return (self.shape[-1] if self.shape else 1) // self.kind.numbers * self.kind.size

    @property
    def rows(self) -> int:
        """All dimensions but the innermost."""
        return prod(self.shape[:-1])

    def read(self, start: int, end: int) -> Tensor:
        """Rows ``start`` to ``end`` (of `rows`), [n, row_bytes] uint8, read from the file and not mapped: pages of a
        mapping would count as this process's memory.

        Raises:
            ModelLoadError: the file is shorter than it was.
        """
        count = (end - start) * self.row_bytes
        data = torch.empty(count, dtype=torch.uint8)
        array: Any = data.numpy()
        view, done = memoryview(array), 0
        with self.file.open("rb", buffering=0) as handle:
            handle.seek(self.start + start * self.row_bytes)
            while done < count:
                read = handle.readinto(view[done:])
                if not read:
                    raise ModelLoadError(f"{self.file} ends inside tensor {self.name}")
                done += read
        return data.view(end - start, self.row_bytes)


@dataclass(frozen=True)
class GgufFile:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the family, such as "llama" or "qwen2"."""
        return str(self.metadata.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its name or its first bytes. Raises ModelLoadError if it cannot be read."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as handle:
            return handle.read(4) == MAGIC
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from None


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header; read once for as long as the file stays as it is.

    Raises:
        ModelLoadError: no GGUF file, of a version or with tensors that are not read, truncated or damaged.
    """
    try:
        facts = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return _read(path, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, size: int, changed: int) -> GgufFile:
    del changed  # part of the key
    with path.open("rb") as handle:
        if handle.read(4) != MAGIC:
            raise ModelLoadError(f"{path} is not a GGUF file")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Header(path, data, size).parsed()
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
                raise ModelLoadError(f"{path} is truncated or damaged: {error}") from error


class _Header:
    """Reads one value after the other."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 4

    def parsed(self) -> GgufFile:
        version = self._scalar("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            other = " (of the other byte order)" if version >= 1 << 16 else ""
            raise ModelLoadError(f"{self._path} is GGUF version {version}{other}; versions {known} are read")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        if num_tensors * 24 + num_entries * 13 > self._size:  # what each takes at least
            raise self._damaged("its header promises more than the file can hold")
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        found = []
        for _ in range(num_tensors):
            name, count = self._string(), self._scalar("I")
            if count > 4:
                raise self._damaged(f"tensor {name} has {count} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(count))[::-1]
            code, offset = self._scalar("I"), self._scalar("Q")
            try:
                kind = block_type(code)
            except ModelLoadError as error:
                raise ModelLoadError(f"{self._path}: {name}: {error}") from error
            found.append((name, shape, kind, offset))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"an alignment of {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            if shape and shape[-1] % kind.numbers:
                raise self._damaged(
                    f"rows of {shape[-1]} numbers in {name} are not whole blocks of {kind.name}"
                )
            tensor = GgufTensor(self._path, name, shape, kind, start + offset)
            if tensor.start + tensor.rows * tensor.row_bytes > self._size:
                raise self._damaged(f"it ends inside tensor {name}")
            tensors[name] = tensor
        return GgufFile(self._path, metadata, tensors)

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is truncated or damaged: {what}")

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return value

    def _string(self) -> str:
        return self._bytes(self._scalar("Q")).decode("utf-8")

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise IndexError("a text reaches past the end of the file")
        value = self._data[self._at : end]
        self._at = end
        return value

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"a value of type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element == _STRING:
            if self._at + 8 * count > self._size:
                raise IndexError("a list of texts reaches behind the end")
            return [self._string() for _ in range(count)]
        if element not in _SCALARS:
            raise self._damaged(f"a list of values of type {element}")
        form = f"<{count}{_SCALARS[element]}"
        return list(struct.unpack(form, self._bytes(struct.calcsize(form))))


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no config.json; None: it has none.

    Raises:
        ModelLoadError: it has several; names them. Or it cannot be read.
    """
    if (folder / "config.json").is_file():
        return None
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror}") from None
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if len(files) > 1:
        raise ModelLoadError(f"{folder} has several GGUF files; name one: {', '.join(files[:8])}")
    return folder / files[0] if files else None

"""The tensors of a GGUF file as those of a checkpoint: names, shapes, and rows when they are asked for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.gguf.blocks import BLOCK, FLOATS, KEPT, BlockType, block_type, codes_of, values_of
from draftwise.models.gguf.names import Mapped, mapped
from draftwise.models.gguf.reader import read_gguf
from draftwise.quantization.checkpoint import CheckpointFormat, RawTensor
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import QuantizedWeight

logger = logging.getLogger("draftwise")

_ST_NAMES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}
_SUFFIXES = {f".{name.lower()}": name for name in KEPT}
"""A layer whose codes can be kept is in the table twice: ``.weight`` is its numbers, ``.q8_0`` its bytes."""


@dataclass(frozen=True, slots=True)
class _Values:
    """Rows of a tensor as numbers."""

    source: Mapped

    def rows(self, start: int, end: int) -> Tensor:
        data = _read(self.source, start, end)
        values = values_of(data, self.source.tensor.kind)
        values = values + self.source.shift if self.source.shift else values
        return values.view(end - start, *self.source.shape[1:]) if self.source.shape else values.view(())


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Rows of a tensor as they are stored."""

    source: Mapped

    def rows(self, start: int, end: int) -> Tensor:
        return _read(self.source, start, end)


def _read(source: Mapped, start: int, end: int) -> Tensor:
    """Rows of the first dimension, [n, bytes] uint8, in the order of a checkpoint.

    llama.cpp's writer brings q and k of Llama into the order of its own rotation: row 2 i + p of a head is row
    p * D / 2 + i of the checkpoint. Example, D = 8: rows 0 4 1 5 2 6 3 7 of the checkpoint lie one after the other.
    """
    tensor = source.tensor
    if len(source.shape) <= 1:
        count = source.shape[0] if source.shape else 1
        numbers = values_of(tensor.read(0, 1), tensor.kind).view(-1)
        assert source.heads is None or count % source.heads == 0
        if source.heads is not None:
            numbers = numbers[_order(source.heads, count)]
        return numbers[start:end].contiguous().view(torch.uint8).view(end - start, -1)
    inner = tensor.rows // tensor.shape[0] if source.expert is None else 1
    first = 0 if source.expert is None else source.expert * source.shape[0]
    if source.heads is None:
        return tensor.read(first + start * inner, first + end * inner).view(end - start, -1)
    size = source.shape[0] // source.heads  # whole heads are read: their rows lie close together
    low, high = start // size, -(-end // size)
    data = tensor.read(low * size, high * size)
    order = _order(high - low, data.shape[0])[start - low * size : end - low * size]
    return data[order]


def _order(heads: int, rows: int) -> Tensor:
    """Where row r of a checkpoint lies, int64 [rows]."""
    half = rows // heads // 2
    return torch.arange(rows).view(heads, half, 2).transpose(1, 2).reshape(-1)


def scan_gguf(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file under the names of a checkpoint.

    Raises:
        ModelLoadError: the file cannot be read, or is of a family that is not.
    """
    entries: dict[str, TensorEntry] = {}
    for source in mapped(read_gguf(path)):
        kind = source.tensor.kind
        if len(source.shape) <= 1 and kind.name not in FLOATS:
            kind = block_type(0)  # vectors become numbers when they are read
        entries[source.name] = TensorEntry(
            path, source.shape, _ST_NAMES.get(kind.name, "F32"), source=_Values(source)
        )
        base = source.name.removesuffix(".weight")
        layer = source.name.startswith("model.layers.") and not base.endswith(
            ".mlp.gate"
        )  # a router is floats
        if kind.name in KEPT and len(source.shape) == 2 and layer:
            size = source.tensor.row_bytes
            entries[f"{base}.{kind.name.lower()}"] = TensorEntry(
                path, (source.shape[0], size), "U8", source=_Bytes(source)
            )
    return entries


class GgufFormat(CheckpointFormat):
    """Layers of a GGUF file: what `KEPT` names stays in codes, of each layer its own type."""

    bits = None
    marker = ""

    def __init__(self, path: Path) -> None:
        kinds = Counter(t.kind.name for t in read_gguf(path).tensors.values() if len(t.shape) > 1)
        self._name = ", ".join(name for name, _ in kinds.most_common())
        rest = sorted(kinds.keys() - FLOATS.keys() - set(KEPT))
        if rest:
            logger.info("%s: tensors of type %s are read as floats", path, ", ".join(rest))

    @property
    def name(self) -> str:
        return f"GGUF {self._name}"

    def of(self, bases: Sequence[str], names: Collection[str]) -> CheckpointFormat | None:
        for suffix, name in _SUFFIXES.items():
            if all(base + suffix in names for base in bases):
                return KeptFormat(name)
        return None

    def unneeded(self, bases: Sequence[str]) -> set[str]:
        return {base + suffix for base in bases for suffix in (".weight", *_SUFFIXES)}

    def check_scheme(self, scheme: Scheme, name: str | None) -> None:
        if scheme.floats:
            raise ConfigError(f"quantization: {name!r} is not for GGUF files; int8 and int4 round its floats")

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        raise AssertionError("the layers' own formats decide; this one is never asked")

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        raise AssertionError("the layers' own formats decide; this one is never asked")


class KeptFormat(CheckpointFormat):
    """A layer in blocks of 32 whose codes are kept."""

    bits = None

    def __init__(self, kind: str) -> None:
        self._kind: BlockType = next(t for t in map(block_type, (2, 3, 8)) if t.name == kind)
        self._marker = f".{kind.lower()}"

    @property
    def name(self) -> str:
        return self._kind.name

    @property
    def marker(self) -> str:
        return self._marker

    def tensors(self, outputs: int, inputs: int) -> dict[str, RawTensor]:
        if inputs % BLOCK:
            raise ModelLoadError(
                f"{inputs} inputs are not a multiple of {BLOCK}, the block of {self._kind.name}"
            )
        size = inputs // BLOCK * self._kind.size
        return {self._marker: RawTensor((outputs, size), torch.uint8, ("U8",))}

    def decode(self, raw: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return codes_of(raw[self._marker], self._kind)

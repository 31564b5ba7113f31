"""Tensors of a checkpoint of bitsandbytes in the form that `quantization.bitsandbytes` reads.

A layer of four bits is these tensors: ``weight`` (its codes, two in a byte, without a shape), ``weight.absmax``,
``weight.quant_map`` (what the codes stand for), ``weight.quant_state.bitsandbytes__nf4`` (JSON as bytes), and, if the
magnitudes are quantised, too, ``weight.nested_absmax`` and ``weight.nested_quant_map``. They become two tensors with
shapes, codes and scales; or one of numbers. Nothing is read before somebody asks for rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry, read_rows
from draftwise.quantization.bitsandbytes import BLOCK, CODES, SCALES, VALUES

_STATE = ".weight.quant_state.bitsandbytes__"
_PARTS = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


@dataclass(frozen=True, eq=False)
class _Layer:
    """``base``: its name without suffix; ``nested``: block and offset of quantised magnitudes."""

    entries: Mapping[str, TensorEntry]
    base: str
    shape: tuple[int, int]
    block: int
    nested: tuple[int, float] | None

    def read(self, part: str, start: int, end: int) -> Tensor:
        name = f"{self.base}.weight{part}"
        return read_rows(self.entries[name], name, start, end)

    def bytes(self, start: int, end: int) -> Tensor:
        """``[start:end]`` of the codes, two in each: [n] uint8."""
        return self.read("", start, end).flatten()

    def magnitudes(self, start: int, end: int) -> Tensor:
        """``[start:end]`` of the blocks' largest magnitudes, float32."""
        own = self.read(".absmax", start, end).flatten()
        if self.nested is None:
            return own.float()
        block, offset = self.nested
        table = self.whole(".nested_quant_map")
        first, last = start // block, -(-end // block)
        outer = self.read(".nested_absmax", first, last).flatten().float()
        of = torch.arange(start, end) // block - first
        return table[own.long()] * outer[of] + offset

    def whole(self, part: str) -> Tensor:
        name = f"{self.base}.weight{part}"
        return self.read(part, 0, self.entries[name].shape[0]).flatten().float()


@dataclass(frozen=True)
class _Codes:
    layer: _Layer

    def rows(self, start: int, end: int) -> Tensor:
        size = self.layer.shape[1] // 2
        return self.layer.bytes(start * size, end * size).view(end - start, size)


@dataclass(frozen=True)
class _Scales:
    layer: _Layer

    def rows(self, start: int, end: int) -> Tensor:
        count = self.layer.shape[1] // self.layer.block
        return self.layer.magnitudes(start * count, end * count).view(end - start, count)


@dataclass(frozen=True)
class _Values:
    layer: _Layer

    def rows(self, start: int, end: int) -> Tensor:
        """Row by row in one line, blocks and bytes may begin anywhere. Example: rows of 5, row 1 is numbers 5 to 9: the
        second half of byte 2 to both halves of byte 4."""
        layer, inputs = self.layer, self.layer.shape[1]
        first, last = start * inputs, end * inputs
        pairs = layer.bytes(first // 2, -(-last // 2))
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()
        codes = codes[first % 2 : first % 2 + last - first]
        low = first // layer.block
        magnitudes = layer.magnitudes(low, -(-last // layer.block))
        of = torch.arange(first, last) // layer.block - low
        return (layer.whole(".quant_map")[codes.long()] * magnitudes[of]).view(end - start, inputs)


def bitsandbytes_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, with codes and scales (or numbers) in the place of what bitsandbytes keeps of a layer of four bits.

    Raises:
        ModelLoadError: what is said about a layer makes no sense, or its tensors are missing.
    """
    found = dict(entries)
    for name, entry in entries.items():
        base, mark, kind = name.partition(_STATE)
        if not mark:
            continue
        layer = _layer(entries, name, base)
        for part in _PARTS:
            found.pop(f"{base}.weight{part}", None)
        del found[name]
        outputs, inputs = layer.shape
        place = replace(entry, stored=None)
        if kind == "nf4" and layer.block == BLOCK and inputs % BLOCK == 0:
            found[base + CODES] = replace(
                place, shape=(outputs, inputs // 2), dtype="U8", source=_Codes(layer)
            )
            shape = (outputs, inputs // BLOCK)
            found[base + SCALES] = replace(place, shape=shape, dtype="F32", source=_Scales(layer))
        else:
            found[base + VALUES] = replace(place, shape=layer.shape, dtype="F32", source=_Values(layer))
    return found


def _layer(entries: Mapping[str, TensorEntry], name: str, base: str) -> _Layer:
    try:
        text = bytes(read_rows(entries[name], name, 0, entries[name].shape[0]).tolist())
        state: Any = json.loads(text)
        outputs, inputs = (int(size) for size in state["shape"])
        block = int(state["blocksize"])
        nested = None
        if "nested_blocksize" in state:
            nested = int(state["nested_blocksize"]), float(state["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{name} says nothing of a layer: {type(error).__name__}: {error}") from error
    numbers = outputs * inputs
    blocks = -(-numbers // block) if block > 0 else 0
    wanted = {"": -(-numbers // 2), ".absmax": blocks, ".quant_map": 16}
    if nested is not None:
        wanted |= {
            ".nested_absmax": -(-blocks // nested[0]) if nested[0] > 0 else 0,
            ".nested_quant_map": 256,
        }
    for part, count in wanted.items():
        part_name = f"{base}.weight{part}"
        if part_name not in entries:
            raise ModelLoadError(f"tensors are missing: {part_name}")
        shape = entries[part_name].shape
        if (
            min(outputs, inputs, count) <= 0
            or not shape
            or shape[0] != count
            or max(shape[1:], default=1) != 1
        ):
            raise ModelLoadError(f"{part_name} has shape {list(shape)}, expected {count} numbers")
    if entries[f"{base}.weight"].dtype != "U8":
        kind = entries[f"{base}.weight"].dtype
        raise ModelLoadError(
            f"{base}.weight: codes of four bits stored as {kind} are not supported (only U8)"
        )
    return _Layer(entries, base, (outputs, inputs), block, nested)

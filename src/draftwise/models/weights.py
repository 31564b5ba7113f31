"""Which tensor of a checkpoint goes where: declared by a model, filled by the loader."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.ranks import Part
from draftwise.models.cuts import Cut, Split, axis_cut, raw_cuts, vocabulary_cut
from draftwise.quantization.checkpoint import CheckpointFormat
from draftwise.quantization.weights import QuantizedWeight, stack_rows

_RELEASED = 32 << 20
"""Bytes filled after which freed memory is given back to the system."""


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other allocators have none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def release_freed_memory() -> None:
    """Give memory that was freed back to the system. glibc keeps pages of freed blocks that lie between others, and
    what is packed lies elsewhere: without this, a checkpoint would stay in memory a second time."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
_LARGE = 256 << 10
_MOST = 32 << 20  # what glibc's own threshold grows to, by what programs free


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's; other allocators have none."""
    try:
        return ctypes.CDLL(None).mallopt if _malloc_trim() is not None else None
    except (AttributeError, OSError, TypeError):
        return None


@contextmanager
def freed_at_once() -> Iterator[None]:
    """While this lasts, memory of 256 KiB and more is given back to the system where it is freed: while a model loads,
    floats of a layer come and go. Afterwards it is kept for the next who asks, as glibc does by itself."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MOST)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MOST)


class Freed:
    """Counts what is let go of, and gives it back to the system now and then."""

    def __init__(self) -> None:
        self._bytes = 0

    def count(self, tensor: Tensor) -> None:
        """``tensor`` is let go of, or was a moment ago."""
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > _RELEASED:
            self._bytes = 0
            release_freed_memory()


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The place of one checkpoint tensor: ``dest`` has its shape and is a view of a (maybe packed) parameter."""

    dest: Tensor
    stored: tuple[str, ...] | None = None  # dtypes of the file that are taken; None: floats


class QuantizedLinear:
    """A linear layer that the checkpoint has quantised: raw tensors to be filled, of parts stacked row by row."""

    def __init__(
        self,
        layout: CheckpointFormat,
        inputs: int,
        parts: list[tuple[int, dict[str, Tensor]]],
        first_group: int = 0,
    ) -> None:
        """``first_group``: of a rank's part of the inputs, as the checkpoint counts groups."""
        self.dynamic = layout.dynamic
        self._layout = layout
        self._inputs = inputs
        self._parts = parts  # (outputs, suffix -> tensor)
        self._first_group = first_group

    def weight(self) -> QuantizedWeight:
        """Codes and scales, once the tensors are filled; asked for once, for each part's tensors are let go as soon as
        they are decoded. Raises ModelLoadError if they cannot be used."""
        found = []
        while self._parts:
            outputs, raw = self._parts.pop(0)
            for suffix in raw:
                if suffix.endswith("g_idx"):  # the group of each input: the rank's are counted from 0
                    raw[suffix].sub_(self._first_group)
            found.append(self._layout.decode(raw, outputs, self._inputs))
            raw.clear()
        return stack_rows(found)


class WeightPlan:
    """Collects a model's parameters. Each starts uninitialised; the loader fills every target exactly once.

    Example: q, k and v of 8, 4 and 4 rows packed into one parameter::

        packed = plan.packed([("q.weight", 8), ("k.weight", 4), ("v.weight", 4)], 16)   # [16, 16]
        # targets: q.weight -> packed[0:8], k.weight -> packed[8:12], v.weight -> packed[12:16]
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        layout: CheckpointFormat | None = None,
        names: Collection[str] = (),
        part: Part | None = None,
    ) -> None:
        """``layout``: how the checkpoint stores quantised layers, ``names``: its tensors; None: it has none. ``part``:
        of whom the parameters are that are declared as divided; None: of one process that has all."""
        self.part = part or Part()
        self.cuts: dict[str, Cut] = {}  # of tensors of which a part is read
        self._layout = layout
        self._names = names
        self._parts: dict[
            int, tuple[object, list[str]]
        ] = {}  # id of a parameter -> itself, its tensors' names
        self._declared: list[str] = []  # names since the last parameter
        self._read: Callable[[Mapping[str, Tensor]], None] | None = None
        self._filled = 0  # bytes since freed memory was last given back
        self.streams = False
        """Set by a model that calls `fill` for each parameter before it uses it; else all are filled beforehand."""
        self.dtype = dtype
        self.device = device
        self.targets: dict[str, WeightTarget] = {}
        self.ignored: set[str] = set()  # names that may be in a checkpoint and are not needed
        self.linears: list[
            tuple[tuple[str, int], ...]
        ] = []  # (name, rows) of float linear layers, as stacked
        self.exact: set[str] = set()  # names of those that are never rounded
        self.num_bytes = 0

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A parameter of its own; ``dtype``: another float type than the model's."""
        value = self._empty(tuple(shape), dtype)
        self._add(name, value)
        self._parameter(value)
        return value

    def divided(self, name: str, shape: Sequence[int], axis: int) -> Tensor:
        """A parameter of its own, of which ranks divide a dimension; ``shape`` is the rank's own."""
        self._cut_axis(name, shape, axis)
        return self.tensor(name, shape)

    def _cut_axis(self, name: str, shape: Sequence[int], axis: int | None) -> None:
        if axis is not None and self.part.size > 1:
            self.cuts[name] = axis_cut(self.part, tuple(shape), axis)

    def skip(self, bases: Sequence[str], rows: int, columns: int) -> None:
        """Linear layers [rows, columns] that another rank has."""
        for base in bases:
            layout = None if self._layout is None else self._layout.of([base], self._names)
            suffixes = (
                {".weight"} if layout is None else {*layout.tensors(rows, columns), *layout.unneeded([""])}
            )
            self.ignored.update(base + suffix for suffix in suffixes)

    def cut(self, name: str, cut: Cut) -> Tensor:
        """A parameter of its own: the rank's part of a tensor."""
        if cut.own_shape != cut.shape:
            self.cuts[name] = cut
        return self.tensor(name, cut.own_shape)

    def table(self, name: str, total: int, hidden: int) -> Tensor:
        """The rank's rows of an embedding or output layer [total, hidden]."""
        return self.cut(name, vocabulary_cut(self.part, total, hidden))

    def stored(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, kind: str, axis: int | None = None
    ) -> Tensor:
        """A parameter of its own in the type that the file has: ``kind`` as safetensors calls it. ``axis``: the
        dimension that ranks divide; ``shape`` is the rank's own."""
        self._cut_axis(name, shape, axis)
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.num_bytes += value.numel() * value.element_size()
        self._add(name, value, (kind,))
        self._parameter(value)
        return value

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._names

    def packed(
        self, parts: Sequence[tuple[str, int]], columns: int | None, split: Split | None = None
    ) -> Tensor:
        """Parameters stacked row by row: ``parts`` are (name, rows); ``columns`` None for vectors (biases). With a
        ``split``, rows and columns are the rank's own."""
        total = sum(rows for _, rows in parts)
        value = self._empty((total,) if columns is None else (total, columns))
        start = 0
        for i, (name, rows) in enumerate(parts):
            self._add(name, value[start : start + rows])
            if split is not None and self.part.size > 1:
                whole, ranges = split.outputs(self.part, i, rows)
                if columns is None:
                    self.cuts[name] = Cut((whole,), (ranges,))
                else:
                    wide, of_columns = split.columns(self.part, columns)
                    self.cuts[name] = Cut((whole, wide), (ranges, of_columns))
            start += rows
        self._parameter(value)
        return value

    def linear(
        self, parts: Sequence[tuple[str, int]], columns: int, split: Split | None = None
    ) -> Tensor | QuantizedLinear:
        """As `packed`, for the weights of a linear layer: quantised if the checkpoint has them so.

        Raises:
            ModelLoadError: Some parts are quantised and some are not, or the format cannot hold such a layer.
        """
        bases = [name.removesuffix(".weight") for name, _ in parts]
        layout = None if self._layout is None else self._layout.of(bases, self._names)
        if self._layout is not None:
            read = {f"{base}.weight" for base in bases} if layout is None else set()
            self.ignored.update(self._layout.unneeded(bases) - read)
        if layout is None:
            self.linears.append(tuple(parts))
            return self.packed(parts, columns, split)
        found, first_group = [], 0
        host = "meta" if self.device.type == "meta" else "cpu"  # codes are decoded there
        for i, (base, (_, rows)) in enumerate(zip(bases, parts, strict=True)):
            raw = {}
            for suffix, tensor in layout.tensors(rows, columns).items():
                raw[suffix] = torch.empty(tensor.shape, dtype=tensor.dtype, device=host)
                self.num_bytes += raw[suffix].numel() * raw[suffix].element_size()
                self._add(base + suffix, raw[suffix], tensor.stored)
            if split is not None and self.part.size > 1:
                first_group = self._cut_raw(layout, base, (rows, columns), split, i)
            found.append((rows, raw))
        value = QuantizedLinear(layout, columns, found, first_group)
        self._parameter(value)
        return value

    def _cut_raw(
        self, layout: CheckpointFormat, base: str, own: tuple[int, int], split: Split, index: int
    ) -> int:
        """Note which part of a quantised layer's tensors a rank reads (`raw_cuts`).

        Returns:
            The first group of inputs that is read.
        """
        outputs, rows = split.outputs(self.part, index, own[0])
        inputs, columns = split.columns(self.part, own[1])
        if split.inputs and (layout.pads(inputs) or layout.pads(own[1])):
            raise ModelLoadError(
                f"{base}: {layout.name} fills up the scales of {inputs} inputs, which ranks cannot divide"
            )
        whole, mine = (_shapes(layout, *sizes) for sizes in ((outputs, inputs), own))
        size, ranges = (inputs, columns) if split.inputs else (outputs, rows)
        cuts, first_group = raw_cuts(whole, mine, size, ranges, split.inputs, base)
        self.cuts.update({base + suffix: cut for suffix, cut in cuts.items()})
        return first_group

    def fill_with(self, read: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Sets the reader: ``read`` gets name -> tensor to fill. Fills everything now unless the model streams."""
        self._read = read
        if not self.streams:
            self._fill(list(self.targets))
            self._parts.clear()

    def fill(self, parameter: Tensor | QuantizedLinear) -> None:
        """Fill a parameter that `tensor`, `packed` or `linear` returned, if it is not filled yet, and let go of it.

        A model that packs one layer after the other fills just before packing, so that no more than one layer is in
        memory as the checkpoint has it.
        """
        _, names = self._parts.pop(id(parameter), (None, []))
        self._fill(names)

    def _fill(self, names: Sequence[str]) -> None:
        assert self._read is not None, "filled before the loader has checked the checkpoint"
        if not names:
            return
        places = {name: self.targets.pop(name).dest for name in names}
        self._read(places)
        self._filled += sum(place.numel() * place.element_size() for place in places.values())
        if self._filled > _RELEASED:
            self._filled = 0
            release_freed_memory()

    def _parameter(self, value: object) -> None:
        self._parts[id(value)] = (value, self._declared)
        self._declared = []

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        value = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_bytes += value.numel() * value.element_size()
        return value

    def _add(self, name: str, dest: Tensor, stored: tuple[str, ...] | None = None) -> None:
        assert name not in self.targets, f"{name} is declared twice"
        self.targets[name] = WeightTarget(dest, stored)
        self._declared.append(name)


def same_shape(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """One number is one, with dimensions or without."""
    return stored == wanted or prod(stored) == prod(wanted) == 1


def _shapes(layout: CheckpointFormat, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {suffix: tensor.shape for suffix, tensor in layout.tensors(outputs, inputs).items()}

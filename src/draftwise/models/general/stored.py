"""Linear layers of a Transformers model whose weights stay in the checkpoint until kernels pack them.

A module is packed from the file as soon as the model is built, and so the model never has these weights as floats. What
is put together from a watched model stacks layers (q, k and v) and puts rows into another order: it reads them again,
under the name that the module has in the checkpoint, and packs them as they shall be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import torch
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.models.checkpoint import TensorEntry, copy_tensors, read_part, read_rows
from draftwise.models.cuts import Cut, Ranges, between, ranges_of, raw_cuts
from draftwise.models.general.modules import PackedLinear
from draftwise.models.progress import count
from draftwise.quantization.checkpoint import CheckpointFormat, RawTensor
from draftwise.quantization.weights import QuantizedWeight, stack_rows

_WINDOW = 2 << 20
"""Numbers of a layer that are read at a time."""


@dataclass(frozen=True, eq=False)
class StoredLayer(ABC):
    """The weight [outputs, inputs] of a linear layer in a checkpoint, under ``base`` and some suffix. ``dtype``: of its
    floats. A part of a layer is a layer, too: ``of`` is then the whole, and ``own`` what is read of it."""

    base: str
    outputs: int
    inputs: int
    entries: Mapping[str, TensorEntry]
    dtype: torch.dtype
    of: StoredLayer | None = field(default=None, kw_only=True)
    own: Cut | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Layers of one kind can be stacked to one."""

    @property
    def place(self) -> str:
        """Its name in the checkpoint, by which no other layer goes."""
        return self.base

    def part(self, rows: Ranges | None = None, columns: Ranges | None = None) -> Self:
        """These outputs, or these inputs, of a whole layer; nothing else of it is read.

        Raises:
            ModelLoadError: the checkpoint does not keep them so that they can be read alone.
        """
        assert self.of is None and (rows is None or columns is None)
        cut = Cut((self.outputs, self.inputs), (rows or ((0, self.outputs),), columns or ((0, self.inputs),)))
        outputs, inputs = cut.own_shape
        return replace(self._cut(cut), outputs=outputs, inputs=inputs, of=self, own=cut)

    @property
    def rounds_rows(self) -> bool:
        """Whether the checkpoint's form has its rows rounded."""
        return False

    @abstractmethod
    def _cut(self, cut: Cut) -> Self:
        """The layer with the tensors of a part of it; its sizes are set by the caller."""

    @abstractmethod
    def floats(self) -> Tensor:
        """Read it: [outputs, inputs]. Raises ModelLoadError if it cannot be."""

    @abstractmethod
    def pack(
        self,
        ops: Ops,
        others: Sequence[tuple[StoredLayer, Tensor | None]],
        bias: Tensor | None,
        *,
        paired: bool,
        expert: bool = False,
    ) -> Linear:
        """Pack layers of this one's kind as one, see `pack_stored`."""


@dataclass(frozen=True, eq=False)
class QuantizedLayer(StoredLayer):
    """One that the checkpoint has quantised."""

    form: CheckpointFormat
    first_group: int = 0  # of a part of the inputs, as the checkpoint counts groups

    @property
    def kind(self) -> Hashable:
        return self.form.name, self.form.dynamic

    @property
    def rounds_rows(self) -> bool:
        return self.form.dynamic

    def check(self) -> list[str]:
        """Names of tensors that are missing.

        Raises:
            ModelLoadError: one has another shape or type.
        """
        missing = []
        for suffix, tensor in self._tensors().items():
            name = self.base + suffix
            entry = self.entries.get(name)
            if entry is None:
                missing.append(name)
            elif entry.shape != tensor.shape and not prod(entry.shape) == prod(tensor.shape) == 1:
                raise ModelLoadError(f"{name} has shape {list(entry.shape)}, expected {list(tensor.shape)}")
            elif entry.dtype not in tensor.stored:
                raise ModelLoadError(
                    f"{name} is stored as {entry.dtype}, expected {' or '.join(tensor.stored)}"
                )
        return missing

    def read(self) -> QuantizedWeight:
        """Its codes. Raises ModelLoadError if there are none that fit together."""
        raw = {s: torch.empty(t.shape, dtype=t.dtype) for s, t in self._tensors().items()}
        copy_tensors(self.entries, {self.base + suffix: value for suffix, value in raw.items()})
        for suffix, value in raw.items():
            if suffix.endswith("g_idx"):  # the group of each input: the part's are counted from 0
                value.sub_(self.first_group)
        try:
            return self.form.decode(raw, self.outputs, self.inputs)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.base}: {error}") from error

    def _tensors(self) -> dict[str, RawTensor]:
        try:
            return self.form.tensors(self.outputs, self.inputs)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.base}: {error}") from error

    def _cut(self, cut: Cut) -> Self:
        by_inputs = cut.own_shape[1] != self.inputs
        mine = replace(self, outputs=cut.own_shape[0], inputs=cut.own_shape[1])
        whole, own = ({s: t.shape for s, t in layer._tensors().items()} for layer in (self, mine))
        size = self.inputs if by_inputs else self.outputs
        cuts, first_group = raw_cuts(whole, own, size, cut.ranges[by_inputs], by_inputs, self.base)
        entries = {self.base + suffix: self.entries[self.base + suffix] for suffix in whole}
        for suffix, each in cuts.items():
            entry = entries[self.base + suffix]
            entries[self.base + suffix] = replace(entry, shape=each.own_shape, cut=each)
        return replace(self, entries=entries, first_group=first_group)

    def floats(self) -> Tensor:
        return self.read().dequantize(self.dtype)

    def pack(
        self,
        ops: Ops,
        others: Sequence[tuple[StoredLayer, Tensor | None]],
        bias: Tensor | None,
        *,
        paired: bool,
        expert: bool = False,
    ) -> Linear:
        known: dict[StoredLayer, QuantizedWeight] = {}
        parts = []
        for layer, rows in others:
            assert isinstance(layer, QuantizedLayer) and layer.kind == self.kind
            if layer not in known:
                known[layer] = layer.read()
            parts.append(known[layer] if rows is None else known[layer].in_order(rows))
        known.clear()
        weight = stack_rows(parts)
        del parts
        if expert and weight.is_wide and not ops.wide_experts:
            weight = QuantizedWeight.of_values(weight.dequantize())
        return ops.pack_quantized(weight, bias, dynamic=self.form.dynamic, paired=paired)


@dataclass(frozen=True, eq=False)
class FloatLayer(StoredLayer):
    """One of floats, which kernels round as they pack it. ``noted``: gets the names of tensors that were packed."""

    noted: set[str] | None = None

    @property
    def kind(self) -> Hashable:
        return "floats"

    def _cut(self, cut: Cut) -> Self:
        return self

    def floats(self) -> Tensor:
        if self.own is not None:
            return self.rows(0, self.outputs)
        value = torch.empty((self.outputs, self.inputs), dtype=self.dtype)
        copy_tensors(self.entries, {f"{self.base}.weight": value})
        return value

    def rows(self, start: int, end: int) -> Tensor:
        """Some of its rows, [end - start, inputs]. Raises ModelLoadError if they cannot be read."""
        if self.own is None:
            name = f"{self.base}.weight"
            return read_rows(self.entries[name], name, start, end).to(self.dtype)
        return self._read(Cut(self.own.shape, (between(self.own.ranges[0], start, end), self.own.ranges[1])))

    def _read(self, cut: Cut) -> Tensor:
        """A part of the whole layer."""
        value = torch.empty(cut.own_shape, dtype=self.dtype)
        name = f"{self.base}.weight"
        read_part(self.entries[name], name, cut, value)
        return value

    def pack(
        self,
        ops: Ops,
        others: Sequence[tuple[StoredLayer, Tensor | None]],
        bias: Tensor | None,
        *,
        paired: bool,
        expert: bool = False,
    ) -> Linear:
        parts: list[tuple[FloatLayer, Tensor | None]] = []
        for layer, rows in others:
            assert isinstance(layer, FloatLayer)
            if layer.noted is not None:
                layer.noted.add(f"{layer.base}.weight")
            parts.append((layer, rows))
        shape = (sum(layer.outputs if rows is None else len(rows) for layer, rows in parts), self.inputs)
        packed = ops.pack_read(_Below(parts), shape, bias, paired=paired)
        count(prod(shape))
        return packed


class _Below:
    """Rows of layers below each other, as `kernels.base.Ops.pack_read` asks for them. More are read than are asked for,
    because a file is opened for each piece: what is kept of them answers the next ones."""

    def __init__(self, parts: Sequence[tuple[FloatLayer, Tensor | None]]) -> None:
        sizes = [layer.outputs if rows is None else len(rows) for layer, rows in parts]
        self._parts = parts
        self._starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._window: tuple[int, Tensor] | None = None  # first row, rows

    def __call__(self, start: int, end: int) -> Tensor:
        """``[start:end]`` of the rows."""
        if self._window is not None:
            first, rows = self._window
            if first <= start and end <= first + len(rows):
                return rows[start - first : end - first]
            del rows
        self._window = None
        last = max(end, min(start + _WINDOW // self._parts[0][0].inputs, self._starts[-1]))
        pieces = []
        for (layer, order), first, behind in zip(self._parts, self._starts, self._starts[1:], strict=False):
            low, high = max(start, first) - first, min(last, behind) - first
            if low < high:
                pieces.append(_rows_of(layer, order, low, high))
        window = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self._window = start, window
        return window[: end - start]


def _rows_of(layer: FloatLayer, order: Tensor | None, low: int, high: int) -> Tensor:
    """Rows ``order[low:high]`` of a layer. Example: of (4, 0, 5, 1, 6, 2), 0 to 2 are 4 and 0: rows 0 to 5 are read."""
    if order is None:
        return layer.rows(low, high)
    wanted = order[low:high]
    first, behind = int(wanted.min()), int(wanted.max()) + 1
    if behind - first > 4 * len(wanted):  # the end of one run and the start of another, say
        middle = (low + high) // 2
        return torch.cat((_rows_of(layer, order, low, middle), _rows_of(layer, order, middle, high)))
    return layer.rows(first, behind)[wanted - first]


@dataclass(frozen=True, eq=False)
class TurnedLayer(FloatLayer):
    """One that is stored as [inputs, outputs]."""

    def floats(self) -> Tensor:
        return self.rows(0, self.outputs)

    def rows(self, start: int, end: int) -> Tensor:
        ranges = ((0, self.outputs),), ((0, self.inputs),)
        cut = self.own or Cut((self.outputs, self.inputs), ranges)
        turned = Cut(cut.shape[::-1], (cut.ranges[1], between(cut.ranges[0], start, end)))
        return self._read(turned).t().contiguous()


@dataclass(frozen=True, eq=False)
class MatrixOfStack(FloatLayer):
    """One matrix of a stack [E, outputs, inputs], which is the tensor ``base``."""

    index: int = 0

    @property
    def place(self) -> str:
        return f"{self.base}[{self.index}]"

    def floats(self) -> Tensor:
        return self.rows(0, self.outputs)

    def rows(self, start: int, end: int) -> Tensor:
        if self.own is not None:
            return super().rows(start, end)
        return read_rows(self.entries[self.base], self.base, start, end, of=self.index).to(self.dtype)

    def _read(self, cut: Cut) -> Tensor:
        value = torch.empty(cut.own_shape, dtype=self.dtype)
        entry = self.entries[self.base]
        one = ((self.index, self.index + 1),)
        read_part(entry, self.base, Cut(entry.shape, (one, *cut.ranges)), value[None])
        return value


def some_rows(layer: StoredLayer, rows: Tensor) -> tuple[StoredLayer, Tensor | None]:
    """The part of a layer that has ``rows`` (int64, in any order), and their places in it; None: all, as they are.

    Example: rows (9, 3, 4) are places (2, 0, 1) of the part of rows 3, 4 and 9.
    """
    ordered = torch.unique(rows)
    part = layer.part(ranges_of(ordered))
    places = torch.searchsorted(ordered, rows)
    return part, None if torch.equal(places, torch.arange(len(ordered))) else places


def pack_stored(
    ops: Ops,
    layers: Sequence[tuple[StoredLayer, Tensor | None]],
    bias: Tensor | None = None,
    *,
    paired: bool = False,
    expert: bool = False,
) -> Linear:
    """Read layers of one kind and pack them as one, their rows below each other.

    Args:
        layers: each with its rows that are wanted, int64, in order; None: all, as they are.
        bias: of the rows that are wanted.
        paired: `Ops.pack_gate_up` rather than `Ops.pack_linear`.
        expert: of a mixture. Without `Ops.wide_experts` layers that are held as two become floats.

    Raises:
        ModelLoadError: one of them cannot be read.
    """
    return layers[0][0].pack(ops, layers, bias, paired=paired, expert=expert)


class StoredLinear(PackedLinear):
    """A module whose weight is packed and can be read from the checkpoint again.

    ``was_read``: the model's own code asked for ``weight``, which is read from the file each time: it wants a module
    that has it.
    """

    def __init__(self, ops: Ops, layer: StoredLayer, bias: Tensor | None, *, is_head: bool = False) -> None:
        """``bias``: [outputs]. ``is_head``: the output layer, of floats and without a bias, of which formats with few
        bits keep more."""
        super().__init__(ops, self._pack(ops, layer, bias, is_head), layer.inputs, layer.outputs)
        self.layer = layer
        self.bias = bias
        self.was_read = False

    def _pack(self, ops: Ops, layer: StoredLayer, bias: Tensor | None, is_head: bool) -> Linear:
        if is_head:
            return ops.pack_head(layer.floats().to(ops.device))
        return pack_stored(ops, [(layer, None)], bias)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs] in the model's dtype."""
        self.was_read = True
        return self._floats()

    def plain(self) -> nn.Linear:
        """The module with its weight in memory."""
        module = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        module.weight = nn.Parameter(self._floats(), requires_grad=False)
        if self.bias is not None:
            module.bias = nn.Parameter(self.bias, requires_grad=False)
        return module

    def release(self) -> None:
        """Free the packed weight, because the module is not called any more."""
        del self.packed

    def _floats(self) -> Tensor:
        return self.layer.floats().to(self._ops.device)

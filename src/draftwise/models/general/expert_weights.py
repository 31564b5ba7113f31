"""The weights of a mixture's experts: where they are, in which form, and which part of them a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.kernels.ranks import Part
from draftwise.kernels.routing import Activation
from draftwise.models.general.deferred import LayerRows, numbers, part, rows_of
from draftwise.models.general.imagined_numbers import imagined
from draftwise.models.general.stored import QuantizedLayer, pack_stored, some_rows
from draftwise.models.mlp import expert_of_another_rank

UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class Form:
    """How a module keeps its weights, and what it does with them."""

    activation: Activation
    in_turns: bool  # gate 0, up 0, gate 1, up 1, ...; else all gates, then all ups
    turned: bool  # matrices are [inputs, outputs]

    def gate_up(self, module: nn.Module, e: int) -> tuple[Tensor, Tensor | None]:
        """Expert ``e``: weight [2 * I, H], gates first, and bias [2 * I]."""
        weight, bias = _part(_tensors(module), "gate_up_proj", e, self.turned)
        if self.in_turns:
            weight = torch.cat((weight[0::2], weight[1::2]))
            bias = None if bias is None else torch.cat((bias[0::2], bias[1::2]))
        return weight, bias

    def down(self, module: nn.Module, e: int) -> tuple[Tensor, Tensor | None]:
        """Expert ``e``: weight [H, I] and bias [H]."""
        return _part(_tensors(module), "down_proj", e, self.turned)


@dataclass(frozen=True)
class Share:
    """What a rank has of the experts: some of them whole (``by_rank``), or a part of each."""

    part: Part = field(default_factory=Part)
    by_rank: bool = False

    def has(self, e: int, count: int) -> bool:
        """Whether any of expert ``e`` of ``count`` is here. Example: 10 experts by rank on 4 ranks: 3, 3, 3 and 1."""
        return not self.by_rank or e // -(-count // self.part.size) == self.part.rank


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Stacks by their names, in memory or `Deferred`; biases are in memory.

    ``place``: a name for made-up numbers, if a rank's model computes with such; ``made_up``: these are meant.
    """

    stacks: Mapping[str, Tensor]
    form: Form
    place: str | None = None
    share: Share = field(default_factory=Share)
    made_up: bool = False

    @classmethod
    def of(cls, module: nn.Module, form: Form) -> Self:
        """Those of a module."""
        return cls(_tensors(module), form)

    @property
    def count(self) -> int:
        """Experts."""
        return len(self.stacks[DOWN])

    @property
    def inner(self) -> int:
        """I of a whole expert."""
        return self.stacks[DOWN].shape[1 if self.form.turned else 2]

    @property
    def few_bits(self) -> bool:
        """Whether the checkpoint has them quantised."""
        found = (rows_of(self._matrix(name, 0)[0]) for name in (UP, DOWN))
        return any(rows is not None and isinstance(rows[0][0], QuantizedLayer) for rows in found)

    def has_parts(self, part: Part) -> bool:
        """Whether each expert can be divided evenly, and be read so."""
        if self.inner % part.size:
            return False
        own = self.inner // part.size
        rows = rows_of(self._matrix(DOWN, 0)[0])
        try:
            for layer, _ in rows or ():
                layer.part(columns=((part.rank * own, (part.rank + 1) * own),))
        except ModelLoadError:  # groups go over the border
            return False
        return True

    def of_rank(self, part: Part, *, by_rank: bool) -> Self:
        """A rank's."""
        return replace(self, share=Share(part, by_rank))

    def as_imagined(self) -> Self:
        """The made-up ones, if there are any."""
        return replace(self, made_up=self.place is not None)

    def gate_up(self, e: int) -> tuple[Tensor, Tensor | None]:
        """Expert ``e``, whole: weight [2 * I, H], gates first, and bias."""
        weight, bias = self._matrix(UP, e)
        if self.form.in_turns:
            order = _gates_first(weight.shape[0])
            weight, bias = numbers(weight)[order], None if bias is None else bias[order]
        return numbers(weight), bias

    def down(self, e: int) -> tuple[Tensor, Tensor | None]:
        """Expert ``e``, whole: weight [H, I] and bias."""
        weight, bias = self._matrix(DOWN, e)
        return numbers(weight), bias

    def packed(self, ops: Ops, e: int) -> tuple[Linear, Linear]:
        """Gate and up, and down, of expert ``e``, or what the rank has of it.

        Raises:
            ModelLoadError: it cannot be read.
        """
        share, (up, up_bias), (down, down_bias) = self.share, self._matrix(UP, e), self._matrix(DOWN, e)
        if not share.has(e, self.count):
            return expert_of_another_rank(ops, down.shape[0])
        inner, columns = down.shape[1], None
        order = _gates_first(2 * inner) if self.form.in_turns else None
        if share.part.size > 1 and not share.by_rank:
            own, rank = inner // share.part.size, share.part.rank
            columns = rank * own, (rank + 1) * own
            all_rows = torch.arange(2 * inner) if order is None else order
            order = torch.cat((all_rows[slice(*columns)], all_rows[inner:][slice(*columns)]))
            down_bias = None if rank else down_bias  # it is in the sum once
        return (
            _pack(ops, up, up_bias, order, None, paired=True, alone=columns is not None),
            _pack(ops, down, down_bias, None, columns, paired=False, alone=True),
        )

    def _matrix(self, name: str, e: int) -> tuple[Tensor, Tensor | None]:
        """[outputs, inputs], maybe `Deferred`, and bias [outputs]."""
        if not self.made_up:
            return _part(self.stacks, name, e, self.form.turned)
        stack, bias = self.stacks[name], self.stacks.get(f"{name}_bias")
        outputs, inputs = stack.shape[1:]
        weight = imagined(f"{self.place}.{name}[{e}]", outputs, inputs, stack.dtype)
        return weight.t() if self.form.turned else weight, None if bias is None else bias[e]


def _pack(
    ops: Ops,
    matrix: Tensor,
    bias: Tensor | None,
    order: Tensor | None,
    columns: tuple[int, int] | None,
    *,
    paired: bool,
    alone: bool,
) -> Linear:
    """``matrix`` [outputs, inputs]: its rows in ``order`` (None: as they are), of these the ``columns`` (start, end).
    ``alone``: of rows that are read nothing else is."""
    if bias is not None:
        bias = (bias if order is None else bias[order]).to(device=ops.device, dtype=ops.dtype)
    rows = rows_of(matrix)
    if rows is not None and len({layer.kind for layer, _ in rows}) == 1:
        found = rows if order is None else _taken(rows, order, alone=alone)
        if found is not None:
            if columns is not None:
                found = [(layer.part(columns=(columns,)), own) for layer, own in found]
            return pack_stored(ops, found, bias, paired=paired, expert=True)
    whole = numbers(matrix).to(device=ops.device, dtype=ops.dtype)
    whole = whole if order is None else whole[order]
    whole = (whole if columns is None else whole[:, slice(*columns)]).contiguous()
    return ops.pack_gate_up(whole, bias) if paired else ops.pack_linear(whole, bias)


def _gates_first(count: int) -> Tensor:
    """Example: 6 -> (0, 2, 4, 1, 3, 5)."""
    return torch.cat((torch.arange(0, count, 2), torch.arange(1, count, 2)))


def _taken(rows: LayerRows, order: Tensor, *, alone: bool) -> LayerRows | None:
    """Those in ``order`` of rows that stand below each other; ``alone``: as layers of which nothing else is read.
    None: they change between layers too often.

    Example: two layers of 4 rows and order (2, 3, 6, 7): rows 2 and 3 of either.
    """
    sizes = torch.tensor([layer.outputs if own is None else len(own) for layer, own in rows])
    ends = sizes.cumsum(0)
    layers = torch.bucketize(order, ends, right=True)
    which, counts = torch.unique_consecutive(layers, return_counts=True)
    if len(which) > len(rows):
        return None
    found: LayerRows = []
    for i, places in zip(which.tolist(), torch.split(order, counts.tolist()), strict=True):
        layer, own = rows[i]
        places = places - (ends[i] - sizes[i])
        places = places if own is None else own[places]
        found.append(some_rows(layer, places) if alone else (layer, places))
    return found


def _part(stacks: Mapping[str, Tensor], name: str, e: int, turned: bool) -> tuple[Tensor, Tensor | None]:
    weight, bias = part(stacks[name], e), stacks.get(f"{name}_bias")
    return weight.t() if turned else weight, None if bias is None else bias[e]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module._parameters.items() if value is not None}


def tensor_of(module: nn.Module, name: str) -> Tensor:
    """A parameter."""
    value = module._parameters[name]
    assert value is not None
    return value.detach()

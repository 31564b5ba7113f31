"""Rules for each operation of torch on the content of traced tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from draftwise.models.general.arithmetic import Arithmetic
from draftwise.models.general.nodes import (
    CannotAssemble,
    Embed,
    Linear,
    Node,
)  # fmt: skip
from draftwise.models.general.rows import Blank, Marks, Rows, Sheet, Stat, Tokens, Unknown, Value
from draftwise.models.general.stored import StoredLayer

_LAYOUT = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "unbind", "alias", "t", "flatten", "narrow", "repeat",
})  # fmt: skip
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "detach", "lift_fresh", "to", "_conj", "dropout"})
_FUNCTIONS = frozenset({"silu", "relu", "tanh", "sigmoid"})


_LOOKUPS = {"embedding": 1, "index": 1, "index_select": 2}  # where the ids stand
_FEW = 16  # nodes and constants that something unknown may depend on to be told apart
_SMALL = 4096  # numbers of a constant that may be one of routing


class Rules(Arithmetic):
    """``positions`` [T]: those of the rows. ``widths``: of linear layers whose results are kept as numbers."""

    def __init__(self, positions: Tensor, widths: frozenset[int] = frozenset()) -> None:
        super().__init__(positions.shape[0])
        self._values: Any = WeakTensorKeyDictionary()
        self._positions = positions.cpu()
        self._widths = widths
        self.numbers: dict[Linear, Tensor] = {}  # [T, width] float32

    def put(self, tensor: Tensor, value: Value) -> None:
        self._values[tensor] = value

    def held(self, tensor: Tensor) -> Value | None:
        """The content of a value; None if it depends on no token."""
        value = self._get(tensor)
        return self._squared(value) if isinstance(value, Stat) and value.step == "square" else value

    def _get(self, tensor: Tensor) -> Value | None:
        """As `held`, squares as such. What was filled is what it was filled with."""
        value: Value | None = self._values.get(tensor)
        if isinstance(value, Blank) and value.sheet.full:
            whole, places = value.sheet.rows(self), value.places
            return whole.like([None if part is None else part[places] for part in whole.parts])
        return value

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """``func(*args, **kwargs)`` gave ``out``."""
        name = func._schema.name.split("::")[-1]
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not any(x in self._values for x in inputs):
            if name in _LOOKUPS and isinstance(out, Tensor):
                ids = args[_LOOKUPS[name]]
                ids = ids[0] if isinstance(ids, list | tuple) and len(ids) == 1 else ids
                self._embed_positions(args[0], ids, out)
            return
        try:
            found = self._rule(name, func, args, kwargs, out)
        except CannotAssemble as error:
            found = self._lost(str(error), tree_flatten((args, kwargs))[0])
        outputs = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        if isinstance(found, Rows):
            self._keep(found, outputs[0])
        values = found if isinstance(found, list) else [found] * len(outputs)
        for tensor, value in zip(outputs, values, strict=True):
            self.put(tensor, value)

    def _rule(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Value | list[Value]:
        name = name.removesuffix("_") if not name.startswith("_") else name
        values = [self._get(x) if isinstance(x, Tensor) else None for x in args]
        for value in self._all(args):
            if isinstance(value, Unknown):
                raise CannotAssemble(value.why)
        if isinstance(out, Tensor) and out.dtype is torch.bool and self._of_tokens(args):
            return Marks()
        if name not in ("mean", "add", "mul"):  # what is squared for a norm may be squared for its own sake
            values = [self._squared(v) if isinstance(v, Stat) and v.step == "square" else v for v in values]
        first: Value | None = values[0] if values else None
        if name in _COPIES and first is not None:
            return first
        if name in _LAYOUT and isinstance(first, Rows):
            return self._layout(first, func, args, kwargs)
        if name in _LAYOUT and isinstance(first, Blank):
            return Blank(first.sheet, func(first.places, *args[1:], **kwargs))
        if name in _LAYOUT and isinstance(first, Tokens):
            return first if out.numel() == self._count else Unknown("it picks some of the tokens")
        rule = getattr(self, f"_do_{name}", None)
        if rule is None:
            rule = self._do_function if name in _FUNCTIONS else None
        if rule is None:
            raise CannotAssemble(f"it computes {name}")
        result: Value | list[Value] = rule(name, values, args, kwargs, out)
        return result

    def _lost(self, why: str, inputs: list[Any]) -> Unknown:
        """A value that is computed from ``inputs`` by an unknown operation."""
        of: set[Node] = set()
        constants: dict[int, Tensor | float] = {}
        for each in inputs:
            value = self._get(each) if isinstance(each, Tensor) else None
            if isinstance(value, Unknown):
                of |= value.of
                constants |= {id(constant): constant for constant in value.constants}
            elif isinstance(value, Rows | Stat):
                of.add(value.node if isinstance(value, Rows) else value.rows.node)
            elif isinstance(each, float) or (isinstance(each, Tensor) and each.numel() <= _SMALL):
                constants[id(each)] = each
        return Unknown(why, frozenset(of if len(of) <= _FEW else ()), tuple(constants.values())[-_FEW:])

    def _keep(self, rows: Rows, out: Tensor) -> None:
        """The numbers that a linear layer gave."""
        node, size = rows.node, rows.index.numel()
        if not isinstance(node, Linear) or node.width not in self._widths or node in self.numbers:
            return
        if rows.plain and size == self._count * node.width:
            numbers = torch.empty(size)
            numbers[rows.index.flatten()] = out.detach().float().cpu().flatten()
            self.numbers[node] = numbers.view(self._count, node.width)

    def _of_tokens(self, args: Any) -> bool:
        return all(isinstance(value, Tokens | Marks) for value in self._all(args))

    def _all(self, args: Any) -> list[Value]:
        found = (self._get(x) for x in tree_flatten(args)[0] if isinstance(x, Tensor))
        return [value for value in found if value is not None]

    def _layout(self, rows: Rows, func: Any, args: Any, kwargs: Any) -> Value | list[Value]:
        # in one piece: the tensor may be a copy where the numbers beside it are still a view
        parts = [
            None if part is None else func(part.contiguous(), *args[1:], **kwargs) for part in rows.parts
        ]
        if isinstance(parts[0], Tensor):
            return rows.like(parts)
        assert parts[0] is not None
        return [
            rows.like([None if part is None else part[i] for part in parts]) for i in range(len(parts[0]))
        ]

    def _do_new_empty(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return Blank(Sheet(out.numel()), torch.arange(out.numel()).view(out.shape))

    _do_empty_like = _do_new_empty

    def _do_copy(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        place, rows = values[0], values[1]
        if not isinstance(place, Blank) or not isinstance(rows, Rows):
            raise CannotAssemble("it copies into a result")
        place.sheet.write(place.places, rows)
        return place

    def _do_embedding(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        table = args[0]
        if not isinstance(values[1], Tokens):
            raise CannotAssemble("it looks up something else than tokens")
        return self.fresh(Embed(table.shape[1], table), out.shape, out.ndim - 2)

    def _embed_positions(self, table: Tensor, ids: Any, out: Tensor) -> None:
        """A table of positions, learned or not; the ids may begin anywhere."""
        if not isinstance(ids, Tensor) or ids.numel() != self._count or ids.is_floating_point():
            return
        if table.ndim != 2 or not table.is_floating_point() or out.numel() != self._count * table.shape[1]:
            return
        shift = ids.flatten().cpu() - self._positions
        if bool((shift == shift[0]).all()) and shift[0] >= 0:
            node = Embed(table.shape[1], table[int(shift[0]) :], by_position=True)
            self.put(out, self.fresh(node, out.shape, out.ndim - 2))

    def _do_mm(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._linear(values[0], args[1], values[1], None, out)

    def _do_addmm(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        if values[0] is not None or kwargs:
            raise CannotAssemble("it computes addmm of rows")
        return self._linear(values[1], args[2], values[2], args[0], out)

    def _linear(self, x: Any, matrix: Tensor, known: Any, bias: Tensor | None, out: Tensor) -> Value:
        if not isinstance(x, Rows) or known is not None:
            raise CannotAssemble("it multiplies rows with rows")
        node, at = self.node(x)
        if at != 0 or x.index.ndim != 2 or (bias is not None and bias.ndim != 1):
            raise CannotAssemble("it multiplies with columns for rows")
        return self.fresh(Linear(matrix.shape[1], node, matrix.t(), bias), out.shape, 0)

    def product(self, x: Any, layer: StoredLayer, bias: Tensor | None, out: Tensor) -> Value:
        """``out`` [..., outputs] is what a module makes of ``x`` [..., inputs], its weight in the checkpoint."""
        if not isinstance(x, Rows):
            raise CannotAssemble("it multiplies something else than rows")
        node, at = self.node(x)
        if at == x.index.ndim - 1 or node.width != layer.inputs:
            raise CannotAssemble("it multiplies with columns for rows")
        found = self.fresh(Linear(layer.outputs, node, layer, bias), out.shape, at)
        self._keep(found, out)
        return found

    def _do_masked_fill(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._unmarked(values[0], values[1], args[1])

    def _do_masked_scatter(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._unmarked(values[0], values[1], args[1])

    def _do_index_put(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        if len(args[1]) != 1 or args[1][0].shape != args[0].shape:
            raise CannotAssemble("it changes some of its results")
        return self._unmarked(values[0], self._get(args[1][0]), args[1][0])

    def _do_where(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        if args[2].shape != out.shape:
            raise CannotAssemble("it chooses between results of other shapes")
        return self._unmarked(values[2], values[0], args[0])

    def _unmarked(self, x: Any, marks: Any, mask: Tensor) -> Value:
        """Rows of some tokens are exchanged: of images, say, which are not served. No token of a trace is one."""
        if not isinstance(x, Rows | Tokens) or not isinstance(marks, Marks) or bool(mask.any()):
            raise CannotAssemble("it chooses between results")
        return x

    def _do_cat(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        parts = [self._get(x) for x in args[0]]
        rest = {**kwargs, **({"dim": args[1]} if len(args) > 1 else {})}
        return self._joined(parts, lambda many: torch.cat(list(many), **rest))

    def _do_stack(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        parts = [self._get(x) for x in args[0]]
        rest = {**kwargs, **({"dim": args[1]} if len(args) > 1 else {})}
        return self._joined(parts, lambda many: torch.stack(list(many), **rest))

    def _joined(self, parts: list[Any], join: Callable[[Sequence[Tensor]], Tensor]) -> Value:
        if not all(isinstance(part, Rows) for part in parts):
            raise CannotAssemble("it puts different things side by side")
        return self.joined(parts, join)

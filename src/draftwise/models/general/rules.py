"""What each operation of torch does to what tensors hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from draftwise.models.general.nodes import (
    Add,
    CannotAssemble,
    Centre,
    Embed,
    LayerNorm,
    Linear,
    Mul,
    Node,
    Norm,
    Unary,
)  # fmt: skip
from draftwise.models.general.rows import Blank, Graph, Marks, Rows, Sheet, Stat, Tokens, Unknown, Value, same
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


class Rules(Graph):
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
        """What it holds; None if it depends on no token."""
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
        """What is computed from ``inputs`` in a way that has no name."""
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

    def _squared(self, stat: Stat) -> Rows:
        node, at = self.node(stat.rows)
        return self.fresh(Mul(node.width, node, node), stat.rows.index.shape, at)

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

    def _do__fused_rms_norm(self, name: str, values: Any, args: Any, kwargs: Any, out: Any) -> Value:
        x, shape, weight, eps = args[:4]
        if not isinstance(values[0], Rows) or len(shape) != 1:
            raise CannotAssemble("it normalises over several dimensions")
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rows = self._normed(values[0], Stat(values[0], "rstd", eps))
        return rows if weight is None else self._times(rows, weight)

    def _do_native_layer_norm(self, name: str, values: Any, args: Any, kwargs: Any, out: Any) -> list[Value]:
        x, (_, shape, weight, bias, eps) = values[0], args
        if not isinstance(x, Rows) or len(shape) != 1:
            raise CannotAssemble("it normalises over several dimensions")
        node, at = self.node(x)
        if node.width != shape[0]:
            raise CannotAssemble("it normalises heads with their mean")
        weight, bias = (None if part is None else part.detach().float().cpu() for part in (weight, bias))
        made = LayerNorm(node.width, node, eps, weight, bias)
        return [self.fresh(made, x.index.shape, at), *[Unknown("it uses the deviations of a norm")] * 2]

    def _do_function(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self.unary(values[0], name)

    def _do_gelu(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self.unary(values[0], "gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu")

    def unary(self, x: Any, function: str) -> Value:
        if not isinstance(x, Rows):
            raise CannotAssemble(f"it computes {function} of squares")
        node, at = self.node(x)
        return self.fresh(Unary(node.width, node, function), x.index.shape, at)

    def _do_neg(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._times(values[0], torch.tensor(-1.0))

    def _do_pow(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        x, power = values[0], args[1]
        if isinstance(x, Rows) and power == 2:
            return Stat(x, "square")
        if isinstance(x, Stat) and x.step == "mean + eps" and power == -0.5:
            return replace(x, step="rstd")
        raise CannotAssemble(f"it computes the power {power}")

    def _do_mean(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        x, dims = values[0], list(args[1] if len(args) > 1 else ())
        if isinstance(x, Stat) and x.step == "square" and dims in ([-1], [x.rows.index.ndim - 1]):
            return replace(x, step="mean")
        if isinstance(x, Rows) and dims in ([-1], [x.index.ndim - 1]):
            return Stat(x, "average")
        raise CannotAssemble("it computes a mean")

    def _do_rsqrt(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        x = values[0]
        if isinstance(x, Stat) and x.step == "mean + eps":
            return replace(x, step="rstd")
        raise CannotAssemble("it computes a root")

    def _do_add(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        a, b = values[0], values[1]
        if kwargs.get("alpha", 1) != 1:
            raise CannotAssemble("it adds a multiple")
        if isinstance(a, Stat) and b is None and a.step == "mean" and not isinstance(args[1], Tensor):
            return replace(a, step="mean + eps", eps=float(args[1]))
        a, b = (self._squared(v) if isinstance(v, Stat) and v.step == "square" else v for v in (a, b))
        if isinstance(a, Rows) and b is None:
            return self._plus(a, torch.as_tensor(args[1]))
        if isinstance(b, Rows) and a is None:
            return self._plus(b, torch.as_tensor(args[0]))
        if isinstance(a, Rows) and isinstance(b, Rows):
            return self._sum(a.expanded(out.shape), b.expanded(out.shape))
        raise CannotAssemble("it adds a constant, or what has another shape")

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

    def _plus(self, x: Rows, constant: Tensor) -> Value:
        """``constant``: the same for all rows."""
        node, at = self.node(x)
        values = constant.detach().float().cpu().expand(x.index.shape).movedim(at, 0).reshape(self._count, -1)
        if not bool((values == values[0]).all()):
            raise CannotAssemble("it adds something that depends on the position")
        bias = values[0].to(constant.dtype)
        if isinstance(node, Linear | LayerNorm):
            made: Node = replace(node, bias=bias if node.bias is None else node.bias.cpu() + bias)
        elif isinstance(node, Embed):
            made = replace(node, table=node.table + bias.to(node.table.device))
        else:
            raise CannotAssemble("it adds a constant")
        return self.fresh(self.once(made, bias, of=node), x.index.shape, at)

    def _do_sub(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        a, b = values[0], values[1]
        if isinstance(a, Rows) and isinstance(b, Stat) and b.step == "average" and same(a, b.rows):
            node, at = self.node(a)
            if at != a.index.ndim - 1:
                centre = Centre(node.width, node, a.index.shape[-1])
                return self.fresh(self.once(centre, torch.zeros(1)), a.index.shape, at)
        if isinstance(a, Rows) and isinstance(b, Rows) and not kwargs:
            return self._sum(a.expanded(out.shape), b.expanded(out.shape).times(torch.tensor(-1.0)))
        raise CannotAssemble("it subtracts a constant, or what has another shape")

    def _sum(self, a: Rows, b: Rows) -> Value:
        if a.node is b.node and a.other is b.other is None and not (a.plain and b.plain):
            ones = torch.ones(a.index.shape)
            return Rows(
                a.node, a.index, ones if a.factor is None else a.factor,
                b.index, ones if b.factor is None else b.factor,
            )  # fmt: skip
        (left, at), (right, other) = self.node(a), self.node(b)
        if at != other or left.width != right.width:
            raise CannotAssemble("it adds columns to rows")
        return self.fresh(Add(left.width, left, right), a.index.shape, at)

    def _do_mul(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        a, b = values[0], values[1]
        if a is None or b is None:
            known, constant = (a, args[1]) if b is None else (b, args[0])
            return self._times(known, torch.as_tensor(constant), out)
        if isinstance(a, Stat) and isinstance(b, Rows):
            a, b = b, a
        if not (isinstance(b, Stat) and b.step == "rstd"):
            a, b = (self._squared(v) if isinstance(v, Stat) and v.step == "square" else v for v in (a, b))
        if isinstance(a, Rows) and isinstance(b, Stat):
            return self._normed(a, b)
        if isinstance(a, Rows) and isinstance(b, Rows) and a.index.shape == b.index.shape:
            if same(a, b):
                return Stat(a, "square")
            (left, at), (right, other) = self.node(a), self.node(b)
            if at == other and left.width == right.width:
                return self.fresh(Mul(left.width, left, right), a.index.shape, at)
        raise CannotAssemble("it multiplies rows of different shapes")

    def _do_div(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        if values[1] is not None or kwargs:
            raise CannotAssemble("it divides by rows")
        return self._times(values[0], 1.0 / torch.as_tensor(args[1], dtype=torch.float32), out)

    def _times(self, x: Any, factor: Tensor, out: Tensor | None = None) -> Value:
        if not isinstance(x, Rows) or (out is not None and out.shape != x.index.shape):
            raise CannotAssemble("it multiplies by something of another shape")
        return x.times(factor)

    def _normed(self, x: Rows, stat: Stat) -> Value:
        if stat.step != "rstd" or not same(x, stat.rows):
            raise CannotAssemble("it scales rows by those of others")
        node, at = self.node(x)
        if at == x.index.ndim - 1:
            raise CannotAssemble("it normalises columns")
        if isinstance(node, Centre) and node.group == node.width == x.index.shape[-1]:
            return self.fresh(LayerNorm(node.width, node.x, stat.eps), x.index.shape, at)
        return self.fresh(Norm(node.width, node, stat.eps, x.index.shape[-1]), x.index.shape, at)

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

"""Rules for arithmetic of torch on traced tensors: sums, products, functions and norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

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
from draftwise.models.general.rows import Graph, Rows, Stat, Unknown, Value, same


class Arithmetic(Graph):
    """The rule of operation ``x`` is ``_do_x``: its name, what its arguments hold, the arguments, and its result."""

    def _squared(self, stat: Stat) -> Rows:
        node, at = self.node(stat.rows)
        return self.fresh(Mul(node.width, node, node), stat.rows.index.shape, at)

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
            made = replace(node, bias=bias if node.bias is None else node.bias.cpu() + bias)
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

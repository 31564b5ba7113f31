"""Watches one pass of a Transformers model and says what it computes, as a graph of `nodes`.

The pass runs on numbers, a few rows at positions far apart. Every operation of torch on the way is seen. Beside each
tensor that depends on the tokens stands a `Rows`: for each of its elements, of which row and column of which node it
is. Views, slices and transpositions are done to these numbers as they are done to the tensor, so that it does not
matter in which of the many ways a model cuts its projections into heads.

Worked example: a fused projection gives node L of width 6, two rows: numbers 0..5 and 6..11 as ``index``. A view as
[2, 3, 2] and the slice [:, 1] leave [[2, 3], [8, 9]]: columns 2 and 3 of L, rows 0 and 1. What rotates them multiplies
by cosines and adds the other half times sines: `Rows.factor`, and a second index with a factor of its own.

What is not understood becomes `Unknown` and is an error only if the result depends on it. Nothing here has to be
proven: what is put together from the graph is compared with the model afterwards (`check`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from draftwise.models.general.attention import LayerCall, plain_attention
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.nodes import (
    Add,
    Attend,
    CannotAssemble,
    Embed,
    Given,
    Linear,
    Mul,
    Node,
    Norm,
    Scale,
    Select,
    Turn,
    Unary,
)
from draftwise.models.general.ways import Interface


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of the rows."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Depends on the tokens in a way that has no name here."""

    why: str


@dataclass(frozen=True, slots=True)
class Rows:
    """What a tensor holds: element e is ``factor[e] * node[index[e]] + other_factor[e] * node[other[e]]``, where an
    index is row * width + column. A factor of None is 1; without ``other`` there is no second term."""

    node: Node
    index: Tensor  # int64, shaped as the tensor
    factor: Tensor | None = None  # float32, shaped likewise
    other: Tensor | None = None
    other_factor: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """With every part changed, as a view or slice changes the tensor."""
        parts = [
            None if p is None else change(p) for p in (self.index, self.factor, self.other, self.other_factor)
        ]
        assert parts[0] is not None
        return Rows(self.node, parts[0], *parts[1:])

    def times(self, factor: Tensor) -> Rows:
        """``factor`` broadcasts with the tensor, which keeps its shape."""
        own = factor.float().expand(self.index.shape)
        other = None if self.other_factor is None else self.other_factor * own
        return replace(self, factor=own if self.factor is None else self.factor * own, other_factor=other)

    @property
    def plain(self) -> bool:
        return self.factor is None and self.other is None


@dataclass(frozen=True, slots=True)
class Stat:
    """A step on the way to an RMSNorm of ``rows``: their squares, the mean of those over the last dimension, that plus
    ``eps``, or one over its root."""

    rows: Rows
    step: str  # "square", "mean", "mean + eps", "rstd"
    eps: float = 0.0


Value = Tokens | Unknown | Rows | Stat

_LAYOUT = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "unbind", "alias", "t", "flatten", "narrow", "repeat",
})  # fmt: skip
_COPIES = frozenset({"_to_copy", "clone", "contiguous", "detach", "lift_fresh", "to", "_conj", "dropout"})
_FUNCTIONS = frozenset({"silu", "relu", "tanh", "sigmoid"})


@dataclass(frozen=True)
class Traced:
    """``entering[i]``: the hidden states that enter layer i, and behind the last those that leave it."""

    hidden: Node
    entering: Mapping[int, Node]
    given: Given
    logits: Node
    positions: Tensor  # [T] int64, of the rows of `Turn`


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the operations inside of it. ``positions`` [T]: those of the rows."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()
        self._positions = positions
        self._count = positions.shape[0]
        self._made: dict[tuple[type[Node], Node, bytes], Node] = {}
        self.paused = False

    # ------------------------------------------------------------------------------------- what is known

    def put(self, tensor: Tensor, value: Value) -> None:
        self._values[tensor] = value

    def put_node(self, tensor: Tensor, node: Node, rows_at: int) -> None:
        """``tensor`` is the result of ``node``; dimension ``rows_at`` is that of the rows."""
        self.put(tensor, self._fresh(node, tensor.shape, rows_at))

    def node_of(self, tensor: Tensor) -> Node:
        """Raises CannotAssemble if what the tensor holds is no node."""
        value = self._values.get(tensor)
        if isinstance(value, Rows):
            return self._node(value)[0]
        raise CannotAssemble(value.why if isinstance(value, Unknown) else "it depends on no token")

    def _fresh(self, node: Node, shape: Sequence[int], rows_at: int) -> Rows:
        rest = [size for i, size in enumerate(shape) if i != rows_at]
        index = torch.arange(self._count * node.width).view(self._count, *rest)
        return Rows(node, index.movedim(0, rows_at))

    def _node(self, rows: Rows) -> tuple[Node, int]:
        """The node whose result this is, as it stands, and the dimension of the rows.

        Raises:
            CannotAssemble: there is no such node.
        """
        columns, at = self._columns(rows.node, rows.index)
        node = rows.node
        if columns.shape[0] != node.width or not bool((columns == torch.arange(node.width)).all()):
            node = self._once(Select(columns.shape[0], node, columns), columns)
        if rows.plain:
            return node, at
        factor = torch.ones(rows.index.shape) if rows.factor is None else rows.factor
        table = factor.movedim(at, 0).reshape(self._count, -1)
        if rows.other is None:
            if not bool((table == table[0]).all()):
                raise CannotAssemble("rows are multiplied by something that depends on their position")
            return self._multiplied(node, table[0]), at
        assert rows.other_factor is not None
        partners, other_at = self._columns(rows.node, rows.other)
        place = {column: i for i, column in enumerate(columns.tolist())}
        if other_at != at or not set(partners.tolist()) <= place.keys():
            raise CannotAssemble("rows are added to others of their own columns")
        partner = torch.tensor([place[column] for column in partners.tolist()])
        sines = rows.other_factor.movedim(at, 0).reshape(self._count, -1)
        return self._once(Turn(node.width, node, partner, table, sines), partner, table, sines), at

    def _multiplied(self, node: Node, factors: Tensor) -> Node:
        """``factors`` [width], one for each column."""
        if bool((factors == factors[0]).all()) and not (isinstance(node, Norm) and node.weight is None):
            same = factors[0] == 1
            return node if same else self._once(Scale(node.width, node, float(factors[0])), factors[:1])
        if isinstance(node, Norm):
            groups = factors.view(-1, node.group)
            if bool((groups == groups[0]).all()):
                weight = groups[0] if node.weight is None else node.weight * groups[0]
                return self._once(replace(node, weight=weight), weight, of=node)
        raise CannotAssemble("it multiplies columns by constants")

    def _once(self, node: Node, *parts: Tensor, of: Node | None = None) -> Node:
        """The node that was made like this before, or this one: whoever asks for a result gets the same node."""
        source = of if of is not None else next(node.inputs())
        digest = hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).digest()
        return self._made.setdefault((type(node), source, digest), node)

    def _columns(self, node: Node, index: Tensor) -> tuple[Tensor, int]:
        """Which columns, in order, and the dimension of the rows."""
        for at, size in enumerate(index.shape):
            if size != self._count:
                continue
            table = index.movedim(at, 0).reshape(self._count, -1)
            columns = table[0]
            rows = torch.arange(self._count)[:, None] * node.width
            if bool((table == columns + rows).all()) and bool((columns < node.width).all()):
                return columns, at
        raise CannotAssemble("it moves numbers between rows")

    # ---------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused:
            return out
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        name = func._schema.name.split("::")[-1]
        if not any(x in self._values for x in inputs):
            if name == "embedding":
                self._embed_positions(args[0], args[1], out)
            return out
        try:
            found = self._rule(name, func, args, kwargs, out)
        except CannotAssemble as error:
            found = Unknown(str(error))
        outputs = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        values = found if isinstance(found, list) else [found] * len(outputs)
        for tensor, value in zip(outputs, values, strict=True):
            self.put(tensor, value)
        return out

    def _rule(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Value | list[Value]:
        name = name.removesuffix("_") if not name.startswith("_") else name
        values = [self._values.get(x) if isinstance(x, Tensor) else None for x in args]
        for value in self._all(args):
            if isinstance(value, Unknown):
                return value
        first: Value | None = values[0] if values else None
        if name in _COPIES and first is not None:
            return first
        if name in _LAYOUT and isinstance(first, Rows):
            return self._layout(first, func, args, kwargs)
        if name in _LAYOUT and isinstance(first, Tokens):
            return first if out.numel() == self._count else Unknown("it picks some of the tokens")
        rule = getattr(self, f"_do_{name}", None)
        if rule is None:
            rule = self._do_function if name in _FUNCTIONS else None
        if rule is None:
            raise CannotAssemble(f"it computes {name}")
        result: Value | list[Value] = rule(name, values, args, kwargs, out)
        return result

    def _all(self, args: Any) -> list[Value]:
        found = (self._values.get(x) for x in tree_flatten(args)[0] if isinstance(x, Tensor))
        return [value for value in found if value is not None]

    def _layout(self, rows: Rows, func: Any, args: Any, kwargs: Any) -> Value | list[Value]:
        changed = func(rows.index, *args[1:], **kwargs)
        if isinstance(changed, Tensor):
            return rows.each(lambda part: func(part, *args[1:], **kwargs))
        many = [
            None if p is None else func(p, *args[1:], **kwargs)
            for p in (rows.index, rows.factor, rows.other, rows.other_factor)
        ]
        found: list[Value] = [
            Rows(rows.node, *(None if p is None else p[i] for p in many))  # type: ignore[arg-type]
            for i in range(len(changed))
        ]
        return found

    def _do_embedding(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        table = args[0]
        if not isinstance(values[1], Tokens):
            raise CannotAssemble("it looks up something else than tokens")
        return self._fresh(Embed(table.shape[1], table), out.shape, out.ndim - 2)

    def _embed_positions(self, table: Tensor, ids: Tensor, out: Tensor) -> None:
        """A table of learned positions; the ids may begin anywhere."""
        if ids.numel() != self._count or out.ndim < 2:
            return
        shift = ids.flatten() - self._positions
        if bool((shift == shift[0]).all()) and shift[0] >= 0:
            node = Embed(table.shape[1], table[int(shift[0]) :], by_position=True)
            self.put(out, self._fresh(node, out.shape, out.ndim - 2))

    def _do_mm(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._linear(values[0], args[1], values[1], None, out)

    def _do_addmm(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        if values[0] is not None or kwargs:
            raise CannotAssemble("it computes addmm of rows")
        return self._linear(values[1], args[2], values[2], args[0], out)

    def _linear(self, x: Any, matrix: Tensor, known: Any, bias: Tensor | None, out: Tensor) -> Value:
        if not isinstance(x, Rows) or known is not None:
            raise CannotAssemble("it multiplies rows with rows")
        node, at = self._node(x)
        if at != 0 or x.index.ndim != 2 or (bias is not None and bias.ndim != 1):
            raise CannotAssemble("it multiplies with columns for rows")
        return self._fresh(Linear(matrix.shape[1], node, matrix.t(), bias), out.shape, 0)

    def _do__fused_rms_norm(self, name: str, values: Any, args: Any, kwargs: Any, out: Any) -> Value:
        x, shape, weight, eps = args[:4]
        if not isinstance(values[0], Rows) or len(shape) != 1:
            raise CannotAssemble("it normalises over several dimensions")
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rows = self._normed(values[0], Stat(values[0], "rstd", eps))
        return rows if weight is None else self._times(rows, weight)

    def _do_function(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._unary(values[0], name)

    def _do_gelu(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        return self._unary(values[0], "gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu")

    def _unary(self, x: Any, function: str) -> Value:
        if not isinstance(x, Rows):
            raise CannotAssemble(f"it computes {function} of squares")
        node, at = self._node(x)
        return self._fresh(Unary(node.width, node, function), x.index.shape, at)

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
        x, dims = values[0], args[1] if len(args) > 1 else ()
        if isinstance(x, Stat) and x.step == "square" and list(dims) in ([-1], [x.rows.index.ndim - 1]):
            return replace(x, step="mean")
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
        if isinstance(a, Rows) and isinstance(b, Rows) and a.index.shape == b.index.shape:
            return self._sum(a, b)
        raise CannotAssemble("it adds a constant, or what has another shape")

    def _do_sub(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        a, b = values[0], values[1]
        if isinstance(a, Rows) and isinstance(b, Rows) and a.index.shape == b.index.shape and not kwargs:
            return self._sum(a, b.times(torch.tensor(-1.0)))
        raise CannotAssemble("it subtracts a constant, or what has another shape")

    def _sum(self, a: Rows, b: Rows) -> Value:
        if a.node is b.node and a.other is b.other is None and not (a.plain and b.plain):
            ones = torch.ones(a.index.shape)
            return Rows(
                a.node, a.index, ones if a.factor is None else a.factor,
                b.index, ones if b.factor is None else b.factor,
            )  # fmt: skip
        (left, at), (right, other) = self._node(a), self._node(b)
        if at != other or left.width != right.width:
            raise CannotAssemble("it adds columns to rows")
        return self._fresh(Add(left.width, left, right), a.index.shape, at)

    def _do_mul(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        a, b = values[0], values[1]
        if a is None or b is None:
            known, constant = (a, args[1]) if b is None else (b, args[0])
            return self._times(known, torch.as_tensor(constant), out)
        if isinstance(a, Stat) and isinstance(b, Rows):
            a, b = b, a
        if isinstance(a, Rows) and isinstance(b, Stat):
            return self._normed(a, b)
        if isinstance(a, Rows) and isinstance(b, Rows) and a.index.shape == b.index.shape:
            if _same(a, b):
                return Stat(a, "square")
            (left, at), (right, other) = self._node(a), self._node(b)
            if at == other and left.width == right.width:
                return self._fresh(Mul(left.width, left, right), a.index.shape, at)
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
        if stat.step != "rstd" or not _same(x, stat.rows):
            raise CannotAssemble("it scales rows by those of others")
        node, at = self._node(x)
        if at == x.index.ndim - 1:
            raise CannotAssemble("it normalises columns")
        return self._fresh(Norm(node.width, node, stat.eps, x.index.shape[-1]), x.index.shape, at)

    def _do_cat(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        parts = [self._values.get(x) for x in args[0]]
        rest = {**kwargs, **({"dim": args[1]} if len(args) > 1 else {})}
        return self._joined(parts, lambda many: torch.cat(many, **rest))

    def _do_stack(self, name: str, values: Any, args: Any, kwargs: Any, out: Tensor) -> Value:
        parts = [self._values.get(x) for x in args[0]]
        rest = {**kwargs, **({"dim": args[1]} if len(args) > 1 else {})}
        return self._joined(parts, lambda many: torch.stack(many, **rest))

    def _joined(self, parts: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Value:
        if not all(isinstance(part, Rows) and part.node is parts[0].node for part in parts):
            raise CannotAssemble("it puts different results side by side")
        index = join([part.index for part in parts])
        if all(part.plain for part in parts):
            return Rows(parts[0].node, index)
        factor = join([torch.ones(p.index.shape) if p.factor is None else p.factor for p in parts])
        if all(part.other is None for part in parts):
            return Rows(parts[0].node, index, factor)
        other = join([p.index if p.other is None else p.other for p in parts])
        second = join(
            [torch.zeros(p.index.shape) if p.other_factor is None else p.other_factor for p in parts]
        )
        return Rows(parts[0].node, index, factor, other, second)


def _same(a: Rows, b: Rows) -> bool:
    """Whether two tensors hold the same."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return x is y or (x is not None and y is not None and torch.equal(x, y))

    return (
        a.node is b.node
        and equal(a.index, b.index)
        and equal(a.factor, b.factor)
        and equal(a.other, b.other)
        and equal(a.other_factor, b.other_factor)
    )


class _Taking:
    """Takes attention's calls in a trace."""

    def __init__(self, tracer: Tracer, calls: Sequence[LayerCall]) -> None:
        self._tracer, self._calls = tracer, calls
        self._next = 0

    def take(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        tracer, layer = self._tracer, self._next
        call = self._calls[layer]
        assert module is call.module, "calls come in another order"
        self._next += 1
        tracer.paused = True
        out = plain_attention(call, query, key, value, options.get("s_aux"))  # [1, T, Hq, D]
        tracer.paused = False
        try:
            q, k, v = (tracer.node_of(part) for part in (query, key, value))
            node = Attend(out.shape[2] * out.shape[3], layer, q, k, v, options.get("s_aux"))
            tracer.put_node(out, node, 1)
        except CannotAssemble as error:
            tracer.put(out, Unknown(str(error)))
        return out


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CannotAssemble:
        raise
    except Exception as error:  # whatever a model's code raises at rows so far apart
        raise CannotAssemble(f"its code fails: {type(error).__name__}: {error}") from error


def trace(decoder: GeneralDecoder, way: Interface) -> Traced:
    """Watch ``decoder`` compute a few rows and their logits.

    Raises:
        CannotAssemble: it does something that has no node.
    """
    last = decoder.config.max_model_len - 1
    spread = sorted({min(p, last) for p in (0, 1, 2, 7, 40, 333, 4093, last)})
    positions = torch.tensor(spread, device=decoder.device)
    tokens = torch.zeros(len(spread), dtype=torch.int64, device=decoder.device)
    tracer = Tracer(positions)
    tracer.put(tokens, Tokens())
    with _explained(), torch.inference_mode(False), torch.no_grad(), tracer:
        part = way.part(tokens, positions, _Taking(tracer, way.calls))
        output = decoder.compute([part], len(spread), range(decoder.num_blocks + 1))
        hidden = tracer.node_of(output.hidden)
        entering = {i: tracer.node_of(x) for i, x in output.captured.items()}
        given = Given(hidden.width)
        states = torch.zeros((len(spread), hidden.width), dtype=decoder.dtype, device=decoder.device)
        tracer.put_node(states, given, 0)
        logits = tracer.node_of(decoder.logits(states))
    return Traced(hidden, entering, given, logits, positions)

"""The content of tensors during a traced pass, in terms of the nodes of its graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from draftwise.models.general.nodes import CannotAssemble, Concat, LayerNorm, Node, Norm, Scale, Select, Turn


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of the rows."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Yes or no, by the ids of the rows alone: such as which are those of images."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Depends on the tokens in a way that has no name here. ``of``: on the results of these nodes, if they are few, and
    on these ``constants``: small tensors and numbers."""

    why: str
    of: frozenset[Node] = frozenset()
    constants: tuple[Tensor | float, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The content of a tensor: element e is ``factor[e] * node[index[e]] + other_factor[e] * node[other[e]]``, where
    an
    index is row * width + column. A factor of None is 1; without ``other`` there is no second term."""

    node: Node
    index: Tensor  # int64, shaped as the tensor
    factor: Tensor | None = None  # float32, shaped likewise
    other: Tensor | None = None
    other_factor: Tensor | None = None

    def times(self, factor: Tensor) -> Rows:
        """``factor`` broadcasts with the tensor, which keeps its shape."""
        own = factor.detach().float().cpu().expand(self.index.shape)
        other = None if self.other_factor is None else self.other_factor * own
        return replace(self, factor=own if self.factor is None else self.factor * own, other_factor=other)

    @property
    def plain(self) -> bool:
        return self.factor is None and self.other is None

    def like(self, parts: Sequence[Tensor | None]) -> Rows:
        """The same results with index, factor, other and its factor as ``parts``."""
        index, factor, other, other_factor = parts
        assert index is not None
        return Rows(self.node, index, factor, other, other_factor)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.index, self.factor, self.other, self.other_factor

    def expanded(self, shape: Sequence[int]) -> Rows:
        """As it broadcasts to ``shape``."""
        return self.like([None if part is None else part.expand(tuple(shape)) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Stat:
    """A step on the way to a norm of ``rows``: their mean over the last dimension; or their squares, the mean of those
    over the last dimension, that plus ``eps``, or one over its root."""

    rows: Rows
    step: str  # "average", or "square", "mean", "mean + eps", "rstd"
    eps: float = 0.0


class Sheet:
    """A tensor of ``size`` numbers that is filled piece by piece, with copies into views of it."""

    def __init__(self, size: int) -> None:
        self._left = torch.ones(size, dtype=torch.bool)
        self._pieces: list[tuple[Tensor, Rows]] = []

    def write(self, places: Tensor, rows: Rows) -> None:
        """``places``: which numbers of it, shaped as what is written to them."""
        self._left[places.flatten()] = False
        self._pieces.append((places.flatten(), rows.expanded(places.shape)))

    @property
    def full(self) -> bool:
        return not bool(self._left.any())

    def rows(self, graph: Graph) -> Rows:
        """All numbers in a row; the sheet is full."""
        places = [places for places, _ in self._pieces]

        def join(parts: Sequence[Tensor]) -> Tensor:
            whole = parts[0].new_empty(len(self._left))
            for at, part in zip(places, parts, strict=True):
                whole[at] = part.flatten()
            return whole

        return graph.joined([rows for _, rows in self._pieces], join)


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor, or a view of one, that is filled later: its numbers stand at ``places`` of ``sheet``."""

    sheet: Sheet
    places: Tensor


Value = Tokens | Marks | Unknown | Rows | Stat | Blank


def same(a: Rows, b: Rows) -> bool:
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


class Graph:
    """Finds the nodes that tensors of ``count`` rows stand for; who asks for a result twice gets one node."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._made: dict[tuple[type[Node], Node, bytes], Node] = {}
        self._joins: dict[tuple[Node, ...], Concat] = {}

    def fresh(self, node: Node, shape: Sequence[int], rows_at: int) -> Rows:
        rest = [size for i, size in enumerate(shape) if i != rows_at]
        index = torch.arange(self._count * node.width).view(self._count, *rest)
        return Rows(node, index.movedim(0, rows_at))

    def node(self, rows: Rows) -> tuple[Node, int]:
        """The node whose result this is, as it stands, and the dimension of the rows.

        Raises:
            CannotAssemble: there is no such node.
        """
        columns, at = self._columns(rows.node, rows.index)
        node = rows.node
        if columns.shape[0] != node.width or not bool((columns == torch.arange(node.width)).all()):
            node = self.once(Select(columns.shape[0], node, columns), columns)
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
        places: dict[int, list[int]] = {}
        for i, column in enumerate(columns.tolist()):
            places.setdefault(column, []).append(i)
        if other_at != at or not set(partners.tolist()) <= places.keys():
            raise CannotAssemble("rows are added to others of their own columns")
        # heads may share columns: a partner is one of the own head, which is the nearest
        partner = torch.tensor(
            [min(places[column], key=lambda j: abs(j - i)) for i, column in enumerate(partners.tolist())]
        )
        sines = rows.other_factor.movedim(at, 0).reshape(self._count, -1)
        return self.once(Turn(node.width, node, partner, table, sines), partner, table, sines), at

    def joined(self, parts: Sequence[Rows], join: Callable[[Sequence[Tensor]], Tensor]) -> Rows:
        """Results in one tensor, which ``join`` makes of theirs. Results of different nodes become columns of one.

        Example: two rows of a node of width 3 beside two of one of width 2. Numbers 0..5 of the first are 0, 1, 2, 5,
        6, 7 of the node of both, whose width is 5, and numbers 0..3 of the second are 3, 4, 8, 9.
        """
        nodes = list(dict.fromkeys(part.node for part in parts))
        node = nodes[0]
        if len(nodes) > 1:
            width = sum(each.width for each in nodes)
            node = self._joins.setdefault(tuple(nodes), Concat(width, tuple(nodes)))
            starts = dict(zip(nodes, accumulate((each.width for each in nodes), initial=0), strict=False))

            def moved(part: Rows) -> Rows:
                def column(index: Tensor | None) -> Tensor | None:
                    if index is None:
                        return None
                    own = part.node.width
                    return index // own * width + index % own + starts[part.node]

                return Rows(node, column(part.index), part.factor, column(part.other), part.other_factor)  # type: ignore[arg-type]

            parts = [moved(part) for part in parts]
        index = join([part.index for part in parts])
        if all(part.plain for part in parts):
            return Rows(node, index)
        factor = join([torch.ones(p.index.shape) if p.factor is None else p.factor for p in parts])
        if all(part.other is None for part in parts):
            return Rows(node, index, factor)
        other = join([p.index if p.other is None else p.other for p in parts])
        second = join(
            [torch.zeros(p.index.shape) if p.other_factor is None else p.other_factor for p in parts]
        )
        return Rows(node, index, factor, other, second)

    def _multiplied(self, node: Node, factors: Tensor) -> Node:
        """``factors`` [width], one for each column."""
        if bool((factors == factors[0]).all()) and not (
            isinstance(node, Norm | LayerNorm) and node.weight is None
        ):
            same = factors[0] == 1
            return node if same else self.once(Scale(node.width, node, float(factors[0])), factors[:1])
        if isinstance(node, LayerNorm) and node.bias is None:
            weight = factors if node.weight is None else node.weight * factors
            return self.once(replace(node, weight=weight), weight, of=node)
        if isinstance(node, Norm):
            groups = factors.view(-1, node.group)
            if bool((groups == groups[0]).all()):
                weight = groups[0] if node.weight is None else node.weight * groups[0]
                return self.once(replace(node, weight=weight), weight, of=node)
        raise CannotAssemble("it multiplies columns by constants")

    def once(self, node: Node, *parts: Tensor, of: Node | None = None) -> Node:
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

"""A pass as a graph: one node for each result of T rows.

A graph is made by `trace`, out of what a Transformers model does, and computed by `assembled`, with our operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from draftwise.kernels.routing import Routing
from draftwise.models.general.experts import Stack
from draftwise.models.general.stored import StoredLayer


class CannotAssemble(Exception):
    """The model does something that our operations do not compute; it runs on its own code then."""


@dataclass(eq=False, slots=True)
class Node:
    """``width``: numbers in a row of the result."""

    width: int

    def inputs(self) -> Iterator[Node]:
        """The nodes it is computed from."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Node):
                yield value


@dataclass(eq=False, slots=True)
class Given(Node):
    """The hidden states that an output layer is given."""


@dataclass(eq=False, slots=True)
class Embed(Node):
    """Rows of ``table`` [V, width]: those of the tokens or, ``by_position``, of the positions; plus ``bias`` [width].
    ``total``: not 0 on one of several ranks whose table is a part, of so many rows in all."""

    table: Tensor | StoredLayer
    by_position: bool = False
    bias: Tensor | None = None
    total: int = 0


@dataclass(eq=False, slots=True)
class Linear(Node):
    """``weight`` [width, x.width], ``bias`` [width]. A weight in memory is taken away once it is packed. On one of
    several ranks (`dividing`), ``summed``: its result is one term of a sum; ``total``: it is the rank's part of an
    output layer of so many tokens, if not 0."""

    x: Node
    weight: Tensor | StoredLayer
    bias: Tensor | None = None
    summed: bool = False
    total: int = 0


@dataclass(eq=False, slots=True)
class Select(Node):
    """Columns of ``x``: the i-th is column ``columns[i]`` of x."""

    x: Node
    columns: Tensor  # [width] int64


@dataclass(eq=False, slots=True)
class Concat(Node):
    """Columns of several results side by side."""

    parts: tuple[Node, ...]

    def inputs(self) -> Iterator[Node]:
        return iter(self.parts)


@dataclass(eq=False, slots=True)
class Norm(Node):
    """RMSNorm of every ``group`` columns by themselves; ``weight`` [group] or None."""

    x: Node
    eps: float
    group: int
    weight: Tensor | None = None


@dataclass(eq=False, slots=True)
class Centre(Node):
    """``x`` less the mean of every ``group`` columns."""

    x: Node
    group: int


@dataclass(eq=False, slots=True)
class LayerNorm(Node):
    """(x - mean) / deviation * ``weight`` + ``bias`` of all columns; None: 1, 0."""

    x: Node
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(eq=False, slots=True)
class Scale(Node):
    """Every number times ``factor``."""

    x: Node
    factor: float


@dataclass(eq=False, slots=True)
class Unary(Node):
    """``function`` of every number: a name that `Ops` knows."""

    x: Node
    function: str


@dataclass(eq=False, slots=True)
class Mul(Node):
    a: Node
    b: Node


@dataclass(eq=False, slots=True)
class Add(Node):
    a: Node
    b: Node


@dataclass(eq=False, slots=True)
class Mixture(Node):
    """Rows of ``x`` through those of ``experts`` that ``scores`` choose; ``correction`` [E] float32 or None."""

    x: Node
    scores: Linear
    experts: Stack
    routing: Routing
    correction: Tensor | None = None


@dataclass(eq=False, slots=True)
class Turn(Node):
    """Column i of the result is ``x[:, i] * cos[:, i] + x[:, partner[i]] * sin[:, i]``: rotations by position."""

    x: Node
    partner: Tensor  # [width] int64
    cos: Tensor  # [T, width] float32, at the positions of the trace
    sin: Tensor  # [T, width]


@dataclass(eq=False, slots=True)
class Attend(Node):
    """Attention layer ``layer``; columns of q, k and v stand head by head. ``sinks`` [heads]: a score of its own that
    takes weight and gives nothing."""

    layer: int
    q: Node
    k: Node
    v: Node
    sinks: Tensor | None = None

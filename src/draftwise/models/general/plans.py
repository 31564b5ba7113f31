"""What an assembler decides on before anything is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftwise.models.general.assembled import Run
from draftwise.models.general.nodes import Linear, Node, Select


@dataclass(frozen=True, slots=True)
class LinearRows:
    """Rows of a linear layer: ``rows`` of its weight, all of them if None."""

    layer: Linear
    rows: Tensor | None = None

    def weight(self) -> Tensor:
        return self.layer.weight if self.rows is None else self.layer.weight[self.rows]

    def bias(self) -> Tensor | None:
        bias = self.layer.bias
        return bias if bias is None or self.rows is None else bias[self.rows]

    def ordered(self, columns: Tensor) -> LinearRows:
        """With its results in another order, or some of them."""
        return LinearRows(self.layer, columns if self.rows is None else self.rows[columns])


def as_linear(node: Node) -> LinearRows | None:
    if isinstance(node, Linear):
        return LinearRows(node)
    if isinstance(node, Select) and isinstance(node.x, Linear):
        return LinearRows(node.x, node.columns)
    return None


@dataclass(slots=True)
class Plan:
    """How ``node`` will be computed. ``make`` packs what it needs of ``layers``."""

    node: Node
    inputs: tuple[Node, ...]
    make: Callable[[], Run]
    layers: tuple[Linear, ...] = ()


def id_of(weight: Tensor) -> int:
    """Of the memory that it lies in."""
    return weight.untyped_storage().data_ptr()

"""An assembler's decisions before anything is packed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftwise.models.general.assembled import Run
from draftwise.models.general.nodes import Linear, Node, Select
from draftwise.models.general.stored import StoredLayer


@dataclass(frozen=True, slots=True)
class LinearRows:
    """Rows of a linear layer: ``rows`` of its weight, all of them if None."""

    layer: Linear
    rows: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.layer.width if self.rows is None else len(self.rows)

    def weight(self) -> Tensor:
        """As floats [outputs, inputs]; read, if it is stored."""
        weight = self.layer.weight
        weight = weight.floats() if isinstance(weight, StoredLayer) else weight.detach()
        return weight if self.rows is None else weight[self.rows]

    def bias(self) -> Tensor | None:
        bias = self.layer.bias
        return bias if bias is None or self.rows is None else bias[self.rows]

    def ordered(self, columns: Tensor) -> LinearRows:
        """With its results in another order, or some of them."""
        return LinearRows(self.layer, columns if self.rows is None else self.rows[columns])


def as_linear(node: Node) -> LinearRows | None:
    """The node as a linear layer that can be joined with others."""
    if isinstance(node, Linear):
        return None if node.summed else LinearRows(node)
    if isinstance(node, Select) and isinstance(node.x, Linear) and not node.x.summed:
        return LinearRows(node.x, node.columns)
    return None


def alike(parts: Sequence[LinearRows]) -> bool:
    """Whether these can be one layer, their rows below each other: all in memory, or stored in one form."""
    weights = [part.layer.weight for part in parts]
    return len({each.kind if isinstance(each, StoredLayer) else None for each in weights}) == 1


@dataclass(slots=True)
class Plan:
    """How ``node`` will be computed. ``make`` packs what it needs of ``layers``."""

    node: Node
    inputs: tuple[Node, ...]
    make: Callable[[], Run]
    layers: tuple[Linear, ...] = ()


def id_of(weight: Tensor | StoredLayer) -> Hashable:
    """The identity of its memory, or of its place in the checkpoint."""
    return weight if isinstance(weight, StoredLayer) else weight.untyped_storage().data_ptr()

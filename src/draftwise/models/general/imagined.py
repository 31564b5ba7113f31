"""Weights that are made up, for a rank that reads its own part of a model and nothing else.

What a model computes with which layers shows in a trace, whatever its numbers are. So on several ranks, a model is
built with matrices that take next to no memory: every number of one is a number of a short list. Such a model is
traced and divided, the divided model is compared with it, and only then do ranks read their parts of the checkpoint.
What is small (norms, biases, routers) is there as it is, because its numbers may become constants of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.kernels.base import Linear, Ops
from draftwise.models.cuts import between
from draftwise.models.general.imagined_numbers import imagined, multiplied
from draftwise.models.general.nodes import Linear as LinearNode
from draftwise.models.general.nodes import Mixture, Node
from draftwise.models.general.stored import FloatLayer, StoredLayer, StoredLinear


@dataclass(frozen=True, eq=False)
class ImaginedLayer(FloatLayer):
    """A stored layer's made-up weight, or its part. ``whole``: name and sizes of the whole layer."""

    whole: tuple[str, int, int] = ("", 0, 0)

    @classmethod
    def like(cls, layer: StoredLayer) -> ImaginedLayer:
        """That of ``layer``."""
        of = layer.of or layer
        return cls(
            layer.base, layer.outputs, layer.inputs, {}, layer.dtype, own=layer.own,
            whole=(of.place, of.outputs, of.inputs),
        )  # fmt: skip

    def floats(self) -> Tensor:
        return self.rows(0, self.outputs)

    def rows(self, start: int, end: int) -> Tensor:
        matrix = imagined(*self.whole, self.dtype)
        if self.own is None:
            return matrix[start:end]
        places = (between(self.own.ranges[0], start, end), self.own.ranges[1])
        rows, columns = (torch.cat([torch.arange(*each) for each in ranges]) for ranges in places)
        return matrix[rows][:, columns]


class _Absent(Linear):
    """Of a module whose weight is not packed."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        return 0


class ImaginedLinear(StoredLinear):
    """A module that multiplies with made-up numbers. Its ``weight`` is that of the checkpoint, and ``restore_read``
    puts it back where the model's own code asks for it."""

    def _pack(self, ops: Ops, layer: StoredLayer, bias: Tensor | None, is_head: bool) -> Linear:
        return _Absent()

    def _product(self, rows: Tensor) -> Tensor:
        layer = self.layer
        out = multiplied(rows, imagined(layer.place, layer.outputs, layer.inputs, layer.dtype))
        return out if self.bias is None else out + self.bias


@contextmanager
def with_imagined(nodes: Iterable[Node]) -> Iterator[None]:
    """Inside this context, stored weights of a graph are the made-up ones; then they are what they were, and also those
    in memory, which a decoder takes away as it is put together."""
    linears = [(node, node.weight) for node in nodes if isinstance(node, LinearNode)]
    mixtures = [(node, node.experts) for node in nodes if isinstance(node, Mixture)]
    try:
        for linear, weight in linears:
            if isinstance(weight, StoredLayer):
                linear.weight = ImaginedLayer.like(weight)
        for mixture, experts in mixtures:
            mixture.experts = experts.as_imagined()
        yield
    finally:
        for linear, weight in linears:
            linear.weight = weight
        for mixture, experts in mixtures:
            mixture.experts = experts

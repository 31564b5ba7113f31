"""Weights that are made up, for a rank that reads its own part of a model and nothing else.

What a model computes with which layers shows in a trace, whatever its numbers are. So on several ranks, a model is
built with matrices that take next to no memory: every number of one is a number of a short list. Such a model is
traced and divided, the divided model is compared with it, and only then do ranks read their parts of the checkpoint.
What is small (norms, biases, routers) is there as it is, because its numbers may become constants of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear
from draftwise.models.cuts import between
from draftwise.models.general.imagined_numbers import imagined, multiplied
from draftwise.models.general.nodes import Embed, Mixture, Node
from draftwise.models.general.nodes import Linear as LinearNode
from draftwise.models.general.stored import FloatLayer, StoredLayer, StoredLinear


@dataclass(frozen=True, eq=False)
class ImaginedLayer(FloatLayer):
    """A stored layer's made-up weight, or its part. ``whole``: name and sizes of the whole layer; ``is_table``: it is
    that of an `ImaginedEmbedding`."""

    whole: tuple[str, int, int] = ("", 0, 0)
    is_table: bool = False

    @classmethod
    def like(cls, layer: StoredLayer, *, is_table: bool = False) -> ImaginedLayer:
        """That of ``layer``."""
        of = layer.of or layer
        return cls(
            layer.base, layer.outputs, layer.inputs, {}, layer.dtype, own=layer.own,
            whole=(of.place, of.outputs, of.inputs), is_table=is_table,
        )  # fmt: skip

    def floats(self) -> Tensor:
        return self.rows(0, self.outputs)

    def rows(self, start: int, end: int) -> Tensor:
        matrix = imagined(*self.whole, self.dtype, rows_of_one=self.is_table)
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


class ImaginedEmbedding(nn.Module):
    """A module that looks up rows of made-up numbers. Its ``weight`` is as `ImaginedLinear`'s."""

    def __init__(self, layer: StoredLayer, padding_idx: int | None) -> None:
        """``layer``: the table in the checkpoint."""
        super().__init__()
        self.layer = layer
        self.num_embeddings, self.embedding_dim = layer.outputs, layer.inputs
        self.padding_idx = padding_idx
        self.was_read = False
        table = imagined(layer.place, layer.outputs, layer.inputs, layer.dtype, rows_of_one=True)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.table)

    @property
    def weight(self) -> Tensor:
        """[tokens, H], read from the checkpoint."""
        self.was_read = True
        return self.layer.floats().to(self.table.device)

    def plain(self) -> nn.Embedding:
        """The module with its weight in memory."""
        module = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        module.weight = nn.Parameter(self.layer.floats().to(self.table.device), requires_grad=False)
        return module


def imagine_embedding(model: Any, known: Mapping[int, StoredLayer]) -> None:
    """Put a made-up table in the place of a model's, unless its module is of a class of its own, or its numbers are of
    another type than the model's.

    Args:
        known: stored layers, by the address of the number that stands for each.
    """
    table = model.get_input_embeddings()
    if type(table) is not nn.Embedding or table.max_norm is not None:
        return
    layer = known.get(table.weight.data_ptr())
    if layer is None or table.weight.dtype != layer.dtype:
        return
    made = ImaginedEmbedding(layer, table.padding_idx)
    places = [(p, name) for p in model.modules() for name, child in p.named_children() if child is table]
    for parent, name in places:
        setattr(parent, name, made)


@contextmanager
def with_imagined(nodes: Iterable[Node]) -> Iterator[None]:
    """Inside this context, stored weights of a graph are the made-up ones; then they are what they were, and also those
    in memory, which a decoder takes away as it is put together."""
    nodes = list(nodes)
    linears = [(node, node.weight) for node in nodes if isinstance(node, LinearNode)]
    tables = [(node, node.table) for node in nodes if isinstance(node, Embed)]
    mixtures = [(node, node.experts) for node in nodes if isinstance(node, Mixture)]
    try:
        for linear, weight in linears:
            if isinstance(weight, StoredLayer):
                linear.weight = ImaginedLayer.like(weight)
        for embed, table in tables:
            if isinstance(table, StoredLayer):
                embed.table = ImaginedLayer.like(table, is_table=True)
        for mixture, experts in mixtures:
            mixture.experts = experts.as_imagined()
        yield
    finally:
        for linear, weight in linears:
            linear.weight = weight
        for embed, table in tables:
            embed.table = table
        for mixture, experts in mixtures:
            mixture.experts = experts

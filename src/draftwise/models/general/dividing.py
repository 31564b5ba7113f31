"""The graph of a trace, divided among ranks.

Which layers belong together shows in the graph: a linear layer reads columns that were made, each by itself or head by
head, from the columns of others. Then a rank computes some of these columns alone, reads that part of the layer's
inputs, and what it gives is one term of a sum over ranks (Megatron-LM's pairs, Shoeybi et al. 2019, arXiv:1909.08053).
All else, every rank computes whole.

Example: down(silu(gate(x)) * up(x)) with 96 columns on 2 ranks: rank 1 has rows 48-95 of gate and up, and columns
48-95 of down. Of attention it has half of the heads, in q, k, v and the columns of o.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.ranks import Part, vocabulary_step
from draftwise.models.cuts import ranges_of
from draftwise.models.general.attention import LayerCall
from draftwise.models.general.nodes import (
    Add,
    Attend,
    Embed,
    Linear,
    Mixture,
    Mul,
    Node,
    Norm,
    Scale,
    Select,
    Turn,
    Unary,
)
from draftwise.models.general.plans import id_of
from draftwise.models.general.stored import StoredLayer
from draftwise.models.general.trace import Traced

_BY_COLUMN = (Unary, Scale, Mul, Add, Select, Turn, Norm, Attend)
"""Nodes of whose result some columns can be computed alone (`Norm` and `Attend`: by groups and heads)."""


class Dividing:
    """Divides a graph in place; `calls` are those of the rank afterwards."""

    def __init__(
        self,
        traced: Traced,
        calls: Sequence[LayerCall],
        part: Part,
        tables: Mapping[Hashable, StoredLayer],
        *,
        experts_by_rank: bool = False,
    ) -> None:
        """
        Args:
            tables: embeddings in the checkpoint, by `id_of` what stands for them in the graph.

        Raises:
            ModelLoadError: nothing of it can be divided, or a part of its weights cannot be read.
            ConfigError: there are no experts that could be divided by rank.
        """
        self.calls = list(calls)
        self._part = part
        self._asked: dict[Linear, list[tuple[Select | None, Tensor]]] = {}
        self._seen: dict[Node, Tensor] = {}
        whole = {*traced.entering.values(), traced.hidden, traced.logits}
        self.nodes = nodes = _ordered(sorted(traced.entering.items()), traced)
        users: dict[Node, set[Node]] = {}
        for node in nodes:
            for each in node.inputs():
                users.setdefault(each, set()).add(node)
        mixtures = [node for node in nodes if isinstance(node, Mixture)]
        if experts_by_rank and not mixtures:
            raise ConfigError("enable_expert_parallel: it has no experts that are understood; leave it out")
        head = traced.logits
        while not isinstance(head, Linear) and (below := next(head.inputs(), None)) is not None:
            head = below
        taken: set[Node] = {head}
        self.count = len(mixtures)
        for node in mixtures:
            node.experts = node.experts.of_rank(part, by_rank=experts_by_rank)
        for node in nodes:
            if not isinstance(node, Linear) or node in taken:
                continue
            region = self._region(node, users, whole)
            if region is None or taken & region or not self._fits(node, region):
                continue
            self._divide(node, region)
            taken |= {node, *region}
            self.count += 1
        if not self.count:
            raise ModelLoadError(f"nothing of it can be divided among {part.size} ranks")
        self._divide_vocabulary(head, tables)

    def _divide_vocabulary(self, head: Node, tables: Mapping[Hashable, StoredLayer]) -> None:
        """The embedding and the output layer by tokens, as families with code of their own have them
        (`kernels.split`). A layer that is both is divided once, and shared."""
        parts: dict[StoredLayer, StoredLayer] = {}

        def part_of(layer: StoredLayer) -> StoredLayer:
            if layer not in parts:
                parts[layer] = _part_of_vocabulary(layer, self._part)
            return parts[layer]

        for node in self.nodes:
            if isinstance(node, Embed) and isinstance(node.table, Tensor):
                layer = tables.get(id_of(node.table))
                if layer is None:
                    continue
                if node.by_position or node.table.shape != (layer.outputs, layer.inputs):
                    raise ModelLoadError("it looks up something else than tokens in its embedding")
                node.table = part_of(layer)
                node.total = 0 if node.table is layer else layer.outputs
        if isinstance(head, Linear) and isinstance(head.weight, StoredLayer):
            whole, own = head.weight, part_of(head.weight)
            if own is not whole:
                start = self._part.rank * vocabulary_step(whole.outputs, self._part.size)
                head.weight, head.total, head.width = own, whole.outputs, own.outputs
                if head.bias is not None:
                    head.bias = head.bias[start : start + own.outputs].contiguous()

    def _region(self, layer: Linear, users: dict[Node, set[Node]], whole: set[Node]) -> set[Node] | None:
        """What stands between ``layer`` and the linear layers from which its inputs come, these included, if nobody
        else reads any of it; None: its inputs are made in another way."""
        found: set[Node] = set()
        waiting = [layer.x]
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            if node in whole or not isinstance(node, (Linear, *_BY_COLUMN)):
                return None
            found.add(node)
            if not isinstance(node, Linear):
                waiting += node.inputs()
        inside = found | {layer}
        return found if all(users[node] <= inside for node in found) else None

    def _fits(self, layer: Linear, region: set[Node]) -> bool:
        """Whether ranks can have equal parts of it."""
        size = self._part.size
        for node in region:
            if isinstance(node, Attend):
                call = self.calls[node.layer]
                heads, kv = call.heads.num_heads, call.heads.num_kv_heads
                if heads % size or (kv % size and size % kv) or call.latent:
                    return False
                if not call.key_dim == call.value_dim == call.heads.head_dim:
                    return False
            elif isinstance(node, Norm):
                if node.group == node.width or node.width % (node.group * size):
                    return False
            elif isinstance(node, Mul | Add) and not node.a.width == node.b.width == node.width:
                return False
        if layer.x.width % size:
            return False
        try:
            _columns(layer.weight, self._own(layer))
        except ModelLoadError:  # groups of a quantised layer go over the border
            return False
        return True

    def _own(self, layer: Linear) -> tuple[int, int]:
        """The rank's inputs of a layer: (start, end)."""
        own = layer.x.width // self._part.size
        return self._part.rank * own, (self._part.rank + 1) * own

    def _divide(self, layer: Linear, region: set[Node]) -> None:
        start, end = self._own(layer)
        self._asked.clear()
        self._seen.clear()
        self._ask(layer.x, torch.arange(start, end))
        layer.weight = _columns(layer.weight, (start, end))
        layer.summed = True
        if self._part.rank:
            layer.bias = None  # it is in the sum once
        for one, asked in self._asked.items():
            rows = torch.unique(torch.cat([columns for _, columns in asked]))
            one.weight = _rows(one.weight, rows)
            if one.bias is not None:
                one.bias = one.bias[rows].contiguous()
            one.width = len(rows)
            for select, columns in asked:
                if select is not None:
                    select.columns = torch.searchsorted(rows, columns)
                elif len(columns) != len(rows):
                    raise ModelLoadError("some of its layers read other columns of one result than others")
        assert self._seen.keys() | self._asked.keys() == region, "all of it was asked for"

    def _ask(self, node: Node, columns: Tensor, by: Select | None = None) -> None:
        """Only ``columns`` of a node's result are wanted."""
        if isinstance(node, Linear):
            asked = self._asked.setdefault(node, [])
            if by is not None or not any(select is None for select, _ in asked):
                asked.append((by, columns))
            return
        if (known := self._seen.get(node)) is not None:
            if not torch.equal(known, columns):
                raise ModelLoadError("two of its layers read other columns of one result")
            return
        self._seen[node] = columns
        if isinstance(node, Attend):
            self._ask_heads(node, columns)
        elif isinstance(node, Select):
            self._ask(node.x, node.columns[columns], node)
        else:
            if isinstance(node, Turn):
                place = torch.full((node.width,), -1).index_copy_(0, columns, torch.arange(len(columns)))
                node.partner = place[node.partner[columns]]
                if bool((node.partner < 0).any()):
                    raise ModelLoadError("it turns columns of one rank with those of another")
                node.cos, node.sin = node.cos[:, columns], node.sin[:, columns]
            for each in list(node.inputs()):
                self._ask(each, columns)
        node.width = len(columns)

    def _ask_heads(self, node: Attend, columns: Tensor) -> None:
        """Attention of a rank's heads. Example: 8 heads, 2 of keys and values on 4 ranks: rank 3 has heads 6 and 7, and
        keys and values of head 1."""
        rank, size = self._part.rank, self._part.size
        call = self.calls[node.layer]
        heads, kv, dim = call.heads.num_heads // size, call.heads.num_kv_heads, call.heads.head_dim
        first, own = (rank * kv // size, kv // size) if kv % size == 0 else (rank // (size // kv), 1)
        assert len(columns) == heads * dim, "heads are whole"
        self._ask(node.q, columns)
        shared = torch.arange(first * dim, (first + own) * dim)
        self._ask(node.k, shared)
        self._ask(node.v, shared)
        if node.sinks is not None:
            node.sinks = node.sinks[rank * heads : (rank + 1) * heads]
        self.calls[node.layer] = replace(call, heads=replace(call.heads, num_heads=heads, num_kv_heads=own))


def _part_of_vocabulary(layer: StoredLayer, part: Part) -> StoredLayer:
    """A rank's rows of a layer with a row for each token; the layer itself if some rank would have none, or rows that
    cannot be read alone: all ranks decide alike."""
    step, total = vocabulary_step(layer.outputs, part.size), layer.outputs
    if (part.size - 1) * step >= total:
        return layer
    try:
        parts = [layer.part(((r * step, min(total, (r + 1) * step)),)) for r in range(part.size)]
    except ModelLoadError:
        return layer
    return parts[part.rank]


def _columns(weight: Tensor | StoredLayer, own: tuple[int, int]) -> Tensor | StoredLayer:
    """Raises ModelLoadError if they cannot be read alone."""
    if isinstance(weight, StoredLayer):
        return weight.part(columns=(own,))
    return weight.detach()[:, slice(*own)].contiguous()


def _rows(weight: Tensor | StoredLayer, rows: Tensor) -> Tensor | StoredLayer:
    """``rows``: ascending. Raises ModelLoadError if they cannot be read alone."""
    return weight.part(ranges_of(rows)) if isinstance(weight, StoredLayer) else weight.detach()[rows]


def _ordered(entering: Sequence[tuple[int, Node]], traced: Traced) -> list[Node]:
    """All nodes, each behind those it is computed from."""
    found: dict[Node, None] = {}
    for root in (*(node for _, node in entering), traced.hidden, traced.logits):
        waiting: list[tuple[Node, bool]] = [(root, False)]
        while waiting:
            node, ready = waiting.pop()
            if node in found:
                continue
            if ready:
                found[node] = None
            else:
                waiting.append((node, True))
                waiting += [(each, False) for each in node.inputs()]
    return list(found)

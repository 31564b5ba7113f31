"""The weights that an assembler packs: linear layers in the kernels' order, norms and the output layer."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear as PackedLinear
from draftwise.kernels.handles import Norm as PackedNorm
from draftwise.kernels.split import SplitHead, Summed
from draftwise.models.base import LinearSite, SitePart
from draftwise.models.general.attention import LayerCall
from draftwise.models.general.nodes import (
    Linear,
    Node,
)  # fmt: skip
from draftwise.models.general.plans import LinearRows, Plan, id_of
from draftwise.models.general.rotations import Rotation
from draftwise.models.general.stored import FloatLayer, StoredLayer, StoredLinear, pack_stored
from draftwise.models.general.trace import Traced


class Packing:
    """Packs weights of a trace, and counts them.

    Args:
        known: frequencies of rotations, see `rotations.frequencies`.
        num_positions: that rotations are needed for.
        names: of modules, by the `id_of` of their whole weights.
        stored: modules whose packed weight may be taken over, by their layer.
    """

    def __init__(
        self,
        ops: Ops,
        calls: Sequence[LayerCall],
        known: Sequence[tuple[Tensor, float]],
        num_positions: int,
        traced: Traced,
        names: Mapping[Hashable, str],
        stored: Mapping[Hashable, StoredLinear],
    ) -> None:
        self._names, self._stored = names, stored
        self._ops, self._known, self._num_positions = ops, known, num_positions
        self._calls = list(calls)
        self._positions = traced.positions
        self._traced = traced
        self._plans: list[Plan] = []
        self._planned: set[Node] = set()
        self._reordered: dict[tuple[Node, bytes], Node] = {}
        self._rotations: list[Rotation] = []
        self.num_bytes = 0
        self.num_linears = 0
        self.num_mixtures = 0
        self._free: Callable[[Hashable], None] = lambda _: None
        self._packed_one: Callable[[Linear], None] = lambda _: None
        self.sites: list[LinearSite] = []
        self.embedding: Tensor | None = None

    def _packed(self, parts: list[LinearRows], paired: bool) -> PackedLinear:
        """The rows of ``parts`` below each other as one linear layer."""
        ops = self._ops
        biases = [part.bias() for part in parts]
        bias = None
        if any(b is not None for b in biases):
            empty = torch.zeros(0, dtype=ops.dtype, device=ops.device)
            pairs = zip(parts, biases, strict=True)
            bias = torch.cat(
                [empty.new_zeros(p.outputs) if b is None else b.detach().to(empty) for p, b in pairs]
            )
        site, inputs = self._site(parts), parts[0].layer.x.width
        stored = [(p.layer.weight, p.rows) for p in parts if isinstance(p.layer.weight, StoredLayer)]
        if stored:
            assert len(stored) == len(parts), "planned to be alike"
            ready = self._stored.get(stored[0][0]) if len(stored) == 1 and stored[0][1] is None else None
            if ready is not None and not paired:  # it is packed as it shall be
                handle = ready.packed
                self._let_go(parts)
            else:
                self._let_go(parts)
                handle = pack_stored(ops, stored, bias, paired=paired)
        else:
            weights = [part.weight() for part in parts]
            weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).contiguous()
            del weights
            self._let_go(parts)  # before it is packed: there is one copy beside the packed one
            pack = ops.pack_gate_up if paired else ops.pack_linear
            handle = pack(weight, bias)
        if parts[0].layer.summed:
            handle = Summed(handle)
        self.num_bytes += handle.num_bytes
        self.num_linears += len(parts)
        if site is not None:
            self.sites.append(LinearSite(handle, inputs, site))
        return handle

    def _let_go(self, parts: Sequence[LinearRows]) -> None:
        for part in parts:
            self._packed_one(part.layer)

    def _site(self, parts: list[LinearRows]) -> tuple[SitePart, ...] | None:
        """The sites of adapters, if every part is a module of the model."""
        found = []
        for part in parts:
            weight, cut = part.layer.weight, None
            if isinstance(weight, StoredLayer):
                weight, cut = weight.of or weight, weight.own
            name = self._names.get(id_of(weight))
            if name is None or (isinstance(weight, Tensor) and not _whole(weight)):
                return None
            found.append(SitePart(name, part.layer.width, part.rows, cut))
        return tuple(found)

    def _packed_norm(self, width: int, weight: Tensor | None, eps: float) -> PackedNorm:
        self.num_bytes += 4 * width
        values = torch.ones(width) if weight is None else weight.detach()
        return self._ops.pack_norm(values.to(device=self._ops.device, dtype=self._ops.dtype), eps)

    def _packed_head(self, layer: Linear, kept: Container[Hashable]) -> PackedLinear:
        """The output layer ``layer``. ``kept``: `id_of` of embeddings."""
        head, bias, ops = layer.weight, layer.bias, self._ops
        if layer.total:
            return SplitHead(self._packed_part(layer, kept), layer.total)
        if isinstance(head, StoredLayer):
            ready = self._stored.get(head)
            if ready is not None:
                return ready.packed
            if isinstance(head, FloatLayer) and bias is None:
                return ops.pack_head(head.floats().to(ops.device))
            return pack_stored(ops, [(head, None)], bias)
        head = head.detach()
        if bias is not None:
            return ops.pack_linear(head.contiguous(), bias.detach().to(head))
        table = self.embedding
        if table is not None and id_of(head) in kept and head.shape == table.shape:
            return ops.pack_tied_head(table)
        return ops.pack_head(head.contiguous())

    def _packed_part(self, layer: Linear, kept: Container[Hashable]) -> PackedLinear:
        """A rank's part of the output layer. Its numbers are floats, as those of the whole layer are."""
        ops, table = self._ops, self.embedding
        assert isinstance(layer.weight, StoredLayer), "what is divided is read in parts"
        if layer.bias is None and table is not None and id_of(layer.weight) in kept:
            return ops.pack_tied_head(table)
        weight = layer.weight.floats().to(ops.device)
        if layer.bias is None:
            return ops.pack_head(weight)
        return ops.pack_linear(weight, layer.bias.detach().to(weight))


def _whole(weight: Tensor) -> bool:
    """Whether it is all of the memory that it lies in: a part of a module's weight goes by no name."""
    return weight.numel() * weight.element_size() == weight.untyped_storage().nbytes()

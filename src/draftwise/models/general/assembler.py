"""Turns the graph of a trace into steps: with projections side by side where they read the same rows, sums in place,
and weights packed one after another, each given up by its model before the next."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from draftwise.kernels.base import Linear as PackedLinear
from draftwise.kernels.base import Norm as PackedNorm
from draftwise.kernels.base import Ops
from draftwise.kernels.routing import Activation
from draftwise.models.base import LinearSite, SitePart
from draftwise.models.general.assembled import AssembledParts, Pass, Run, Step, attended
from draftwise.models.general.attention import LayerCall
from draftwise.models.general.latent import Latent, latent_of
from draftwise.models.general.nodes import (
    Add,
    Attend,
    CannotAssemble,
    Embed,
    Given,
    LayerNorm,
    Linear,
    Mixture,
    Mul,
    Node,
    Norm,
    Scale,
    Select,
    Turn,
    Unary,
)  # fmt: skip
from draftwise.models.general.plans import LinearRows, Plan, alike, as_linear, id_of
from draftwise.models.general.rotations import Rotation, no_rotation, rotation_of
from draftwise.models.general.stored import StoredLayer, StoredLinear, pack_stored
from draftwise.models.general.trace import Traced
from draftwise.models.weights import Freed, release_freed_memory


class Assembler:
    """Turns a graph into steps.

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

    # ------------------------------------------------------------------------------------------ what to do

    def plan(self) -> None:
        """Decide how everything is computed. Nothing is packed yet.

        Raises:
            CannotAssemble: our operations do not compute it.
        """
        traced = self._traced
        for i in sorted(traced.entering):  # layer by layer, so that nothing recurses deeply
            self._want(traced.entering[i])
        self._want(traced.hidden)
        self._body = len(self._plans)
        head = traced.logits
        self._tail: list[tuple[str, float]] = []  # what is done to logits
        while isinstance(head, Scale):
            cap = head.x
            if isinstance(cap, Unary) and cap.function == "tanh" and isinstance(cap.x, Scale):
                if abs(cap.x.factor * head.factor - 1) > 1e-6:
                    raise CannotAssemble("its logits go through a tanh that is no soft cap")
                self._tail.insert(0, ("softcap", head.factor))
                head = cap.x.x
            else:
                self._tail.insert(0, ("scale", head.factor))
                head = head.x
        if not isinstance(head, Linear):
            raise CannotAssemble("its logits are not made by a linear layer")
        self._head = head
        self._want(head.x)

    def _want(self, node: Node) -> None:
        if node in self._planned:
            return
        lower = {
            Embed: self._embed, Linear: self._linear, Select: self._select, Norm: self._norm, Scale: self._scale,
            Unary: self._unary, LayerNorm: self._layer_norm, Mul: self._mul, Add: self._add, Attend: self._attend,
            Given: self._given, Mixture: self._mixture,
        }.get(type(node))  # fmt: skip
        if lower is None:
            raise CannotAssemble(f"a {type(node).__name__.lower()} stands where no operation takes it")
        plan = lower(node)  # type: ignore[operator]
        for each in plan.inputs:
            self._want(each)
        self._planned.add(node)
        self._plans.append(plan)

    def _given(self, node: Given) -> Plan:
        def absent(work: Pass) -> Tensor:
            raise AssertionError("it is given")

        return Plan(node, (), lambda: absent)

    def _embed(self, node: Embed) -> Plan:
        table = node.table.detach().contiguous()
        if not node.by_position:
            self.embedding = table

        def run(work: Pass) -> Tensor:
            batch = work.batch
            return work.ops.embedding(batch.positions if node.by_position else batch.token_ids, table)

        self.num_bytes += table.numel() * table.element_size()
        return Plan(node, (), lambda: run)

    def _linear(self, node: Linear) -> Plan:
        return self._product(node, node.x, [LinearRows(node)])

    def _select(self, node: Select) -> Plan:
        rows = as_linear(node)
        if rows is None:
            raise CannotAssemble("it takes some columns of something that is no linear layer")
        return self._product(node, rows.layer.x, [rows])

    def _product(self, node: Node, x: Node, parts: list[LinearRows]) -> Plan:
        def make() -> Run:
            weight = self._packed(parts, paired=False)
            return lambda work: work.ops.linear(work.results[x], weight)

        return Plan(node, (x,), make, tuple(part.layer for part in parts))

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
        self.num_bytes += handle.num_bytes
        self.num_linears += len(parts)
        if site is not None:
            self.sites.append(LinearSite(handle, inputs, site))
        return handle

    def _let_go(self, parts: Sequence[LinearRows]) -> None:
        for part in parts:
            self._packed_one(part.layer)

    def _site(self, parts: list[LinearRows]) -> tuple[SitePart, ...] | None:
        """What adapters may add to, if every part is a module of the model."""
        found = []
        for part in parts:
            weight = part.layer.weight
            name = self._names.get(id_of(weight))
            if name is None or (isinstance(weight, Tensor) and not _whole(weight)):
                return None
            found.append(SitePart(name, part.layer.width, part.rows))
        return tuple(found)

    def _norm(self, node: Norm) -> Plan:
        if node.group != node.width:
            raise CannotAssemble("heads are normalised outside of attention")

        def make() -> Run:
            norm = self._packed_norm(node.width, node.weight, node.eps)
            return lambda work: work.ops.rms_norm(work.results[node.x], norm)

        return Plan(node, (node.x,), make)

    def _layer_norm(self, node: LayerNorm) -> Plan:
        def make() -> Run:
            weight = torch.ones(node.width) if node.weight is None else node.weight.detach()
            bias = None if node.bias is None else node.bias.detach().to(self._ops.device)
            norm = self._ops.pack_layer_norm(weight.to(self._ops.device), bias, node.eps)
            self.num_bytes += 4 * node.width * (1 + (bias is not None))
            return lambda work: work.ops.layer_norm(work.results[node.x], norm)

        return Plan(node, (node.x,), make)

    def _packed_norm(self, width: int, weight: Tensor | None, eps: float) -> PackedNorm:
        self.num_bytes += 4 * width
        values = torch.ones(width) if weight is None else weight.detach()
        return self._ops.pack_norm(values.to(device=self._ops.device, dtype=self._ops.dtype), eps)

    def _scale(self, node: Scale) -> Plan:
        return Plan(node, (node.x,), lambda: self._scaling(node))

    def _scaling(self, node: Scale) -> Run:
        x, factor = node.x, node.factor
        if x in self._dying and not isinstance(x, Given):
            return lambda work: work.ops.scale(work.results[x], factor)
        return lambda work: work.ops.scale(work.ops.copy(work.results[x]), factor)

    def _unary(self, node: Unary) -> Plan:
        return Plan(node, (node.x,), lambda: lambda work: work.ops.unary(work.results[node.x], node.function))

    def _mul(self, node: Mul) -> Plan:
        gate, up = (node.a, node.b) if isinstance(node.a, Unary) else (node.b, node.a)
        if isinstance(gate, Unary) and gate.function in ("silu", "gelu_tanh"):
            parts = [as_linear(gate.x), as_linear(up)]
            found = [part for part in parts if part is not None]
            if len(found) == 2 and found[0].layer.x is found[1].layer.x and alike(found):
                return self._gated(node, found, gate.function)
        return Plan(
            node,
            (node.a, node.b),
            lambda: lambda work: work.ops.mul(work.results[node.a], work.results[node.b]),
        )

    def _gated(self, node: Mul, parts: list[LinearRows], function: str) -> Plan:
        x = parts[0].layer.x

        def make() -> Run:
            weight = self._packed(parts, paired=function == "silu")
            if function != "silu":
                activation = Activation("gelu_tanh")
                return lambda work: work.ops.gated(work.ops.linear(work.results[x], weight), activation)
            return lambda work: work.ops.silu_mul(work.ops.linear(work.results[x], weight))

        return Plan(node, (x,), make, tuple(part.layer for part in parts))

    def _add(self, node: Add) -> Plan:
        return Plan(node, (node.a, node.b), lambda: self._adding(node))

    def _mixture(self, node: Mixture) -> Plan:
        x, scores = node.x, node.scores

        def make() -> Run:
            weight, bias = scores.weight, scores.bias
            weight = (
                weight.floats().to(self._ops.device) if isinstance(weight, StoredLayer) else weight.detach()
            )
            dtype = self._ops.dtype
            router = self._ops.pack_router(
                weight.to(dtype).contiguous(), None if bias is None else bias.detach().to(weight).to(dtype)
            )
            experts = node.experts.pack(self._ops, node.routing, node.correction)
            for parameter in node.experts.module.parameters():
                self._free(id_of(parameter))
            self._packed_one(scores)
            self.num_bytes += router.num_bytes + experts.num_bytes
            self.num_mixtures += 1
            return lambda work: work.ops.experts(
                work.results[x], work.ops.logits(work.results[scores.x], router), experts
            )

        return Plan(node, (x, scores.x), make, (scores,))

    # ------------------------------------------------------------------------------------------ attention

    def _attend(self, node: Attend) -> Plan:
        call = self._calls[node.layer]
        dim = call.key_dim
        sinks = None if node.sinks is None else node.sinks.detach().float().contiguous()
        scale = call.scale
        parts: list[Node] = []
        turns: list[Turn | None] = []
        norms: list[Norm | None] = []
        for part in (node.q, node.k):
            if isinstance(part, Scale):
                scale *= part.factor
                part = part.x
            turns.append(part if isinstance(part, Turn) else None)
            part = part.x if isinstance(part, Turn) else part
            norms.append(part if isinstance(part, Norm) and part.group == dim else None)
            parts.append(part.x if isinstance(part, Norm) and part.group == dim else part)
        rotation = self._rotation(turns, dim)
        if norms == [None, None]:
            latent = latent_of(node, parts[1], rotation, call)
            if latent is not None:
                return self._attend_latents(node, latent, parts[0], rotation, scale, sinks)
        if not dim == call.value_dim == call.heads.head_dim or dim > 1024:
            raise CannotAssemble("its keys and values are of different sizes")
        columns = [
            (torch.arange(count)[:, None] * dim + rotation.order).flatten()
            for count in (call.heads.num_heads, call.heads.num_kv_heads)
        ]
        if len({norm.eps for norm in norms if norm is not None}) > 1:
            raise CannotAssemble("norms of queries and keys differ in what they add")
        linears = [as_linear(part) for part in (*parts, node.v)]
        found = [part for part in linears if part is not None]
        rope = self._numbered(rotation)

        def make_norm(norm: Norm | None) -> PackedNorm | None:
            if norm is None:
                return None
            weight = None if norm.weight is None else norm.weight.cpu()[rotation.order]
            return self._packed_norm(dim, weight, norm.eps)

        if len(found) == 3 and all(part.layer.x is found[0].layer.x for part in found) and alike(found):
            x = found[0].layer.x
            rows = [found[0].ordered(columns[0]), found[1].ordered(columns[1]), found[2]]

            def make_fused() -> Run:
                weight = self._packed(rows, paired=False)
                norm = make_norm(norms[0]), make_norm(norms[1])
                return lambda work: attended(
                    work, work.ops.linear(work.results[x], weight), call, node.layer, scale, rope, norm, sinks
                )

            return Plan(node, (x,), make_fused, tuple(part.layer for part in rows))
        apart = (self._in_order(parts[0], columns[0]), self._in_order(parts[1], columns[1]), node.v)

        def make() -> Run:
            norm = make_norm(norms[0]), make_norm(norms[1])

            def run(work: Pass) -> Tensor:
                q, k, v = (work.results[each] for each in apart)
                qkv = work.ops.concat(work.ops.concat(q, k), v)
                return attended(work, qkv, call, node.layer, scale, rope, norm, sinks)

            return run

        return Plan(node, apart, make)

    def _attend_latents(
        self, node: Attend, latent: Latent, q: Node, rotation: Rotation, scale: float, sinks: Tensor | None
    ) -> Plan:
        own = self._calls[node.layer]
        call = latent.call(own)
        self._calls[node.layer] = call
        rope = self._numbered(latent.rotation(rotation))
        x, shared = latent.shared.layer.x, latent.shared

        def make() -> Run:
            absorbed, out = latent.pack(self._ops, own.key_dim)
            common = self._packed([shared], paired=False)
            self._packed_one(latent.keys.layer)
            self.num_bytes += absorbed.num_bytes + out.num_bytes
            self.num_linears += 2

            def run(work: Pass) -> Tensor:
                ops = work.ops
                row = latent.stored(
                    ops,
                    ops.heads(work.results[q], absorbed),
                    ops.linear(work.results[x], common),
                    work.results[latent.latent],
                )
                found = attended(work, row, call, node.layer, scale, rope, (None, None), sinks)
                return ops.heads(found, out)

            return run

        return Plan(node, (q, latent.latent, x), make, (shared.layer, latent.keys.layer))

    def _rotation(self, turns: list[Turn | None], dim: int) -> Rotation:
        q, k = turns
        if q is None and k is None:
            return no_rotation(dim)
        if q is None or k is None:
            raise CannotAssemble("queries are rotated and keys are not, or the other way round")
        rotation, other = (rotation_of(turn, dim, self._positions, self._known) for turn in (q, k))
        if not rotation.same(other):
            raise CannotAssemble("queries and keys are rotated differently")
        return rotation

    def _numbered(self, rotation: Rotation) -> int:
        for i, known in enumerate(self._rotations):
            if torch.equal(known.inv_freq, rotation.inv_freq) and known.scaling == rotation.scaling:
                return i
        self._rotations.append(rotation)
        return len(self._rotations) - 1

    def _in_order(self, node: Node, columns: Tensor) -> Node:
        """The node with its columns in another order."""
        if torch.equal(columns, torch.arange(node.width)):
            return node
        key = (node, columns.numpy().tobytes())
        if key not in self._reordered:
            rows = as_linear(node)
            if rows is not None:
                ordered = rows.ordered(columns).rows
                assert ordered is not None
                made: Node = Select(node.width, rows.layer, ordered)
            elif isinstance(node, Norm) and node.group == node.width:
                weight = None if node.weight is None else node.weight[columns]
                made = Norm(node.width, self._in_order(node.x, columns), node.eps, node.group, weight)
            else:
                raise CannotAssemble("rotated columns would have to change places")
            self._reordered[key] = made
        return self._reordered[key]

    # ------------------------------------------------------------------------------------------- to steps

    def make(self, free: Callable[[Hashable], None]) -> AssembledParts:
        """Pack everything; ``free`` is told of weights that nobody wants any more, by their `id_of`."""
        self._free = free
        kept = {id_of(plan.node.table) for plan in self._plans if isinstance(plan.node, Embed)}
        users: dict[Hashable, list[Linear]] = {}  # of each weight, as often as it will be packed
        for each in (*(one for plan in self._plans for one in plan.layers), self._head):
            users.setdefault(id_of(each.weight), []).append(each)

        freed = Freed()

        def packed(layer: Linear) -> None:
            name = id_of(layer.weight)
            left = users[name]
            left.remove(layer)
            if isinstance(layer.weight, Tensor):
                freed.count(layer.weight)
                if layer not in left:
                    layer.weight = layer.weight.new_empty(0)
            else:
                freed.count(torch.empty((layer.width, layer.x.width), dtype=self._ops.dtype, device="meta"))
            if not left and name not in kept:
                free(name)

        self._packed_one = packed
        last = {each: i for i, plan in enumerate(self._plans) for each in (plan.node, *plan.inputs)}
        traced = self._traced
        for node in (traced.hidden, self._head.x):
            last[node] = len(self._plans)
        handle = self._packed_head(kept)  # first: while it is in memory twice, little else is packed
        packed(self._head)
        release_freed_memory()
        steps = []
        for i, plan in enumerate(self._plans):
            done = [each for each in dict.fromkeys((plan.node, *plan.inputs)) if last[each] == i]
            self._dying = set(done)
            self._before = self._plans[i - 1].node if i else None
            steps.append(Step(plan.node, plan.make(), done))
        self.num_bytes += handle.num_bytes
        ropes = [
            self._ops.pack_rope(each.inv_freq.to(self._ops.device), each.scaling, self._num_positions)
            for each in self._rotations
        ]
        entering: dict[Node, list[int]] = {}
        for number, node in traced.entering.items():
            entering.setdefault(node, []).append(number)
        return AssembledParts(
            self._calls, steps[: self._body], steps[self._body :], traced.hidden, traced.given, self._head.x, handle,
            tuple(self._tail), ropes, entering, self.embedding, self.num_bytes, self.num_linears, self.num_mixtures,
            tuple(self.sites),
        )  # fmt: skip

    def _packed_head(self, kept: Container[Hashable]) -> PackedLinear:
        """The output layer. ``kept``: `id_of` of embeddings."""
        head, bias, ops = self._head.weight, self._head.bias, self._ops
        if isinstance(head, StoredLayer):
            ready = self._stored.get(head)
            return ready.packed if ready is not None else pack_stored(ops, [(head, None)], bias)
        head = head.detach()
        if bias is not None:
            return ops.pack_linear(head.contiguous(), bias.detach().to(head))
        table = self.embedding
        if table is not None and id_of(head) in kept and head.shape == table.shape:
            return ops.pack_tied_head(table)
        return ops.pack_head(head.contiguous())

    def _adding(self, node: Add) -> Run:
        """Sums are added in place, into a result that nobody wants afterwards: best that of the residual, to which a
        product can be added where it is made."""
        places = [each for each in (node.b, node.a) if each in self._dying and not isinstance(each, Given)]
        if len(places) == 2 and places[0] is self._before:
            places.reverse()
        if node.a is node.b or not places:
            a, b = node.a, node.b
            return lambda work: work.ops.add(work.results[b], work.ops.copy(work.results[a]))
        target = places[0]
        source = node.a if target is node.b else node.b
        if (
            source is self._before and source not in self._dying
        ):  # would be added where it is made, and be gone
            return lambda work: work.ops.add(work.ops.copy(work.results[source]), work.results[target])
        return lambda work: work.ops.add(work.results[source], work.results[target])


def _whole(weight: Tensor) -> bool:
    """Whether it is all of the memory that it lies in: a part of a module's weight goes by no name."""
    return weight.numel() * weight.element_size() == weight.untyped_storage().nbytes()

"""Turns the graph of a trace into steps: with projections side by side where they read the same rows, sums in place,
and weights packed one after another, each given up by its model before the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from draftwise.kernels.routing import Activation
from draftwise.kernels.split import known_table, ranks_of
from draftwise.models.general.assembled import AssembledParts, Pass, Run, Step
from draftwise.models.general.attending import AttentionPlans
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
    Unary,
)  # fmt: skip
from draftwise.models.general.plans import LinearRows, Plan, alike, as_linear, id_of
from draftwise.models.general.stored import StoredLayer
from draftwise.models.weights import Freed, release_freed_memory


class Assembler(AttentionPlans):
    """Turns a graph into steps: the plans of all nodes but attention, and their order."""

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
                    raise CannotAssemble("its logits go through a tanh that is not a soft cap")
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
        if isinstance(node.table, StoredLayer):
            table = node.table.floats().to(self._ops.device)
        else:
            table = node.table.detach().contiguous()
        if node.bias is not None:
            table = table + node.bias.to(table)
        if node.total:
            ranks = ranks_of(self._ops)
            assert ranks is not None, "parts are those of ranks"
            known_table(ranks.part, self._ops, table, node.total)
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
            raise CannotAssemble("it takes some columns of something that is not a linear layer")
        return self._product(node, rows.layer.x, [rows])

    def _product(self, node: Node, x: Node, parts: list[LinearRows]) -> Plan:
        def make() -> Run:
            weight = self._packed(parts, paired=False)
            return lambda work: work.ops.linear(work.results[x], weight)

        return Plan(node, (x,), make, tuple(part.layer for part in parts))

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

    # ------------------------------------------------------------------------------------------- to steps

    def make(self, free: Callable[[Hashable], None]) -> AssembledParts:
        """Pack everything; ``free`` is told of weights that nobody wants any more, by their `id_of`."""
        self._free = free
        embeds = [plan.node for plan in self._plans if isinstance(plan.node, Embed)]
        kept = {id_of(node.table) for node in embeds if node.bias is None}
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
        handle = self._packed_head(
            self._head, kept
        )  # first: while it is in memory twice, little else is packed
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

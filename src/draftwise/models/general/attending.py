"""How attention of a trace is computed: what is rotated, normalised, scaled, and which columns stand in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.kernels.handles import Norm as PackedNorm
from draftwise.models.general.assembled import Pass, Run, attended
from draftwise.models.general.latent import Latent, latent_of
from draftwise.models.general.nodes import (
    Attend,
    CannotAssemble,
    Node,
    Norm,
    Scale,
    Select,
    Turn,
)  # fmt: skip
from draftwise.models.general.packing import Packing
from draftwise.models.general.plans import Plan, alike, as_linear
from draftwise.models.general.rotations import Rotation, no_rotation, rotation_of


class AttentionPlans(Packing):
    """The plans of attention."""

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
        if not dim == call.value_dim == call.heads.head_dim:
            raise CannotAssemble("its keys and values are of different sizes")
        self._check_width(dim)
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
        self._check_width(call.heads.head_dim)
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

    def _check_width(self, dim: int) -> None:
        """Raise CannotAssemble for heads that are too wide for the kernels."""
        most = self._ops.most_head_dim
        if most is not None and dim > most:
            raise CannotAssemble(f"its heads have {dim} values, and native kernels take at most {most}")

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

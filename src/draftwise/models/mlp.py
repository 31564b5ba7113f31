"""The part behind attention in a layer: a gated MLP, or a mixture of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Experts, Linear
from draftwise.kernels.ranks import Part
from draftwise.kernels.routing import SILU, Activation, Routing
from draftwise.kernels.split import summed, summed_experts
from draftwise.models.cuts import BY_INPUTS, Split, by_outputs
from draftwise.models.weights import QuantizedLinear, WeightPlan
from draftwise.quantization.weights import QuantizedWeight

LoadedLinear = tuple[Tensor | QuantizedLinear, Tensor | None]
"""A linear layer as declared: weight, bias."""


def load_linear(
    ops: Ops,
    plan: WeightPlan,
    weight: Tensor | QuantizedLinear,
    bias: Tensor | None = None,
    *,
    paired: bool = False,
    order: Tensor | None = None,
    expert: bool = False,
) -> Linear:
    """Read a linear layer from the checkpoint and pack it as what it is, a float or a quantised one.

    Args:
        weight: declared by ``plan.linear``, [outputs, inputs].
        bias: declared likewise, [outputs].
        paired: `Ops.pack_gate_up` rather than `Ops.pack_linear`.
        order: which output of the checkpoint stands where, int64 [outputs]; None: as they are.
        expert: of a mixture. Without `Ops.wide_experts` layers that are held as two become floats.
    """
    plan.fill(weight)
    if bias is not None:
        plan.fill(bias)
        bias = bias if order is None else bias[order.to(bias.device)]
    if isinstance(weight, QuantizedLinear):
        codes = weight.weight()
        if order is not None:
            codes = codes.in_order(order)
        if expert and codes.is_wide and not ops.wide_experts:
            codes = QuantizedWeight.of_values(codes.dequantize())
        return ops.pack_quantized(codes, bias, dynamic=weight.dynamic, paired=paired)
    if order is not None:
        weight = weight[order.to(weight.device)]
    return ops.pack_gate_up(weight, bias) if paired else ops.pack_linear(weight, bias)


def declare_linear(
    plan: WeightPlan,
    parts: Sequence[tuple[str, int]],
    columns: int,
    bias: bool = False,
    split: Split | None = None,
) -> LoadedLinear:
    """Declare a linear layer of parts (name of a weight, rows) stacked row by row. Biases are named like weights, with
    ``.bias`` for ``.weight``. With a ``split``, sizes are the rank's own; what is divided by inputs adds its bias on
    rank 0."""
    weight = plan.linear(parts, columns, split)
    if not bias:
        return weight, None
    names = [(name.removesuffix(".weight") + ".bias", rows) for name, rows in parts]
    if split is not None and split.inputs and plan.part.rank > 0:
        plan.ignored.update(name for name, _ in names)
        return weight, None
    return weight, plan.packed(names, None, split)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's experts; ``{i}`` is the layer, ``{e}`` the expert."""

    router: str = "model.layers.{i}.mlp.gate.weight"
    gate: str = "model.layers.{i}.mlp.experts.{e}.gate_proj.weight"
    up: str = "model.layers.{i}.mlp.experts.{e}.up_proj.weight"
    down: str = "model.layers.{i}.mlp.experts.{e}.down_proj.weight"
    shared_router: str = "model.layers.{i}.mlp.shared_expert_gate.weight"
    shared_gate: str = "model.layers.{i}.mlp.shared_expert.gate_proj.weight"
    shared_up: str = "model.layers.{i}.mlp.shared_expert.up_proj.weight"
    shared_down: str = "model.layers.{i}.mlp.shared_expert.down_proj.weight"
    correction: str | None = None


EXPERT_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of a model."""

    routing: Routing
    inner: int  # I of an expert
    layers: tuple[bool, ...]  # which layers have experts; the others have an MLP
    shared_inner: int = 0  # I of the shared expert, where there is one
    by_rank: bool = False  # each rank has some of the experts whole, not a part of each


class Mlp(ABC):
    """Packed weights."""

    @abstractmethod
    def run(self, ops: Ops, hidden: Tensor) -> Tensor:
        """``hidden`` [T, H] -> [T, H]."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes kept for it."""


@dataclass(frozen=True, slots=True)
class DenseMlp(Mlp):
    """One gated MLP."""

    gate_up: Linear  # [2 * I, H], gate first
    down: Linear  # [H, I]
    activation: Activation = SILU

    def run(self, ops: Ops, hidden: Tensor) -> Tensor:
        both = ops.linear(hidden, self.gate_up)
        inner = ops.silu_mul(both) if self.activation.kind == "silu" else ops.gated(both, self.activation)
        return ops.linear(inner, self.down)

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True)
class SparseMlp(Mlp):
    """A mixture of experts."""

    router: Linear  # [num_scores, H]
    experts: Experts

    def run(self, ops: Ops, hidden: Tensor) -> Tensor:
        return ops.experts(hidden, ops.logits(hidden, self.router), self.experts)

    @property
    def num_bytes(self) -> int:
        return self.router.num_bytes + self.experts.num_bytes


class SparseWeights:
    """One layer's experts as declared; packed one by one, so that no more than one is in memory as it was stored."""

    def __init__(
        self, config: ExpertsConfig, names: ExpertNames, plan: WeightPlan, i: int, hidden: int
    ) -> None:
        routing = config.routing
        self._routing, self._hidden = routing, hidden
        routers = [(names.router.format(i=i), routing.num_experts)]
        if routing.shared == "gated":
            routers.append((names.shared_router.format(i=i), 1))
        self._router = plan.packed(routers, hidden)
        self._correction = None
        if names.correction is not None:
            # float32 whatever the model's type: shares differ by less than bfloat16 tells apart
            name, size = names.correction.format(i=i), (routing.num_experts,)
            self._correction = plan.tensor(name, size, torch.float32)
        self._layers: list[tuple[LoadedLinear, LoadedLinear]] = []

        def declare(patterns: tuple[str, str, str], inner: int, e: int | None = None) -> None:
            gate, up, down = (pattern.format(i=i, e=e) for pattern in patterns)
            whole = e is not None and config.by_rank
            halves, ends = (None, None) if whole else (by_outputs(inner, inner), BY_INPUTS)
            pair = declare_linear(plan, [(gate, inner), (up, inner)], hidden, split=halves)
            self._layers.append((pair, declare_linear(plan, [(down, hidden)], inner, split=ends)))

        patterns, part = (names.gate, names.up, names.down), plan.part
        self._elsewhere = set(range(routing.num_experts)) - set(experts_of(part, config))
        for e in range(routing.num_experts):
            if e in self._elsewhere:
                gate, up, down = (pattern.format(i=i, e=e).removesuffix(".weight") for pattern in patterns)
                plan.skip([gate, up], config.inner, hidden)
                plan.skip([down], hidden, config.inner)
            else:
                declare(patterns, config.inner, e)
        if routing.shared != "none":
            declare((names.shared_gate, names.shared_up, names.shared_down), config.shared_inner)

    def pack(self, ops: Ops, plan: WeightPlan) -> SparseMlp:
        plan.fill(self._router)
        if self._correction is not None:
            plan.fill(self._correction)
        packed: list[tuple[Linear, Linear]] = []
        self._layers.reverse()
        for e in range(self._routing.num_layers):
            if e in self._elsewhere:
                packed.append(expert_of_another_rank(ops, self._hidden))
                continue
            # popped: a kernel that repacks then frees the source before the next one is packed
            up, down = self._layers.pop()
            gate_up = load_linear(ops, plan, *up, paired=True, expert=True)
            packed.append((gate_up, load_linear(ops, plan, *down, expert=True)))
            del up, down
        experts = summed_experts(plan.part, ops.pack_experts(packed, self._routing, self._correction))
        return SparseMlp(ops.pack_router(self._router), experts)


_NOTHING = 128
"""Inner size of an expert that stands for one of another rank: a group of the coarsest format."""


def experts_of(part: Part, config: ExpertsConfig) -> range:
    """Which experts a rank has: all, or of experts by rank as many as the others; the last rank may have fewer.

    Example: 10 experts on 4 ranks: 3, 3, 3 and 1.
    """
    count = config.routing.num_experts
    if not config.by_rank:
        return range(count)
    step = -(-count // part.size)
    return range(min(part.rank * step, count), min((part.rank + 1) * step, count))


def expert_of_another_rank(ops: Ops, hidden: int) -> tuple[Linear, Linear]:
    """An expert that gives zeros: rows that another rank's expert is chosen for go through it, and what the other makes
    of them is added. It is narrow, so that it costs little."""
    up = torch.zeros((2 * _NOTHING, hidden), dtype=ops.dtype, device=ops.device)
    down = torch.zeros((hidden, _NOTHING), dtype=ops.dtype, device=ops.device)
    return ops.pack_gate_up(up), ops.pack_linear(down)


class DenseWeights:
    """One layer's MLP as declared."""

    def __init__(self, gate_up: LoadedLinear, down: LoadedLinear, activation: Activation) -> None:
        self._gate_up: LoadedLinear | None = gate_up
        self._down: LoadedLinear | None = down
        self._activation = activation

    def pack(self, ops: Ops, plan: WeightPlan) -> DenseMlp:
        assert self._gate_up is not None and self._down is not None
        fused = self._activation.kind == "silu"
        gate_up = load_linear(ops, plan, *self._gate_up, paired=fused)
        self._gate_up = None
        down = summed(plan.part, load_linear(ops, plan, *self._down))
        self._down = None
        return DenseMlp(gate_up, down, self._activation)

"""Mixtures of experts in plain torch, over the linear layers of whatever `Ops`: the reference of the kernels.

Rows are grouped by expert, so that each expert's weights are read once. Which rows an expert gets is asked of the
device: such a pass cannot be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Experts, Heads, Linear
from draftwise.kernels.routing import Activation, Routing


class GroupedExperts(Experts):
    """``layers``: (gate and up, down) of each expert; ``correction`` [E] float32 or None."""

    __slots__ = ("correction", "layers", "routing")

    def __init__(
        self, layers: Sequence[tuple[Linear, Linear]], routing: Routing, correction: Tensor | None
    ) -> None:
        self.layers = tuple(layers)
        self.routing = routing
        self.correction = None if correction is None else correction.float()

    @property
    def num_bytes(self) -> int:
        return sum(up.num_bytes + down.num_bytes for up, down in self.layers)


class StackedHeads(Heads):
    """``weight`` [heads, in, out]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.transpose(1, 2).contiguous()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def run(self, x: Tensor) -> Tensor:
        """See `Ops.heads`."""
        count, inputs, outputs = self.weight.shape
        by_head = x.view(-1, count, inputs).transpose(0, 1)  # [heads, T, in]
        return torch.bmm(by_head, self.weight).transpose(0, 1).reshape(-1, count * outputs)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """``gate_up`` [T, 2 * I] = gate | up -> [T, I], of the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.kind == "silu":
        return F.silu(gate) * up
    if activation.kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    limit = activation.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * activation.alpha) * (up + 1)


def route(scores: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `Routing`.

    Args:
        scores: [T, routing.num_scores].
        correction: [E] float32 or None.

    Returns:
        Experts [T, num_chosen] int64 and their weights, float32.
    """
    count = routing.num_experts
    shares, judged = judged_shares(scores[:, :count].float(), routing, correction)
    chosen = _best(judged, routing.top_k)
    weights = shares.gather(1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    if routing.shared == "none":
        return chosen, weights
    ones = torch.ones_like(weights[:, :1])
    share = ones if routing.shared == "plain" else scores[:, count:].float().sigmoid()
    return torch.cat((chosen, torch.full_like(chosen[:, :1], count)), 1), torch.cat((weights, share), 1)


def judged_shares(scores: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of experts and the scores that choose them: ``scores`` [T, E] float32 -> [T, E] each, the second
    with the
    correction, and -inf for experts of groups that are not taken."""
    shares = scores.softmax(-1) if routing.scoring == "softmax" else scores.sigmoid()
    judged = shares if correction is None else shares + correction
    if routing.top_groups < routing.groups:
        in_groups = judged.view(len(judged), routing.groups, -1)
        of_groups = in_groups.topk(routing.group_rank, dim=-1).values.sum(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(1, _best(of_groups, routing.top_groups), True)
        judged = in_groups.masked_fill(~kept[:, :, None], -torch.inf).view_as(judged)
    return shares, judged


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row, the lower one first of equal ones: topk says nothing of those."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def mix(
    ops: Ops, x: Tensor, chosen: Tensor, weights: Tensor, experts: GroupedExperts, out: Tensor | None
) -> Tensor:
    """The weighted sum of what the chosen experts make of each row: `Ops.mix_experts`."""
    rows, per_row = chosen.shape
    order = chosen.flatten().sort(stable=True).indices  # places (row, k), by expert
    counts = torch.bincount(chosen.flatten(), minlength=len(experts.layers)).tolist()
    results = torch.empty((rows * per_row, x.shape[1]), dtype=torch.float32, device=x.device)
    start = 0
    for (up, down), count in zip(experts.layers, counts, strict=True):
        if count == 0:
            continue
        places = order[start : start + count]
        start += count
        taken = x.index_select(0, places.div(per_row, rounding_mode="floor"))
        inner = gated(ops.linear(taken, up), experts.routing.activation)
        results.index_copy_(0, places, ops.linear(inner, down).float())
    total = (results.view(rows, per_row, x.shape[1]) * weights[:, :, None]).sum(1)
    return total.to(x.dtype) if out is None else out.copy_(total)

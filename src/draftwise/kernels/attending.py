"""Operations whose attention is an `AttentionBackend`, and whose experts are a loop over linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.attention.base import AttentionBackend, attend
from draftwise.kernels.additions import Additions
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.handles import Experts, Heads, Linear
from draftwise.kernels.mixture import GroupedExperts, StackedHeads, gated, mix, route
from draftwise.kernels.routing import Activation, Routing
from draftwise.kernels.stacked import StackedAdditions
from draftwise.types import AttentionBatch


class AttendingOps(Ops):
    """On one device, in one dtype. They can be captured if their attention can."""

    def __init__(self, dtype: torch.dtype, device: torch.device, attention: AttentionBackend) -> None:
        self._dtype = dtype
        self._device = device
        self._attention = attention

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, ...],
        batch: AttentionBatch,
        heads: HeadShape,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        kv_heads, how = heads.num_kv_heads, self._attention
        if kv[0].shape[1] == kv_heads:  # keys are their own values: the same memory for both
            assert kv_heads == 1, "latent attention has one head"
            kv = tuple(part.expand(-1, 2, *part.shape[2:]) for part in kv)
        return attend(
            how,
            q,
            kv,
            batch,
            num_kv_heads=kv_heads,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            whole=whole,
        )

    def add_low_rank(self, x: Tensor, out: Tensor, additions: Additions, site: int) -> None:
        assert isinstance(additions, StackedAdditions)
        additions.add(x, out, site)

    def pack_experts(
        self,
        layers: Sequence[tuple[Linear, Linear]],
        routing: Routing,
        correction: Tensor | None = None,
    ) -> Experts:
        return GroupedExperts(layers, routing, correction)

    def pack_heads(self, weight: Tensor) -> Heads:
        return StackedHeads(weight)

    def heads(self, x: Tensor, weight: Heads, out: Tensor | None = None) -> Tensor:
        assert isinstance(weight, StackedHeads)
        result = weight.run(x)
        return result if out is None else out.copy_(result)

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        result = gated(gate_up, activation)
        return result if out is None else out.copy_(result)

    def experts(self, x: Tensor, scores: Tensor, experts: Experts, out: Tensor | None = None) -> Tensor:
        assert isinstance(experts, GroupedExperts)
        return mix(self, x, *route(scores, experts.routing, experts.correction), experts, out)

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, out: Tensor | None = None
    ) -> Tensor:
        assert isinstance(experts, GroupedExperts)
        return mix(self, x, chosen, weights, experts, out)

    @property
    def capturable(self) -> bool:
        return self._attention.reads_static

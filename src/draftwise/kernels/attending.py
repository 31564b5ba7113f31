"""Operations whose attention is an `AttentionBackend`."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.attention.base import AttentionBackend, attend
from draftwise.kernels.base import HeadShape, Ops
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
        out: Tensor | None = None,
    ) -> Tensor:
        kv_heads, how = heads.num_kv_heads, self._attention
        return attend(
            how, q, kv, batch, num_kv_heads=kv_heads, scale=scale, window=window, softcap=softcap, out=out
        )

    @property
    def capturable(self) -> bool:
        return self._attention.reads_static

"""The oracle: attention one request at a time, everything in float32, as plainly as it can be written."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.attention.base import AttentionBackend, request_keys, request_mask, request_slots
from draftwise.kv.storage import dequantized
from draftwise.types import AttentionBatch


class ReferenceAttention(AttentionBackend):
    """For tests of other backends. Slow, and obviously what `attention.base` says."""

    def run(
        self,
        q: Tensor,
        kv: tuple[Tensor, ...],
        batch: AttentionBatch,
        *,
        num_kv_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        rows, heads, dim = q.shape
        result = q.new_empty(rows, heads, dim) if out is None else out.view(rows, heads, dim)
        for r in range(len(batch.context_len_np)):
            start, end = int(batch.query_start_np[r]), int(batch.query_start_np[r + 1])
            slots = torch.from_numpy(request_slots(batch, r, 0, request_keys(batch, r))).to(q.device)
            mask = torch.from_numpy(request_mask(batch, r, 0, window, whole=whole)).to(q.device)  # [n, L]
            taken = dequantized(tuple(part[slots] for part in kv), torch.float32)  # [L, 2 * Hkv, D]
            taken[~mask.any(0)] = 0.0  # an unseen slot may hold anything: 0 * NaN is NaN
            keys, values = taken[:, :num_kv_heads], taken[:, num_kv_heads:]  # [L, Hkv, D]
            group = heads // num_kv_heads
            for h in range(heads):
                scores = q[start:end, h].float() @ keys[:, h // group].T * scale  # [n, L]
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                scores = scores.masked_fill(~mask, float("-inf"))
                if sinks is not None:
                    scores = torch.cat((scores, sinks[h].expand(len(scores), 1)), dim=1)
                weights = scores.softmax(-1)[:, : mask.shape[1]]
                result[start:end, h] = (weights @ values[:, h // group]).to(q.dtype)
        return result.view(rows, heads * dim)

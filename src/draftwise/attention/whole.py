"""Attention in which every row of a request sees all of its rows, those behind it, too: what drafters that fill in a
whole block at once were trained with (docs/algorithms/dflash.md). Plain torch, one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.attention.base import first_key, request_keys, request_slots
from draftwise.kv.storage import dequantized
from draftwise.types import AttentionBatch


def attend_whole(
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
) -> Tensor:
    """As `AttentionBackend.run`, for requests that are no trees. A row sees the committed keys and all rows of its
    request; row i stands at position context_len + i, and with a window W it sees keys at positions p with
    ``context_len + i - p < W``: the window cuts backwards alone.

    Example: context 10, rows at positions 10, 11, 12, window 3: row 0 sees keys 8 to 12, row 2 sees keys 10 to 12.
    """
    rows, heads, dim = q.shape
    result = q.new_empty(rows, heads * dim) if out is None else out
    group = heads // num_kv_heads
    for r in range(len(batch.context_len_np)):
        start, end = int(batch.query_start_np[r]), int(batch.query_start_np[r + 1])
        assert not batch.is_tree_np[r], "a tree says itself what its rows see"
        context, num_keys, low = int(batch.context_len_np[r]), request_keys(batch, r), first_key(batch, r)
        if window is not None:
            low = max(low, context - window + 1)
        slots = torch.from_numpy(request_slots(batch, r, low, num_keys)).to(q.device)
        taken = dequantized(tuple(part[slots] for part in kv), torch.float32)  # [L, 2 * Hkv, D]
        query = q[start:end].float().view(end - start, num_kv_heads, group, dim)
        scores = torch.einsum("nhgd,lhd->nhgl", query, taken[:, :num_kv_heads]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            positions = torch.arange(low, num_keys, device=q.device)
            places = torch.arange(context, context + end - start, device=q.device)
            seen = places[:, None] - positions < window
            scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        if sinks is not None:
            own = sinks.float().view(1, num_kv_heads, group, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, own), dim=-1)
        weights = scores.softmax(-1)[..., : num_keys - low]
        attended = torch.einsum("nhgl,lhd->nhgd", weights, taken[:, num_kv_heads:])
        result[start:end] = attended.reshape(end - start, heads * dim).to(q.dtype)
    return result

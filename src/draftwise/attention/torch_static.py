"""Attention over `AttentionBatch.static` in plain torch: what a captured pass computes, without a kernel.

Every key that a request could have is gathered and masked: it is here to show what is right, on any device, and to test
captured passes where there is no GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.attention.base import AttentionBackend
from draftwise.attention.torch_grouped import TorchGroupedAttention
from draftwise.kv.storage import dequantized
from draftwise.types import AttentionBatch, StaticRows


class TorchStaticAttention(AttentionBackend):
    """Batches without `AttentionBatch.static` go to `TorchGroupedAttention`."""

    reads_static = True

    def __init__(self) -> None:
        self._grouped = TorchGroupedAttention()

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
        static = batch.static
        if static is None:
            return self._grouped.run(
                q,
                kv,
                batch,
                num_kv_heads=num_kv_heads,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                out=out,
                whole=whole,
            )
        requests, n = static.context.shape[0], static.rows
        heads, dim = q.shape[1:]
        size = batch.block_size
        keys = torch.arange(static.tables.shape[1] * size, device=q.device)  # [L]
        slots = static.tables[:, keys // size].long() * size + keys % size  # [R, L]
        taken = tuple(part[slots] for part in kv)
        entries = dequantized(taken, torch.float32)  # [R, L, 2 * Hkv, D]
        mask = _mask(static, keys, window, whole)  # [R, N, L]
        group = heads // num_kv_heads
        query = q.reshape(requests, n, num_kv_heads, group, dim).float()
        scores = torch.einsum("rnhgd,rlhd->rnhgl", query, entries[:, :, :num_kv_heads]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[:, :, None, None], float("-inf"))
        values = entries[:, :, num_kv_heads:]
        # an unseen slot may hold anything: 0 * NaN would be seen by all
        values = torch.where(mask.any(dim=1)[:, :, None, None], values, 0.0)
        if sinks is not None:
            own = sinks.float().view(1, 1, num_kv_heads, group, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, own), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        attended = torch.einsum("rnhgl,rlhd->rnhgd", weights, values)
        result = attended.reshape(requests * n, heads * dim).to(q.dtype)
        return result if out is None else out.copy_(result)


def _mask(static: StaticRows, keys: Tensor, window: int | None, whole: bool) -> Tensor:
    """Which keys each row sees, bool [R, N, L]; see `attention.base`."""
    requests, n = static.context.shape[0], static.rows
    context = static.context.long()[:, None, None]
    row = torch.arange(n, device=keys.device)[None, :, None]
    bits = static.ancestors.view(requests, n, 1)
    own = keys[None, None] - context  # [R, 1, L] the tree's row that stands at each key
    shifts = own.clamp(0, 63)
    in_tree = ((bits >> shifts) & 1).bool() & (own >= 0) & (own < 64)
    tree = static.is_tree.bool()[:, None, None]
    mask = torch.where(tree, (own < 0) | in_tree, own < n if whole else own <= row)
    mask = mask & (keys >= static.first_key.long()[:, None, None])
    if window is not None:
        # a row of a tree stands at context + its ancestors before it; so does, to a row that sees it, each of these
        places = torch.arange(64, device=keys.device)
        depths = ((bits >> places) & 1).cumsum(-1) - 1  # [R, N, 64]
        of_keys = torch.where(tree & (own >= 0), context + depths.gather(2, shifts.expand(-1, n, -1)), keys)
        of_rows = torch.where(tree, context + depths[..., -1:], context + row)
        mask = mask & (of_rows - of_keys < window)
    return mask

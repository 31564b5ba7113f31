"""Attention with a gate for what it gives (Qwen3-Next, Qwen3.5): ``o(attended * sigmoid(gate))``, number by number. The
gate comes from the layer's input through rows of the q projection: each head has D rows of its query, then D of its
gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gated_orders(
    dims: Sequence[int] | None, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Which row of q (with gates), k and v stacked is which of q, k and v without gates, int64 [(Hq + 2 * Hkv) * D],
    and which is which of the gates, int64 [Hq * D].

    Args:
        dims: order of the dimensions of each head of q and k; None: as the checkpoint has them. Gates are not rotated
            and keep theirs.

    Example: 2 heads and one K/V head of 2: rows are q0 q0 g0 g0 q1 q1 g1 g1 k k v v. Orders: 0, 1, 4, 5, 8, 9, 10, 11
    and 2, 3, 6, 7; with ``dims`` (1, 0) the first is 1, 0, 5, 4, 9, 8, 10, 11.
    """
    inside = torch.arange(head_dim) if dims is None else torch.tensor(dims)
    starts = 2 * head_dim * torch.arange(heads)[:, None]
    keys = 2 * head_dim * heads + head_dim * torch.arange(kv_heads)[:, None] + inside
    values = (2 * heads + kv_heads) * head_dim + torch.arange(kv_heads * head_dim)
    queries = (starts + inside).flatten()
    return torch.cat((queries, keys.flatten(), values)), (
        starts + head_dim + torch.arange(head_dim)
    ).flatten()

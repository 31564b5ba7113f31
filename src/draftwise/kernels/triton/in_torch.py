"""What the launchers of `.rows` do, in plain torch on the same handles: for a kernel that is not right on a machine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kv.storage import narrowed, quantized


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """As `.rows.rms_norm`."""
    added = x if residual is None else residual.add_(x)
    result = F.rms_norm(added.float(), weight.shape, weight, eps)
    return result.to(x.dtype) if out is None else out.copy_(result)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As `.rows.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=1)
    result = F.silu(gate) * up
    return result.to(gate_up.dtype) if out is None else out.copy_(result)


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """As `.rows.gather_rows`."""
    return table.index_select(0, index) if out is None else torch.index_select(table, 0, index, out=out)


def rope_write(
    qkv: Tensor,
    heads: HeadShape,
    angles: Tensor,
    kv: tuple[Tensor, ...],
    slots: Tensor,
    q_norm: tuple[Tensor, float] | None = None,
    k_norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `.rows.rope_write`."""
    num_q, num_kv, dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    packed = qkv.view(-1, num_q + 2 * num_kv, dim)
    turned = packed[:, : num_q + num_kv].float()
    for norm, part in ((q_norm, turned[:, :num_q]), (k_norm, turned[:, num_q:])):
        if norm is not None:
            part.copy_(F.rms_norm(part, norm[0].shape, *norm))
    cos, sin = angles[:, None, 0], angles[:, None, 1]  # [T, 1, D / 2]
    a, b = turned.chunk(2, dim=2)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2).to(qkv.dtype)
    entries = torch.cat((turned[:, num_q:], packed[:, num_q + num_kv :]), dim=1)
    written = quantized(entries) if len(kv) == 2 else (narrowed(entries, kv[0].dtype),)
    for part, values in zip(kv, written, strict=True):
        part.index_copy_(0, slots, values)
    queries = turned[:, :num_q].contiguous()
    return queries if out is None else out.copy_(queries)

"""What torch's flash attention computes, in plain torch, and what it refuses: it has no CPU form."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    most_rows: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> Tensor:
    """``aten::_flash_attention_forward`` of sequences one behind the other: [T, Hq, D]."""
    dim = query.shape[2]
    assert query.dtype in (torch.float16, torch.bfloat16) and key.dtype is value.dtype is query.dtype
    assert dim % 8 == 0 and dim <= 256 and key.shape == value.shape and key.shape[2] == dim
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "the last dimension must be dense"
    assert query_start.dtype is key_start.dtype is torch.int32
    assert query_start.is_contiguous() and key_start.is_contiguous()
    rows, keys = query_start.diff(), key_start.diff()
    assert int(query_start[0]) == int(key_start[0]) == 0 and int(query_start[-1]) == len(query)
    assert int(key_start[-1]) == len(key)
    assert (most_rows, most_keys) == (int(rows.max()), int(keys.max())) and bool((rows <= keys).all())
    assert dropout == 0.0 and not debug and window_size_right == 0 and causal == (window_size_left < 0)
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for r, (n, count) in enumerate(zip(rows.tolist(), keys.tolist(), strict=True)):
        q = query[int(query_start[r]) :][:n].float().transpose(0, 1)  # [Hq, n, D]
        k, v = (
            part[int(key_start[r]) :][:count].float().repeat_interleave(group, 1).transpose(0, 1)
            for part in (key, value)
        )
        behind = torch.arange(count - n, count)[:, None] - torch.arange(count)  # the last row at the last key
        hidden = (behind < 0) | ((behind > window_size_left) if window_size_left >= 0 else False)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        out[int(query_start[r]) :][:n] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return out


def mm_wide(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """``aten::mm`` with results of another type."""
    assert a.dtype is b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    product = a.to(out_dtype) @ b.to(out_dtype)
    return product if out is None else out.copy_(product)

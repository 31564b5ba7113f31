"""Attention in plain torch with as few calls per layer as the batch allows.

A pass is cut once into *tasks*, kept in ``AttentionBatch.cache`` and run by every layer:

* a **single**: one request (or a piece of a long prompt chunk) through one scaled-dot-product call. Its keys are a
  slice of the cache, without any copy, when its blocks stand in a row, as those of a lone request mostly do;
* a **group**: many requests with few rows each (decodes, verifications, trees), padded to a rectangle, gathered and
  attended with one call each.

Padding reads the request's own first visible key, so that nothing of another request can leak in, not even NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.attention.base import AttentionBackend
from draftwise.attention.torch_plan import Group, Single, Task, plan_tasks, single_mask
from draftwise.attention.whole import attend_whole
from draftwise.kv.storage import dequantized
from draftwise.types import AttentionBatch

_GATHER_BYTES = 2 << 20  # keys and values gathered at once on a CPU: they are read back from its cache


class TorchGroupedAttention(AttentionBackend):
    """The default backend in plain torch; float32 results of a batch equal single ones within 1e-5."""

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
        if whole:
            return attend_whole(
                q,
                kv,
                batch,
                num_kv_heads=num_kv_heads,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                out=out,
            )
        plans = batch.cache.get("torch_grouped")
        if plans is None:
            plans = batch.cache["torch_grouped"] = {}
        assert isinstance(plans, dict)
        tasks: Sequence[Task] | None = plans.get((window, q.dtype))
        if tasks is None:
            tasks = plans[(window, q.dtype)] = plan_tasks(batch, window, q.dtype, q.device)
        rows, heads, dim = q.shape
        call = _Call(kv, num_kv_heads, scale, softcap, batch, window, sinks)
        if len(tasks) == 1 and out is None:
            task = tasks[0]
            if isinstance(task, Single):
                return _run_single(task, q, call)
            if task.row_start >= 0:
                return _run_group(task, q, call)
        result = q.new_empty((rows, heads * dim)) if out is None else out
        for task in tasks:
            if isinstance(task, Single):
                result[task.start : task.end] = _run_single(task, q[task.start : task.end], call)
                continue
            part = _run_group(task, q, call)
            if task.row_start >= 0:
                result[task.row_start : task.row_start + part.shape[0]] = part
            else:
                assert task.places is not None and task.rows is not None
                result.index_copy_(0, task.rows, part.index_select(0, task.places))
        return result


# ------------------------------------------------------------------------------------------------ running


@dataclass(slots=True)
class _Call:
    """Data that all tasks of one layer share."""

    kv: tuple[
        Tensor, ...
    ]  # entries [slots, 2 * Hkv, D], with scales [slots, 2 * Hkv] behind if they are codes
    num_kv_heads: int
    scale: float
    softcap: float | None
    batch: AttentionBatch
    window: int | None
    sinks: Tensor | None  # [Hq]


def _attend(
    call: _Call,
    q: Tensor,  # [R, Hq, n, D]
    keys: Tensor,  # [R, Hkv, L, D]
    values: Tensor,
    mask: Tensor | None = None,  # [.., n, L], 0 or -inf
    causal: bool = False,
) -> Tensor:
    """[R, Hq, n, D]"""
    heads, kv_heads = q.shape[1], keys.shape[1]
    if call.softcap is None and call.sinks is None:
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=heads != kv_heads
        )
    if heads != kv_heads:
        keys = keys.repeat_interleave(heads // kv_heads, dim=1)
        values = values.repeat_interleave(heads // kv_heads, dim=1)
    scores = (q.float() @ keys.float().transpose(2, 3)) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    elif mask is not None:
        scores += mask
    if call.sinks is not None:
        # q [R, Hq, n, D] of all heads, or [R, Hkv, Hq / Hkv, D] of one row whose heads became rows: the sinks likewise
        sinks = call.sinks.float().view(heads, -1).expand(heads, scores.shape[2])
        scores = torch.cat([scores, sinks[None, :, :, None].expand(*scores.shape[:3], 1)], -1)
        return (scores.softmax(-1)[..., :-1] @ values.float()).to(q.dtype)
    return (scores.softmax(-1) @ values.float()).to(q.dtype)


def _run_single(task: Single, q: Tensor, call: _Call) -> Tensor:
    """Attend with a task's rows ``q`` [n, Hq, D]: [n, Hq * D]."""
    kv, num_kv_heads = call.kv, call.num_kv_heads
    plain = kv[0].dtype is q.dtype
    if task.key_index is None:
        count = task.num_keys - task.first_key
        parts = tuple(part.narrow(0, task.key_start, count) for part in kv)
    elif plain:
        if task.scratch is None:
            task.scratch = kv[0].new_empty((task.num_keys - task.first_key, *kv[0].shape[1:]))
        parts = (torch.index_select(kv[0], 0, task.key_index, out=task.scratch),)
    else:
        parts = tuple(part.index_select(0, task.key_index) for part in kv)
    taken = parts[0] if plain else dequantized(parts, q.dtype)
    by_head = taken.transpose(0, 1).unsqueeze(0)  # [1, 2 * Hkv, L, D]
    keys = by_head.narrow(1, 0, num_kv_heads)
    values = by_head.narrow(1, num_kv_heads, num_kv_heads)
    n, heads, dim = q.shape
    if n == 1 and not task.needs_mask:
        # the query heads of one key/value head become rows: each key is then read once, not once per query head
        grouped = q.view(1, num_kv_heads, heads // num_kv_heads, dim)
        return _attend(call, grouped, keys, values).reshape(1, heads * dim)  # on a GPU it may lie otherwise
    mask = task.mask
    if task.needs_mask and mask is None:
        mask = single_mask(call.batch, task, call.window, q.dtype, q.device)
    attended = _attend(call, q.transpose(0, 1).unsqueeze(0), keys, values, mask, task.causal)
    return attended.squeeze(0).transpose(0, 1).reshape(n, heads * dim)


def _run_group(task: Group, q: Tensor, call: _Call) -> Tensor:
    """Attend with a group's rows: [R * n, Hq * D], padding included."""
    kv, num_kv_heads = call.kv, call.num_kv_heads
    plain = kv[0].dtype is q.dtype
    count, n, num_keys = task.num_requests, task.num_rows, task.num_keys
    _, heads, dim = q.shape
    index = task.row_index
    mine = q.narrow(0, task.row_start, count * n) if index is None else q.index_select(0, index)
    per_request = num_keys * kv[0][0].numel() * q.element_size()
    at_once = count if q.device.type != "cpu" else min(count, max(1, _GATHER_BYTES // per_request))
    if plain and task.scratch is None:
        task.scratch = kv[0].new_empty((at_once * num_keys, *kv[0].shape[1:]))
    outputs = []
    for start in range(0, count, at_once):
        size = min(at_once, count - start)
        chosen = task.key_index.narrow(0, start * num_keys, size * num_keys)
        if plain:
            assert task.scratch is not None
            taken = task.scratch if size == at_once else task.scratch.narrow(0, 0, size * num_keys)
            torch.index_select(kv[0], 0, chosen, out=taken)
        else:
            taken = dequantized(tuple(part.index_select(0, chosen) for part in kv), q.dtype)
        by_head = taken.view(size, num_keys, 2 * num_kv_heads, dim).transpose(1, 2)  # [size, 2 * Hkv, L, D]
        keys = by_head.narrow(1, 0, num_kv_heads)
        values = by_head.narrow(1, num_kv_heads, num_kv_heads)
        rows = mine.narrow(0, start * n, size * n)
        mask = task.mask.narrow(0, start, size)
        if n == 1:
            attended = _attend(
                call, rows.view(size, num_kv_heads, heads // num_kv_heads, dim), keys, values, mask
            )
        else:
            by_row = rows.view(size, n, heads, dim).transpose(1, 2)
            attended = _attend(call, by_row, keys, values, mask).transpose(1, 2)
        outputs.append(attended.reshape(size * n, heads * dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

"""Launchers of the kernels that treat rows one by one. Sizes of blocks depend on shapes of the model alone."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kernels.triton import device
from draftwise.kernels.triton.availability import LAUNCH
from draftwise.kernels.walk import Walk
from draftwise.kv.storage import LARGEST

_BLOCK = 1024


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n. Example: 5 -> 8."""
    return 1 << max(0, n - 1).bit_length()


def as_bytes(cache: Tensor) -> Tensor:
    """A cache of fp8 as bytes: kernels take these apart themselves (`device.fp8`). Others as they are."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of ``block`` elements: 16 elements to a thread, two loads of 16 bytes of
    bfloat16. Example: 4096 -> 8."""
    return min(16, max(1, block // 512))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """``x`` [T, H] (rows may be strided), ``weight`` [H] float32 -> [T, H]; ``residual`` [T, H]: += x in place, and
    the sum is what is normalised."""
    count, size = x.shape
    result = torch.empty((count, size), dtype=x.dtype, device=x.device) if out is None else out
    if count:
        assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
        added, block = x if residual is None else residual, power_of_two(size)
        flags = {"ADD": residual is not None, "BLOCK": block, "num_warps": warps_for(block)}
        device.rows.rms_norm[(count,)](
            x, added, weight, result, x.stride(0), result.stride(0), size, eps, **flags, **LAUNCH
        )
    return result


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``gate_up`` [T, 2 * I] -> silu(gate) * up, [T, I]."""
    count, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty((count, size)) if out is None else out
    if count:
        block = min(_BLOCK, power_of_two(size))
        device.rows.silu_mul[(count, -(-size // block))](
            gate_up, result, size, gate_up.stride(0), BLOCK=block, **LAUNCH
        )
    return result


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """``table`` [N, ...] dense, ``index`` [T] int64 -> [T, ...]."""
    assert table.is_contiguous() and index.is_contiguous()
    count = index.shape[0]
    result = table.new_empty((count, *table.shape[1:])) if out is None else out
    size = table[0].numel()
    if count and size:
        block = min(_BLOCK, power_of_two(size))
        device.rows.gather_rows[(count, -(-size // block))](table, index, result, size, BLOCK=block, **LAUNCH)
    return result


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
    """As `Ops.qkv_rope_write`; ``angles`` [T, 2, D / 2] float32: cosines, sines; norms: weight [D] float32, epsilon."""
    num_q, num_kv, dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    count = qkv.shape[0]
    assert qkv.stride(1) == 1 and angles.is_contiguous() and slots.is_contiguous() and kv[0].is_contiguous()
    queries = qkv.new_empty((count, num_q, dim)) if out is None else out
    if count:
        norms = (*(q_norm or (angles, 0.0)), *(k_norm or (angles, 0.0)))
        written = (queries, as_bytes(kv[0]), kv[-1])
        device.rows.rope_write[(count, num_q + 2 * num_kv)](
            qkv,
            angles,
            *norms,
            *written,
            slots,
            qkv.stride(0),
            HEADS=num_q,
            KV_HEADS=num_kv,
            DIM=dim,
            HALF_PAD=power_of_two(dim // 2),
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            LARGEST=LARGEST.get(kv[0].dtype, 0.0),
            CLAMP=kv[0].dtype is torch.float16,
            num_warps=1,  # of the 128 threads of the usual four, 64 would do what the others do
            **LAUNCH,
        )
    return queries


def compact_paths(pool: Tensor, slots: Tensor, roots: Tensor, walk: Walk) -> None:
    """Move the entries of accepted paths up behind their roots, in all layers, without knowing the paths on the host.

    Args:
        pool: [layers, slots, ...] dense; changed in place.
        slots: [T] int64, slots of a pass's rows.
        roots: [R] int64, rows of the requests' roots; their nodes follow.
        walk: the accepted paths of R requests.
    """
    requests, nodes = roots.shape[0], walk.num_nodes
    if not requests or not nodes or not pool.numel():
        return
    assert pool.is_contiguous() and walk.packed.is_contiguous() and walk.packed.shape[0] == requests
    size = pool[0, 0].numel()
    block = min(256, power_of_two(size))
    sizes, flags = (size, pool.stride(0), nodes), {"NODES_PAD": power_of_two(nodes), "BLOCK": block}
    device.rows.compact_paths[(requests, pool.shape[0], -(-size // block))](
        pool, slots, roots, walk.packed, *sizes, **flags, **LAUNCH
    )

"""Sizes that attention's kernels run with (`kernels.triton.attention`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftwise.attention.base import MAX_TREE_ROWS
from draftwise.types import AttentionBatch

_FREE_PROGRAMS: Final = 1024
"""The number of programs that a free tiling looks for: about eight for each multiprocessor of a large device."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes that decide the order of every sum: fixed for a backend. ``partition`` is a multiple of ``block_n``."""

    block_m: int = 16  # lanes (rows x query heads of a group) of a program, if a group is not wider
    block_n: int = 64  # positions of a tile
    partition: int = 256  # positions of a partition
    slots: int = 32  # of a row: with one key/value head and one request as many programs
    fixed: bool = True  # by `partial_attention`; else by `split_attention`, whose partitions are tiles
    num_warps: int = 4
    num_stages: int = 3  # of `split_attention`: tiles that are loaded ahead, pages a step before
    most_registers: int | None = None  # of a thread

    def __post_init__(self) -> None:
        assert self.block_m >= 16 and self.block_n >= 16 and self.partition % self.block_n == 0
        assert self.fixed or self.partition == self.block_n


def free_tiling(lanes: int, tasks_of_one_row: int, num_keys: int, dim: int, *, hopper: bool) -> Tiling:
    """What `split_attention` runs with, of 16-bit numbers: the best of some sizes that were measured on an H200.

    Args:
        lanes: rows x query heads of a group of the request with the most rows. Few lanes are done by one warp, which
            waits for no other one: many such programs share a multiprocessor. Requests of 1 and of 8 rows have the
            same tiles if a group has up to four heads: verification then has the bits of plain decoding.
        tasks_of_one_row: requests x key/value heads.
        num_keys: of the longest context.
        dim: numbers of a head.
        hopper: whether the device has products of 64 rows that take no registers (compute capability 9.0).

    Example: 32 query heads on 8, contexts of 2048: one request has 32 slots, which are 256 programs; 16 requests have
    8 each, 64 two. Where contexts may be long there are more, so that one long request is done by many programs.
    """
    slots = _FREE_PROGRAMS // max(1, tasks_of_one_row)
    least = 1 if num_keys <= 8192 else 8
    slots = max(least, min(32, 1 << max(0, slots.bit_length() - 1)))
    if lanes <= 32:
        return Tiling(16, 32, 32, slots, fixed=False, num_warps=1 if dim <= 128 else 2)
    # with fewer registers for each thread, more programs share a multiprocessor
    return Tiling(64, 32, 32, slots, fixed=False, most_registers=128 if hopper and dim <= 128 else None)


def tiling_for(q: Tensor, batch: AttentionBatch, num_kv_heads: int, window: int | None) -> Tiling:
    """The tiling of a batch for which none was given."""
    if q.dtype is torch.float32 or (window is not None and window < MAX_TREE_ROWS):
        # the other kernel has too few registers; or a node on a row's path may be out of its window
        return Tiling()
    group, dim, static = q.shape[1] // num_kv_heads, q.shape[2], batch.static
    if static is not None:
        lanes, requests, keys = static.rows * group, static.context.shape[0], static.max_keys
    else:
        counts = np.diff(batch.query_start_np)
        lanes, requests = int(counts.max(initial=1)) * group, len(counts)
        keys = int((batch.context_len_np + counts).max(initial=1))
    return free_tiling(lanes, requests * num_kv_heads, keys, dim, hopper=_is_hopper(q.device))


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9

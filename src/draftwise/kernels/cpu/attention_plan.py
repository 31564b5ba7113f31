"""How the native library cuts a call of attention among threads: the very plan that it works by, to be counted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwise.kernels.cpu.attention import DTYPES, KV_DTYPES, AttentionCall, BatchView, fill_view
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.types import AttentionBatch

PARTITION = 256
"""Consecutive positions that are summed before they are merged with others; as in ``csrc/attention.h``."""

TASKS_PER_THREAD = 4
"""Tasks that a thread claims one by one; in a team each has one."""


class Piece(NamedTuple):
    """Rows and partitions that one thread does in one go. ``cut``: others do the other partitions of these rows."""

    task: int
    request: int
    first_row: int  # of the request
    rows: int
    head: int  # key/value head
    begin: int  # partitions [begin, end)
    end: int
    cut: bool


class Plan(NamedTuple):
    """``workspace``: bytes for what cut pieces leave to be merged."""

    pieces: tuple[Piece, ...]
    workspace: int


def attention_plan(
    library: NativeLibrary,
    batch: AttentionBatch,
    *,
    heads: tuple[int, int, int],
    window: int | None = None,
    threads: int = 1,
    tasks_per_thread: int = TASKS_PER_THREAD,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """The plan of a call, however small; a real call below some 65,000 products is left to one thread.

    Args:
        heads: query heads, key/value heads, size of a head.
        window: positions that a row sees; None: all.
    """
    q_heads, kv_heads, dim = heads
    require(kv_heads > 0 and q_heads % kv_heads == 0, "as many query heads for each head of the cache")
    require(threads > 0 and tasks_per_thread > 0, "at least one thread and task")
    run = library.function(
        "dw_attention_plan",
        ctypes.c_int64,
        [
            ctypes.c_int,
            ctypes.POINTER(AttentionCall),
            ctypes.POINTER(BatchView),
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_int64),
        ],
    )
    view = BatchView()
    kept = fill_view(view, batch)
    call = AttentionCall(
        None, None, None, None, 0, q_heads, kv_heads, dim, window or 0, KV_DTYPES[kv_dtype], 1.0, 0.0
    )
    bytes_ = ctypes.c_int64()

    def ask(table: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> int:
        count: int = run(
            DTYPES[dtype], call, view, threads, tasks_per_thread, table.ctypes.data, len(table), bytes_
        )
        return count

    table = np.zeros((ask(np.zeros((0, 8), np.int32)), 8), np.int32)
    ask(table)
    del kept
    pieces = tuple(
        Piece(task, request, first, rows, head, begin, end, bool(cut))
        for task, request, first, rows, head, begin, end, cut in table.tolist()
    )
    return Plan(pieces, bytes_.value)


def shares(work: Sequence[float], threads: int) -> list[float]:
    """The work of each thread if tasks are claimed in order by the first thread that is free."""
    loads = [0.0] * threads
    for one in work:
        loads[loads.index(min(loads))] += one
    return loads

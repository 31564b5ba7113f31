"""Attention on the native library; also an `AttentionBackend` of its own, for tests against the oracle."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.attention.base import AttentionBackend
from draftwise.kernels.cpu.checks import refuse, require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kv.storage import LARGEST
from draftwise.types import AttentionBatch, IntArray

_PTR, _INT, _I32, _I64, _F32 = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_float,
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Types of rows; the values of ``dw::DType`` in ``csrc/linear.h``."""

KV_DTYPES = {**DTYPES, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""Types of the K/V cache."""


class BatchView(ctypes.Structure):
    """``dw::BatchView`` of ``csrc/attention.h``."""

    _fields_ = (
        ("query_start", _PTR),
        ("context_len", _PTR),
        ("is_tree", _PTR),
        ("block_tables", _PTR),
        ("ancestors", _PTR),
        ("first_key", _PTR),
        ("tree_start", _PTR),
        ("table_stride", _I64),
        ("requests", _I32),
        ("block_size", _I32),
    )


class AttentionCall(ctypes.Structure):
    """``dw::AttentionCall`` of ``csrc/attention.h``."""

    _fields_ = (
        ("q", _PTR),
        ("kv", _PTR),
        ("kv_scales", _PTR),
        ("out", _PTR),
        ("ldq", _I64),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("window", _I32),
        ("kv_dtype", _I32),
        ("scale", _F32),
        ("softcap", _F32),
        ("latent", _I32),
        ("sinks", _PTR),
        ("whole", _I32),
    )


def address(array: np.ndarray[Any, Any]) -> int:
    """The address of the first element; several times faster than ``array.ctypes.data``."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def kv_parts(kv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """A layer's entries, and their scales if they are codes."""
    entries, scales = kv if len(kv) == 2 else (kv[0], None)
    require(entries.dtype in KV_DTYPES and entries.is_contiguous(), "a contiguous cache of a type it knows")
    require((entries.dtype in LARGEST) == (scales is not None), "scales with a cache of codes, and no other")
    require(
        scales is None
        or (scales.dtype is torch.float32 and scales.is_contiguous() and scales.shape == entries.shape[:-1]),
        "float32 scales, one per token and head",
    )
    return entries, scales


def is_latent(entries: Tensor, num_kv_heads: int, dim: int) -> bool:
    """Whether keys are their own values; the cache must have either heads of both or of keys alone."""
    require(
        entries.shape[2] == dim and entries.shape[1] in (num_kv_heads, 2 * num_kv_heads),
        "a cache of the same heads",
    )
    return entries.shape[1] == num_kv_heads


MOST_HEAD_DIM = 1024
"""The widest heads that `dw::rope_write_rows` can take: it keeps one on the stack."""


def check_rotated(head_dim: int) -> None:
    """Raise ValueError for heads that `dw::rope_write_rows` cannot take."""
    require(head_dim % 2 == 0 and head_dim <= MOST_HEAD_DIM, "heads of an even size up to 1024")


def sinks_of(sinks: Tensor | None, heads: int) -> int | None:
    """Their address."""
    require(
        sinks is None or (sinks.dtype is torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous()),
        "float32 sinks, one per head",
    )
    return None if sinks is None else sinks.data_ptr()


_INT32 = np.dtype(np.int32)
LAID_OUT = "laid_out"
"""Where a `LaidOut` stands in `AttentionBatch.cache`."""


class LaidOut(NamedTuple):
    """Arrays of an `AttentionBatch` of ``rows`` rows, laid out as `BatchView` wants them by whoever made them, and
    their addresses (``..._at``; None: there is no such array). Rows of ``tables_np`` lie one behind the other."""

    rows: int
    starts_np: IntArray
    contexts_np: IntArray
    trees_np: npt.NDArray[np.bool_]
    tables_np: IntArray
    ancestors_np: npt.NDArray[np.uint64] | None
    firsts_np: IntArray | None
    starts_at: int
    contexts_at: int
    trees_at: int
    tables_at: int
    ancestors_at: int | None
    firsts_at: int | None
    ends: array[int] | None
    """int64 [R]: the key behind the last row of each, if that is known."""


def fill_view(view: BatchView, batch: AttentionBatch, rows: int | None = None) -> object:
    """Point ``view`` at the arrays of ``batch``. ``rows``: how many it has to have; None: nothing is said of that.
    Returns what must be kept alive as long as the view is used."""
    found = batch.cache.get(LAID_OUT)
    if (
        found.__class__ is not LaidOut
        or found.starts_np is not batch.query_start_np
        or found.contexts_np is not batch.context_len_np
        or found.trees_np is not batch.is_tree_np
        or found.tables_np is not batch.block_tables_np
        or found.ancestors_np is not batch.ancestors_np
        or found.firsts_np is not batch.first_key_np
        or batch.tree_start_np is not None
    ):  # of other arrays, if the batch was copied with some replaced
        return _fill_checked(view, batch, rows)
    if rows is not None and found.rows != rows:
        refuse("rows of the requests of the batch")
    view.query_start = found.starts_at
    view.context_len = found.contexts_at
    view.is_tree = found.trees_at
    view.block_tables = found.tables_at
    view.ancestors = found.ancestors_at
    view.first_key = found.firsts_at
    view.tree_start = None
    view.requests, view.table_stride = found.tables_np.shape
    view.block_size = batch.block_size
    return found


def ends_of(batch: AttentionBatch) -> array[int]:
    """int64 [R]: the key behind the last row of each request, which native code may overwrite."""
    found = batch.cache.get(LAID_OUT)
    starts_np, contexts_np = batch.query_start_np, batch.context_len_np
    if (
        isinstance(found, LaidOut)
        and found.ends is not None
        and found.starts_np is starts_np
        and found.contexts_np is contexts_np
    ):
        return found.ends[:]
    return array("q", (contexts_np + starts_np[1:] - starts_np[:-1]).tolist())


def _fill_checked(view: BatchView, batch: AttentionBatch, rows: int | None) -> object:
    """`fill_view` of arrays that anybody made."""
    starts, contexts, tables = batch.query_start_np, batch.context_len_np, batch.block_tables_np
    if not (starts.flags.c_contiguous and contexts.flags.c_contiguous):
        starts, contexts = np.ascontiguousarray(starts), np.ascontiguousarray(contexts)
    # rows of block tables may be views of longer ones, block ids lie side by side
    if tables.strides[1] != 4 and tables.shape[1] > 1:
        tables = np.ascontiguousarray(tables)
    trees, ancestors = batch.is_tree_np, batch.ancestors_np
    require(
        tables.dtype == _INT32 and starts.dtype == _INT32 and contexts.dtype == _INT32,
        "block tables, starts and lengths in int32",
    )
    require(len(starts) == len(contexts) + 1 and len(tables) == len(contexts), "as many tables as requests")
    require(rows is None or int(starts[-1]) == rows, "rows of the requests of the batch")
    require(
        len(trees) == len(contexts) and trees.itemsize == 1 and trees.flags.c_contiguous, "a byte per request"
    )
    require(
        ancestors is None
        or (ancestors.itemsize == 8 and ancestors.flags.c_contiguous and len(ancestors) >= int(starts[-1])),
        "ancestors of 64 bits, one per row",
    )
    view.query_start = address(starts)
    view.context_len = address(contexts)
    view.is_tree = address(batch.is_tree_np)
    view.block_tables = address(tables)
    view.ancestors = None if batch.ancestors_np is None else address(batch.ancestors_np)
    firsts, stored = batch.first_key_np, batch.tree_start_np
    for own in (firsts, stored):
        require(
            own is None or (own.dtype == _INT32 and own.flags.c_contiguous and len(own) == len(contexts)),
            "first keys and starts of trees in int32, one per request",
        )
    view.first_key = None if firsts is None else address(firsts)
    view.tree_start = None if stored is None else address(stored)
    view.table_stride = tables.strides[0] // 4
    view.requests = len(contexts)
    view.block_size = batch.block_size
    return starts, contexts, tables, batch


class NativeAttention(AttentionBackend):
    """float32 and bfloat16 rows over a cache of any type.

    The same bits for a row in any batch, chunk and tree, and for any number of threads.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._run = library.function(
            "dw_attention", None, [_PTR, _INT, ctypes.POINTER(AttentionCall), ctypes.POINTER(BatchView)]
        )

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
        """As `AttentionBackend.run`; ``whole``: as `Ops.attention`."""
        entries, scales = kv_parts(kv)
        rows, heads, dim = q.shape
        require(q.dtype in DTYPES, "float32 or bfloat16 queries")
        require(
            rows == 0 or (q.stride(2) == 1 and (heads == 1 or q.stride(1) == dim)), "queries side by side"
        )
        require(
            num_kv_heads > 0 and heads % num_kv_heads == 0, "as many query heads for each head of the cache"
        )
        if out is None:
            out = torch.empty((rows, heads * dim), dtype=q.dtype)
        require(
            out.shape == (rows, heads * dim) and out.dtype is q.dtype and out.is_contiguous(),
            "a contiguous result of the queries' type",
        )
        view = BatchView()
        kept = fill_view(view, batch)
        require(int(batch.query_start_np[-1]) <= rows, "a row of queries for each token")
        call = AttentionCall(
            q.data_ptr(),
            entries.data_ptr(),
            None if scales is None else scales.data_ptr(),
            out.data_ptr(),
            q.stride(0),
            heads,
            num_kv_heads,
            dim,
            window or 0,
            KV_DTYPES[entries.dtype],
            scale,
            softcap or 0.0,
            is_latent(entries, num_kv_heads, dim),
            sinks_of(sinks, heads),
            whole,
        )
        self._run(self._pool.pointer, DTYPES[q.dtype], call, view)
        del kept
        return out

"""The contract of an attention backend. Implementations stand beside this file.

**Mask.** Request r of a batch has rows ``query_start[r] .. query_start[r + 1] - 1`` and keys in this logical order:
committed tokens ``0 .. context_len - 1`` at the positions of the same number, then its own rows of this pass,
``context_len + i`` for row i (a tree that is computed in several passes: ``context_len + tree_start + i``, behind the
rows of the earlier ones; bits count them all). Keys below ``first_key`` are seen by nobody. Which keys a row sees:

======================  =======================================================================================
causal request          committed keys and own rows 0..i; row i stands at position context_len + i
``whole`` request       committed keys and all own rows; row i stands at position context_len + i
tree request            committed keys and own rows j whose bit j is set in ``ancestors[row]``; row i stands at
                        position context_len + (set bits - 1), because its ancestors in this pass lie on one path
sliding window W        of these, only keys whose *position* p satisfies ``position(row) - p < W``
======================  =======================================================================================

Example: context 10, root + tree with parents (-1, -1, 0): rows at positions 10, 11, 11, 12 with ancestors 0b0001,
0b0011, 0b0101, 0b1011. The last row sees keys 0..9, row 0, row 1 and itself, which stand at positions 0..9, 10, 11 and
12. With W = 3 it sees positions 10, 11, 12: rows 0, 1 and 3.

Own rows are in the cache before a backend is called, so it may read every key from there. A slot that no visible key
stands in must not influence the result, even if it holds NaN: other requests' data may be anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftwise.types import AttentionBatch

MAX_TREE_ROWS = 64
"""Rows of a tree request in one pass: one bit of `AttentionBatch.ancestors_np` for each."""


class AttentionBackend(ABC):
    """Computes softmax(q k^T * scale + mask) v for a ragged batch over paged keys and values."""

    reads_static: ClassVar[bool] = False
    """Whether `run` takes batches that have `AttentionBatch.static` and then reads that alone."""

    @abstractmethod
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
        """Attend with every row of a pass.

        Args:
            q: [T, Hq, D], rotated queries; rows may be strided, the last dimension is dense. Query head h reads
                key/value head ``h // (Hq // Hkv)``.
            kv: one layer of a `KVStorage` with layout `KVLayerSpec.dense`: ``(kv [slots, 2 * Hkv, D],)``, of any float
                dtype, or int8 or fp8 codes of that shape and their scales [slots, 2 * Hkv] float32.
            batch: whose rows and keys these are. What depends only on it is prepared once per pass and kept in
                ``batch.cache``, under keys of the backend's own.
            scale: factor on the scores, usually ``D ** -0.5``.
            window: sliding window in positions; None: full attention.
            softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2); None: they stay.
            sinks: [Hq] float32, of each head the score of one key more, whose value is zero (GPT-OSS); None: none.
            out: [T, Hq * D] buffer for the result, of q's dtype.
            whole: requests that are no trees are ``whole`` ones, not causal.

        Returns:
            [T, Hq * D] of q's dtype. Scores and softmax are float32 inside.
        """


def attend(
    backend: AttentionBackend,
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
    """`AttentionBackend.run`, for operations that can be captured: in a pass that is captured without attention
    (`AttentionBatch.apart`) the call is noted, not made."""

    def run(q: Tensor, batch: AttentionBatch, out: Tensor | None) -> Tensor:
        return backend.run(
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

    if batch.apart is None:
        return run(q, batch, out)
    result = batch.apart(run, q, q.shape[1] * q.shape[2])
    return result if out is None else out.copy_(result)


def first_key(batch: AttentionBatch, r: int) -> int:
    """First key of request r that anybody sees."""
    return 0 if batch.first_key_np is None else int(batch.first_key_np[r])


def tree_start(batch: AttentionBatch, r: int) -> int:
    """Rows of request r's tree that earlier passes have stored."""
    return 0 if batch.tree_start_np is None else int(batch.tree_start_np[r])


def request_keys(batch: AttentionBatch, r: int) -> int:
    """Keys of request r: committed tokens, then its tree's rows of earlier passes and of this one, or its own rows."""
    rows = int(batch.query_start_np[r + 1] - batch.query_start_np[r])
    return int(batch.context_len_np[r]) + tree_start(batch, r) + rows


def request_positions(batch: AttentionBatch, r: int) -> npt.NDArray[np.int64]:
    """Positions of request r's rows, int64 [n], from host data alone (see the module's docstring)."""
    start, end = int(batch.query_start_np[r]), int(batch.query_start_np[r + 1])
    context = int(batch.context_len_np[r])
    if batch.is_tree_np[r]:
        depths: npt.NDArray[np.int64] = request_ancestors(batch, r).sum(axis=1, dtype=np.int64) - 1
        return context + depths
    return np.arange(context, context + end - start)


def request_ancestors(batch: AttentionBatch, r: int) -> npt.NDArray[np.bool_]:
    """Which rows of its tree, stored so far, each row of tree request r sees: bool [n, tree_start + n]."""
    start, end = int(batch.query_start_np[r]), int(batch.query_start_np[r + 1])
    stored = tree_start(batch, r) + end - start
    assert batch.ancestors_np is not None and stored <= MAX_TREE_ROWS, "a tree request has at most 64 rows"
    bits = batch.ancestors_np[start:end, None] >> np.arange(stored, dtype=np.uint64)[None, :]
    return (bits & np.uint64(1)).astype(bool)


def request_mask(
    batch: AttentionBatch, r: int, start_key: int, window: int | None, *, whole: bool = False
) -> npt.NDArray[np.bool_]:
    """Visibility of keys ``start_key ..`` for each row of request r: bool [n, request_keys - start_key].

    Keys are in logical order. ``start_key`` must be at most context_len.

    A tree key's position depends on nothing but the path it is on: for a row that sees it, it is context_len plus the
    number of the row's ancestors before it. Example: context 10, ancestors 0b1011: keys 10, 11, 13 stand at positions
    10, 11, 12.
    """
    n = int(batch.query_start_np[r + 1] - batch.query_start_np[r])
    context = int(batch.context_len_np[r])
    assert start_key <= context
    tree = bool(batch.is_tree_np[r])
    own = request_ancestors(batch, r) if tree else np.ones((n, n), bool) if whole else np.tri(n, dtype=bool)
    mask = np.ones((n, context - start_key + own.shape[1]), dtype=bool)
    mask[:, context - start_key :] = own
    mask[:, : max(0, first_key(batch, r) - start_key)] = False
    if window is not None:
        rows = request_positions(batch, r)[:, None]  # [n, 1]
        mask[:, : context - start_key] &= rows - np.arange(start_key, context) < window
        # of a causal or whole row too: it sees rows 0..j, which stand at context + 0..j
        mask[:, context - start_key :] &= rows - (context + own.cumsum(axis=1) - 1) < window
    return mask


def request_slots(batch: AttentionBatch, r: int, first_key: int, num_keys: int) -> npt.NDArray[np.int64]:
    """Slots of keys ``first_key .. num_keys - 1`` of request r, int64 [num_keys - first_key].

    Example: block size 4, block table [7, 2], keys 2..5 stand in slots 30, 31, 8, 9.
    """
    keys = np.arange(first_key, num_keys)
    blocks: npt.NDArray[np.int64] = batch.block_tables_np[r, keys // batch.block_size].astype(np.int64)
    return blocks * batch.block_size + keys % batch.block_size

"""Batches for attention: requests of any kind over scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwise.models.inputs import tree_layout
from draftwise.types import AttentionBatch


@dataclass
class Part:
    """One request of a batch: ``tokens`` rows behind ``context`` committed ones; a tree's rows are root + nodes.

    ``start``: of the tree, the first so many rows were stored by earlier passes. ``first``: first key that is seen.
    """

    context: int
    rows: int
    parents: Sequence[int] | None = None
    start: int = 0
    first: int = 0


def make_batch(parts: Sequence[Part], block_size: int = 16, seed: int = 0) -> tuple[AttentionBatch, int]:
    """Blocks are scattered; the second result is the number of slots that the storage needs."""
    starts = np.concatenate(([0], np.cumsum([p.rows for p in parts]))).astype(np.int32)
    blocks = [-(-(p.context + p.start + p.rows) // block_size) for p in parts]
    order = np.random.default_rng(seed).permutation(sum(blocks) + 3).astype(np.int32)
    tables = np.zeros((len(parts), max(blocks)), np.int32)
    ancestors = np.zeros(int(starts[-1]), np.uint64)
    used = 0
    for r, part in enumerate(parts):
        tables[r, : blocks[r]] = order[used : used + blocks[r]]
        used += blocks[r]
        if part.parents is not None:
            masks = [1, *tree_layout(part.parents)[1]][part.start : part.start + part.rows]
            ancestors[starts[r] : starts[r + 1]] = np.array(masks, np.uint64)
    trees = np.array([p.parents is not None for p in parts])
    batch = AttentionBatch(
        query_start_np=starts,
        context_len_np=np.array([p.context for p in parts], np.int32),
        is_tree_np=trees,
        block_tables_np=tables,
        ancestors_np=ancestors if trees.any() else None,
        block_size=block_size,
        first_key_np=np.array([p.first for p in parts], np.int32) if any(p.first for p in parts) else None,
        tree_start_np=np.array([p.start for p in parts], np.int32) if any(p.start for p in parts) else None,
    )
    return batch, (sum(blocks) + 3) * block_size


def slots_of(batch: AttentionBatch, r: int, keys: int) -> np.ndarray:
    at = np.arange(keys)
    size = batch.block_size
    return batch.block_tables_np[r, at // size].astype(np.int64) * size + at % size

"""Builds the ragged batch of one forward pass from what is known of each request on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwise.types import AttentionBatch, IntArray, StepInput


class RowInput(NamedTuple):
    """The rows of one request: ``tokens`` stand at keys ``context_len ..``.

    ``parents``: node parents when the last ``len(parents)`` tokens are a tree that is no chain, below the token
    before them (the root); None when every row continues the one before.

    ``ancestors``: instead of ``parents``, when the rows are one level of a tree that is computed level by level: of
    each row, the bits of the tree rows on its path, itself included. Earlier passes have stored ``tree_start`` rows of
    the tree at keys ``context_len ..``; these rows follow them.

    ``first_key``: keys before it are seen by nobody (at most ``context_len``).

    Example: below 10 committed tokens, a tree (-1, -1, 0) whose root is one of them: level 1 is tokens (5, 7),
    ancestors (0b001, 0b010), tree_start 0, at keys 10 and 11, position 10; level 2 is token 9, ancestors (0b101,),
    tree_start 2, at key 12, position 11.
    """

    tokens: Sequence[int] | IntArray
    context_len: int
    block_table_np: IntArray  # [blocks of the request]
    parents: Sequence[int] | None = None
    ancestors: Sequence[int] | None = None
    tree_start: int = 0
    first_key: int = 0


def tree_layout(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depth and ancestor mask of the nodes of a tree, relative to the root (bit 0), node i being bit i + 1.

    Example: parents (-1, -1, 0) -> depths [1, 1, 2], masks [0b0011, 0b0101, 0b1011].
    """
    depths: list[int] = []
    masks: list[int] = []
    for i, parent in enumerate(parents):
        bit = 1 << (i + 1)
        if parent < 0:
            depths.append(1)
            masks.append(1 | bit)
        else:
            depths.append(depths[parent] + 1)
            masks.append(masks[parent] | bit)
    return depths, masks


def build_step_input(
    rows: Sequence[RowInput], block_size: int, device: torch.device, position_offset: int = 0
) -> StepInput:
    """Pack the rows of all requests into one `StepInput`.

    ``position_offset``: added to every position, not to keys and slots. Draft heads say -1: what they store for token s
    was trained at position s - 1, that of the hidden state it was computed from.

    Example: a chunk of 3 tokens at context 0 and a decode at context 9 with a tree (-1, -1) below its root give
    token rows [a0 a1 a2 | b9 n0 n1], positions [0 1 2 | 9 10 10], keys [0 1 2 | 9 10 11].
    """
    if len(rows) == 1 and rows[0].parents is None and rows[0].ancestors is None:
        return _single_chain(rows[0], block_size, device, position_offset)
    count = len(rows)
    lengths = np.array([len(row.tokens) for row in rows], np.int32)
    context = np.array([row.context_len for row in rows], np.int32)
    start = np.zeros(count + 1, np.int32)
    np.cumsum(lengths, out=start[1:])
    total = int(start[-1])
    # Offset of each row in its request: arange minus the request's own start.
    owner = np.repeat(np.arange(count), lengths)
    first_own = context
    tree_start = None
    if any(row.tree_start for row in rows):
        tree_start = np.fromiter((row.tree_start for row in rows), np.int32, count)
        first_own = context + tree_start
    keys = np.arange(total, dtype=np.int64) - np.repeat(start[:-1] - first_own, lengths)

    widths = [len(row.block_table_np) for row in rows]
    tables = np.zeros((count, max(widths)), np.int32)
    for i, row in enumerate(rows):
        tables[i, : widths[i]] = row.block_table_np
        assert row.first_key <= row.context_len and (not row.tree_start or row.ancestors is not None)
    tokens = np.concatenate([row.tokens for row in rows], dtype=np.int64)
    is_tree = np.array([row.parents is not None or row.ancestors is not None for row in rows], np.bool_)

    positions = keys + position_offset
    ancestors = None
    if is_tree.any():
        ancestors = np.zeros(total, np.uint64)
        for i, row in enumerate(rows):
            origin = int(context[i]) + position_offset
            if row.ancestors is not None:
                assert len(row.ancestors) == lengths[i] and row.parents is None
                ancestors[start[i] : start[i + 1]] = np.asarray(row.ancestors, np.uint64)
                positions[start[i] : start[i + 1]] = [bits.bit_count() - 1 + origin for bits in row.ancestors]
                continue
            if row.parents is None:
                continue
            nodes = len(row.parents)
            first = int(start[i + 1]) - nodes
            assert first - int(start[i]) == 1, "a tree hangs below a single root row"
            depths, masks = tree_layout(row.parents)
            positions[first : first + nodes] = np.asarray(depths) + origin
            ancestors[first - 1] = 1
            ancestors[first : first + nodes] = np.asarray(masks, np.uint64)
    slots = tables[owner, keys // block_size].astype(np.int64) * block_size + keys % block_size
    return StepInput(
        token_ids=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        attention=AttentionBatch(
            query_start_np=start,
            context_len_np=context,
            is_tree_np=is_tree,
            block_tables_np=tables,
            ancestors_np=ancestors,
            block_size=block_size,
            first_key_np=_first_keys(rows),
            tree_start_np=tree_start,
        ),
    )


def _first_keys(rows: Sequence[RowInput]) -> IntArray | None:
    if not any(row.first_key for row in rows):
        return None
    return np.fromiter((row.first_key for row in rows), np.int32, len(rows))


_NO_TREE = np.zeros(1, np.bool_)


def _single_chain(row: RowInput, block_size: int, device: torch.device, position_offset: int) -> StepInput:
    """The latency path: one request, no tree. Same result as the general case in fewer array operations."""
    n = len(row.tokens)
    keys = np.arange(row.context_len, row.context_len + n, dtype=np.int64)
    slots = row.block_table_np[keys // block_size].astype(np.int64) * block_size + keys % block_size
    tokens = np.asarray(row.tokens, np.int64)
    assert row.first_key <= row.context_len and not row.tree_start
    positions = torch.from_numpy(keys + position_offset if position_offset else keys)
    return StepInput(
        token_ids=torch.from_numpy(tokens).to(device),
        positions=positions.to(device),
        slots=torch.from_numpy(slots).to(device),
        attention=AttentionBatch(
            query_start_np=np.array((0, n), np.int32),
            context_len_np=np.array((row.context_len,), np.int32),
            is_tree_np=_NO_TREE,
            block_tables_np=row.block_table_np[None],
            ancestors_np=None,
            block_size=block_size,
            first_key_np=np.array((row.first_key,), np.int32) if row.first_key else None,
        ),
    )

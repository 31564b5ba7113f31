"""How a pass is cut into tasks for `torch_grouped`: once per pass, from host data alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.attention.base import MAX_TREE_ROWS, first_key, request_keys, request_mask, request_slots
from draftwise.types import AttentionBatch

_GROUP_MAX_ROWS = 64  # a request with more rows in a pass goes alone
_ROW_BUCKETS = (1, 8, 32, _GROUP_MAX_ROWS)  # requests are padded together within a bucket of row counts
_PIECE_ELEMENTS = 1 << 22  # mask elements of one piece of a prompt chunk
_KEPT_ELEMENTS = 1 << 24  # mask elements a pass keeps for all layers; beyond it masks are made anew per layer


@dataclass(slots=True)
class Single:
    """Rows ``start:end`` of the pass, all of request ``r``, attending to keys ``first_key:num_keys``."""

    r: int
    start: int
    end: int
    first_key: int
    num_keys: int
    key_start: int  # slot of the first key when the keys stand in a row, else -1
    key_index: Tensor | None  # [num_keys - first_key] int64 slots otherwise
    causal: bool  # rows and keys are the same tokens: torch's own causal masking does
    needs_mask: bool
    mask: Tensor | None = None  # [rows, num_keys - first_key], 0 or -inf
    scratch: Tensor | None = None  # [num_keys - first_key, 2 * Hkv, D] gathered entries; reused by each layer


@dataclass(slots=True)
class Group:
    """R requests padded to n rows and L keys each."""

    num_requests: int
    num_rows: int
    num_keys: int
    key_index: Tensor  # [R * L] int64 slots
    mask: Tensor  # [R, 1, n, L], 0 or -inf
    row_start: int  # first row when the group's rows are R * n consecutive ones, else -1
    row_index: (
        Tensor | None
    )  # [R * n] int64: row of the pass in each place; padding repeats a row of its request
    places: Tensor | None  # [rows of the group] int64: place of each row that is no padding
    rows: Tensor | None  # [rows of the group] int64: the row it belongs to
    scratch: Tensor | None = None  # [requests at once * L, 2 * Hkv, D] gathered entries; reused by each layer


Ints = npt.NDArray[np.int64]

Task = Single | Group


def plan_tasks(
    batch: AttentionBatch, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Task]:
    """The tasks that together attend with every row of a pass; masks are of ``dtype``."""
    if len(batch.context_len_np) == 1:
        return _plan_alone(batch, 0, window, dtype, device)
    tasks: list[Task] = []
    counts = np.diff(batch.query_start_np).astype(np.int64)
    contexts = batch.context_len_np.astype(np.int64)
    first: Ints = np.zeros_like(contexts)
    if batch.first_key_np is not None:
        first = batch.first_key_np.astype(np.int64)
    if window is not None:
        first = np.maximum(contexts - (window - 1), first)
    own = counts if batch.tree_start_np is None else counts + batch.tree_start_np
    lengths: Ints = contexts + own - first  # keys of each request
    lower = 0
    for upper in _ROW_BUCKETS:
        members = np.flatnonzero((counts > lower) & (counts <= upper))
        lower = upper
        for chosen in _split_by_length(members, lengths):
            if len(chosen) == 1:
                tasks += _plan_alone(batch, int(chosen[0]), window, dtype, device)
            else:
                tasks.append(_plan_group(batch, chosen, counts, first, lengths, window, dtype, device))
    for r in np.flatnonzero(counts > _GROUP_MAX_ROWS):
        tasks += _plan_alone(batch, int(r), window, dtype, device)
    return tasks


def _split_by_length(members: Ints, lengths: Ints) -> list[Ints]:
    """Cut a bucket so that no request is padded to more than twice its keys (short ones to 128 at least)."""
    if len(members) == 0:
        return []
    longest = int(lengths[members].max())
    if longest <= 128 or 2 * int(lengths[members].min()) >= longest:
        return [members]
    groups = []
    rest = members
    while len(rest):
        longest = int(lengths[rest].max())
        take = lengths[rest] * 2 >= longest if longest > 128 else np.ones(len(rest), dtype=bool)
        groups.append(rest[take])
        rest = rest[~take]
    return groups


def _plan_alone(
    batch: AttentionBatch, r: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Task]:
    start, end = int(batch.query_start_np[r]), int(batch.query_start_np[r + 1])
    context, tree = int(batch.context_len_np[r]), bool(batch.is_tree_np[r])
    n = end - start
    step = n if tree else max(1, min(n, _PIECE_ELEMENTS // (context + n)))
    seen_from = first_key(batch, r)
    tasks: list[Task] = []
    kept = 0
    for i in range(0, n, step):
        last = min(i + step, n)
        num_keys = request_keys(batch, r) if tree else context + last
        first = seen_from if window is None else max(seen_from, context + i - window + 1)
        key_start, key_index = _key_slots(batch, r, first, num_keys, device)
        windowed = window is not None and num_keys > window
        causal = last - i > 1 and not tree and context + i == first and not windowed
        # a row of a tree alone may have rows of earlier passes before it that are none of its ancestors
        task = Single(
            r, start + i, start + last, first, num_keys, key_start, key_index, causal,
            needs_mask=(last - i > 1 and not causal) or (tree and num_keys > context + n),
        )  # fmt: skip
        kept += (last - i) * (num_keys - first)
        if task.needs_mask and kept <= _KEPT_ELEMENTS:
            task.mask = single_mask(batch, task, window, dtype, device)
        tasks.append(task)
    return tasks


def _key_slots(
    batch: AttentionBatch, r: int, first: int, num_keys: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """Slot of key ``first`` if all from there stand in a row, else -1 and every slot."""
    size = batch.block_size
    blocks = batch.block_tables_np[r, first // size : -(-num_keys // size)]
    if len(blocks) == 1 or bool((blocks[1:] - blocks[:-1] == 1).all()):
        return int(blocks[0]) * size + first % size, None
    return -1, torch.from_numpy(request_slots(batch, r, first, num_keys)).to(device)


def single_mask(
    batch: AttentionBatch, task: Single, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows, num_keys - first_key]: 0 where a row of the task sees a key, else -inf."""
    if batch.is_tree_np[task.r]:
        visible = torch.from_numpy(request_mask(batch, task.r, task.first_key, window)).to(device)
    else:
        # committed keys and own rows stand at consecutive positions: key number = position
        first_row = int(batch.context_len_np[task.r]) + task.start - int(batch.query_start_np[task.r])
        rows = torch.arange(first_row, first_row + task.end - task.start, device=device)[:, None]
        keys = torch.arange(task.first_key, task.num_keys, device=device)
        visible = keys <= rows
        if window is not None:
            visible &= rows - keys < window
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def _plan_group(
    batch: AttentionBatch,
    chosen: Ints,  # [R] requests
    counts: Ints,  # of all requests: rows
    first: Ints,  # first visible key
    lengths: Ints,  # keys from there
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    size = batch.block_size
    counts, first, lengths = counts[chosen], first[chosen], lengths[chosen]
    count, n, num_keys = len(chosen), int(counts.max()), int(lengths.max())
    # keys [R, L]: offsets past a request's own keys fall back to its first one
    offsets = np.arange(num_keys)
    inside = offsets < lengths[:, None]
    keys = np.where(inside, offsets, 0) + first[:, None]
    blocks = batch.block_tables_np[chosen[:, None], keys // size].astype(np.int64)
    slots = blocks * size + keys % size
    # rows [R, n]: padding repeats the request's last row
    row_offsets = np.minimum(np.arange(n), counts[:, None] - 1)
    rows: Ints = batch.query_start_np[chosen].astype(np.int64)[:, None] + row_offsets
    # visibility [R, n, L]
    contexts = batch.context_len_np[chosen].astype(np.int64)
    numbers = offsets + first[:, None]  # [R, L] number of each key in its request
    trees = batch.is_tree_np[chosen]
    if trees.any():
        visible, position, key_position = _tree_visibility(batch, rows, row_offsets, trees, contexts, numbers)
    else:
        position = contexts[:, None] + row_offsets
        key_position = numbers[:, None, :]
        visible = key_position <= position[:, :, None]
    visible &= inside[:, None, :]
    if window is not None:
        visible &= position[:, :, None] - key_position < window
    mask = np.where(visible, np.float32(0), np.float32("-inf"))[:, None]
    consecutive = bool((counts == n).all()) and bool((np.diff(chosen) == 1).all())
    valid = np.arange(n) < counts[:, None]
    return Group(
        count,
        n,
        num_keys,
        torch.from_numpy(slots.reshape(-1)).to(device),
        torch.from_numpy(mask).to(device, dtype),
        int(rows[0, 0]) if consecutive else -1,
        None if consecutive else torch.from_numpy(rows.reshape(-1)).to(device),
        None if consecutive else torch.from_numpy(np.flatnonzero(valid)).to(device),
        None if consecutive else torch.from_numpy(rows[valid]).to(device),
    )


def _tree_visibility(
    batch: AttentionBatch,
    rows: Ints,  # [R, n] rows of the pass; padding repeats a request's last one
    row_offsets: Ints,  # [R, n] number of each row in its request
    trees: npt.NDArray[np.bool_],  # [R]
    contexts: Ints,  # [R]
    numbers: Ints,  # [R, L] number of each key in its request
) -> tuple[npt.NDArray[np.bool_], Ints, Ints]:
    """Visibility [R, n, L], row positions [R, n] and, of visible keys, key positions [R, n, L] of a group with trees.

    The same as `request_mask`, for all requests at once: a key at or past the context is number ``number - context`` of
    the tree's rows so far, or of a causal request's own.
    """
    n = rows.shape[1]
    stored = n  # rows of a tree, those of earlier passes included
    if batch.tree_start_np is not None:
        stored = MAX_TREE_ROWS
    assert batch.ancestors_np is not None and n <= MAX_TREE_ROWS
    bits = (batch.ancestors_np[rows][:, :, None] >> np.arange(stored, dtype=np.uint64)) & np.uint64(1)
    own = np.where(
        trees[:, None, None], bits.astype(bool), np.arange(stored) <= row_offsets[:, :, None]
    )  # [R, n, stored]
    before: Ints = own.cumsum(axis=2) - 1  # of a row's path, those before a key that is on it
    position: Ints = contexts[:, None] + before[:, :, -1]
    committed = numbers < contexts[:, None]
    row = np.clip(numbers - contexts[:, None], 0, stored - 1)[:, None, :]  # [R, 1, L] which of them a key is
    visible = np.take_along_axis(own, row, axis=2) | committed[:, None, :]
    own_position = contexts[:, None, None] + np.take_along_axis(before, row, axis=2)
    key_position: Ints = np.where(committed[:, None, :], numbers[:, None, :], own_position)
    return visible, position, key_position

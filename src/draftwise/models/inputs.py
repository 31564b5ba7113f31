"""Builds the ragged batch of one forward pass from what is known of each request on the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.attention import LAID_OUT, LaidOut, address
from draftwise.kernels.cpu.columns import RowPacker, row_packer
from draftwise.types import AttentionBatch, IntArray, StateRows, StepInput, new_record


class RowInput(NamedTuple):
    """The rows of one request: ``tokens`` stand at keys ``context_len ..``.

    ``parents``: node parents when the last ``len(parents)`` tokens are a tree that is no chain, below the token
    before them (the root); None when every row continues the one before.

    ``ancestors``: instead of ``parents``, when the rows are one level of a tree that is computed level by level: of
    each row, the bits of the tree rows on its path, itself included. Earlier passes have stored ``tree_start`` rows of
    the tree at keys ``context_len ..``; these rows follow them.

    ``first_key``: keys before it are seen by nobody (at most ``context_len``).

    ``state_slot``, ``revocable``: for models with recurrent state, see `StateRows`; -1: the model has none.

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
    state_slot: int = -1
    revocable: int = 0


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


class TreeRows(NamedTuple):
    """The tree among the rows of request ``request``; the two fields as in `RowInput`, one of them given."""

    request: int
    parents: Sequence[int] | None
    ancestors: Sequence[int] | None = None


def build_step_input(
    rows: Sequence[RowInput],
    block_size: int,
    device: torch.device,
    position_offset: int = 0,
    packer: RowPacker | None = None,
) -> StepInput:
    """Pack the rows of all requests into one `StepInput`. ``position_offset``, ``packer``: see `pack_rows`.

    Example: a chunk of 3 tokens at context 0 and a decode at context 9 with a tree (-1, -1) below its root give
    token rows [a0 a1 a2 | b9 n0 n1], positions [0 1 2 | 9 10 10], keys [0 1 2 | 9 10 11].
    """
    starts, contexts, first_keys, tree_starts = [0], [], [], []
    trees: list[TreeRows] = []
    end = 0
    for r, (own, context, _, parents, ancestors, tree_start, first_key, _, _) in enumerate(rows):
        end += len(own)
        starts.append(end)
        contexts.append(context)
        first_keys.append(first_key)
        tree_starts.append(tree_start)
        assert first_key <= context and (not tree_start or ancestors is not None)
        if parents is not None or ancestors is not None:
            trees.append(TreeRows(r, parents, ancestors))
    tokens: list[int] = []
    for row in rows:
        own = row.tokens
        tokens += own.tolist() if isinstance(own, np.ndarray) else own
    return pack_rows(
        tokens,
        starts,
        contexts,
        Blocks.of([row.block_table_np for row in rows]),
        block_size,
        device,
        position_offset=position_offset,
        first_keys=first_keys,
        tree_starts=tree_starts,
        trees=trees,
        packer=packer,
        states=StateRows([row.state_slot for row in rows], [row.revocable for row in rows])
        if rows and rows[0].state_slot >= 0
        else None,
    )


class Blocks(NamedTuple):
    """Block tables of R requests, in one array.

    Example: tables (7, 2) and (5,) are ids 7 2 5, places 0 2, widths 2 1.
    """

    ids_np: IntArray  # [n]
    places: Sequence[int]  # [R] where each one's begin
    widths: Sequence[int]  # [R]

    @classmethod
    def of(cls, tables: Sequence[IntArray]) -> Blocks:
        """These tables, one behind the other."""
        if len(tables) == 1:
            return cls(np.ascontiguousarray(tables[0], np.int32), (0,), (len(tables[0]),))
        widths = [len(table) for table in tables]
        return cls(np.concatenate(tables, dtype=np.int32), [0, *accumulate(widths[:-1])], widths)


def pack_rows(
    tokens: Sequence[int],
    starts: Sequence[int],
    contexts: Sequence[int],
    blocks: Blocks,
    block_size: int,
    device: torch.device,
    *,
    position_offset: int = 0,
    first_keys: Sequence[int] = (),
    tree_starts: Sequence[int] = (),
    trees: Sequence[TreeRows] = (),
    packer: RowPacker | None = None,
    states: StateRows | None = None,
) -> StepInput:
    """`build_step_input` for callers that have the data of R requests in columns.

    Args:
        tokens: [T] one request after the other.
        starts: [R + 1] first row of each request, and T.
        contexts: [R] key of each request's first row (of a tree level: of the tree's first row).
        blocks: of the requests.
        position_offset: added to every position, not to keys and slots. Draft heads say -1: what they store for token s
            was trained at position s - 1, that of the hidden state it was computed from.
        first_keys, tree_starts: [R], see `RowInput`; empty: all are 0.
        trees: of the requests whose rows are no causal run.
        states: of models with recurrent state.
        packer: the caller's own (`own_packer`), if it is done with a batch before it makes the next one.
    """
    count, total = len(contexts), starts[-1]
    context_np = np.array(contexts, np.int32)
    has_starts = any(tree_starts)
    first = [*map(add, contexts, tree_starts)] if has_starts else contexts
    if device.type != "cpu":
        packer = None
    elif packer is None:
        packer = row_packer()
    pack = _pack if packer is None else packer.pack
    (token_ids, positions, slots), tables_np, start_np = pack(
        tokens, starts, first, blocks.widths, blocks.places, blocks.ids_np, block_size, position_offset
    )
    is_tree_np, ancestors_np = (
        _NO_TREES_NP[:1] if count == 1 and not trees else np.zeros(count, np.bool_),
        None,
    )
    if trees:
        ancestors_np = np.zeros(total, np.uint64)
        below_roots: Sequence[TreeRows] = trees
        if packer is not None and all(tree.parents is not None for tree in trees):
            for tree in trees:
                is_tree_np[tree.request] = True
            packer.place_trees(
                [starts[tree.request] for tree in trees],
                [tree.parents for tree in trees if tree.parents is not None],
                positions,
                ancestors_np,
            )
            below_roots = ()
        positions_np = positions.numpy()
        for tree in below_roots:
            is_tree_np[tree.request] = True
            own = slice(starts[tree.request], starts[tree.request + 1])
            origin = contexts[tree.request] + position_offset
            _place_tree(tree, origin, positions_np[own], ancestors_np[own])
    if device.type != "cpu":
        token_ids, positions, slots = token_ids.to(device), positions.to(device), slots.to(device)
    return StepInput(
        token_ids,
        positions,
        slots,
        AttentionBatch(
            start_np,
            context_np,
            is_tree_np,
            tables_np,
            ancestors_np,
            block_size,
            np.array(first_keys, np.int32) if any(first_keys) else None,
            np.array(tree_starts, np.int32) if has_starts else None,
        ),
        states,
    )


def pack_spans(
    first: Sequence[int],
    tokens: Sequence[IntArray],
    tables: Sequence[IntArray],
    tokens_at: Sequence[int],
    tables_at: Sequence[int],
    block_size: int,
    device: torch.device,
    *,
    position_offset: int = 0,
    first_keys: Sequence[int] = (),
    packer: RowPacker | None = None,
) -> StepInput:
    """`pack_rows` of what is known of R requests, from some token of each to its last one.

    Args:
        first: [R] first token of each request that is a row.
        tokens: [R] known tokens of each, from its first one on, int32.
        tables: [R] block table of each, int32.
        tokens_at, tables_at: [R] where these lie in memory; 0: somebody has to look.
        position_offset, first_keys, packer: as in `pack_rows`.

    Example: tokens 5 6 7 and 8 9, first 1 and 1: rows 6 7 | 9, at keys 1 2 | 1.
    """
    stop = [len(own) for own in tokens]
    if device.type != "cpu":
        packer = None
    elif packer is None:
        packer = row_packer()
    if packer is None:
        rows: list[int] = []
        starts = [0]
        for own, begin in zip(tokens, first, strict=True):
            rows += own[begin:].tolist()
            starts.append(len(rows))
        return pack_rows(
            rows,
            starts,
            first,
            Blocks.of(tables),
            block_size,
            device,
            position_offset=position_offset,
            first_keys=first_keys,
        )
    (token_ids, positions, slots), tables_np, start_np, context_np, at = packer.pack_spans(
        first,
        stop,
        [len(table) for table in tables],
        [at or address(table) for at, table in zip(tables_at, tables, strict=True)],
        [at or address(own) for at, own in zip(tokens_at, tokens, strict=True)],
        block_size,
        position_offset,
    )
    count = len(stop)
    trees_np, trees_at = _NO_TREES_NP, _NO_TREES_AT
    if count > trees_np.shape[0]:
        trees_np = np.zeros(count, np.bool_)
        trees_at = address(trees_np)
    trees_np = trees_np[:count]
    first_np = first_at = None
    if any(first_keys):
        first_np = np.array(first_keys, np.int32)
        first_at = address(first_np)
    laid_out = new_record(LaidOut, (
        token_ids.shape[0], start_np, context_np, trees_np, tables_np, None, first_np,
        at, at + 4 * (count + 1), trees_at, at + 4 * (2 * count + 1), None, first_at, array("q", stop),
    ))  # fmt: skip
    attention = AttentionBatch(
        start_np, context_np, trees_np, tables_np, None, block_size, first_np, cache={LAID_OUT: laid_out}
    )
    return StepInput(token_ids, positions, slots, attention)


def last_rows(first: Sequence[int], stop: Sequence[int]) -> list[int]:
    """The last row of each request of a batch of tokens first .. stop - 1 of each. In plain Python: behind a pass,
    which leaves the caches full of weights, the same in numpy takes 10 us more for one request.

    Example: first 1 and 1, stop 3 and 2: rows 0 1 | 2, the last ones are 1 and 2.
    """
    return [behind - 1 for behind in accumulate(map(sub, stop, first))]


_NO_TREES_NP = np.zeros(256, np.bool_)
_NO_TREES_AT = address(_NO_TREES_NP)


def _pack(
    tokens: Sequence[int],
    starts: Sequence[int],
    first: Sequence[int],
    widths: Sequence[int],
    places: Sequence[int],
    blocks_np: IntArray,
    block_size: int,
    offset: int,
) -> tuple[tuple[Tensor, Tensor, Tensor], IntArray, IntArray]:
    """`RowPacker.pack` in numpy."""
    start_np = np.array(starts, np.int32)
    owner = np.repeat(np.arange(len(first)), np.diff(start_np))
    # Row t is number t - start of its request: requests of 3 and 2 rows at 0 and 9 have keys 0 1 2 | 9 10.
    keys = np.arange(starts[-1], dtype=np.int64) + (np.array(first, np.int64) - start_np[:-1])[owner]
    column = np.arange(max(widths))
    # Where block j of a request stands; behind its last one anything that is there, and 0 in the table.
    at = np.minimum(np.array(places)[:, None] + column, len(blocks_np) - 1)
    tables_np = np.where(column < np.array(widths)[:, None], blocks_np[at], np.int32(0))
    slots = tables_np[owner, keys // block_size].astype(np.int64) * block_size + keys % block_size
    rows = np.array(tokens, np.int64), keys + offset, slots
    return (
        (torch.from_numpy(rows[0]), torch.from_numpy(rows[1]), torch.from_numpy(rows[2])),
        tables_np,
        start_np,
    )


def _place_tree(
    tree: TreeRows, origin: int, positions: npt.NDArray[np.int64], ancestors: npt.NDArray[np.uint64]
) -> None:
    """Write positions and masks of one request's rows. ``origin``: position of its tree's root or first row."""
    if tree.ancestors is not None:
        assert len(tree.ancestors) == len(positions) and tree.parents is None
        ancestors[:] = np.asarray(tree.ancestors, np.uint64)
        positions[:] = [bits.bit_count() - 1 + origin for bits in tree.ancestors]
        return
    assert tree.parents is not None and len(positions) == 1 + len(tree.parents), (
        "a tree hangs below a single root row"
    )
    depths, masks = tree_layout(tree.parents)
    ancestors[0] = 1
    ancestors[1:] = np.asarray(masks, np.uint64)
    positions[1:] = np.asarray(depths) + origin

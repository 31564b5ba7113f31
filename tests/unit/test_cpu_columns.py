"""Rows of a batch packed in one native call, against numpy; and who gets tensors of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.native import native_or_skip

from draftwise.kernels.cpu.attention import BatchView, address, ends_of, fill_view
from draftwise.kernels.cpu.columns import RowPacker, own_packer, row_packer
from draftwise.models.inputs import Blocks, TreeRows, _pack, _place_tree, pack_rows, pack_spans
from draftwise.types import AttentionBatch

CPU = torch.device("cpu")


def test_native_packs_what_numpy_packs() -> None:
    packer = RowPacker(native_or_skip())
    rng = np.random.default_rng(5)
    for size in (1, 4, 16):
        for requests in (1, 2, 7):
            counts = rng.integers(1, 9, requests)
            starts = [0, *np.cumsum(counts).tolist()]
            first = rng.integers(0, 40, requests).tolist()
            widths = [
                -(-(f + int(n)) // size) + int(rng.integers(0, 3)) for f, n in zip(first, counts, strict=True)
            ]
            places = [0, *np.cumsum(widths[:-1]).tolist()]
            blocks_np = rng.integers(0, 1000, sum(widths)).astype(np.int32)
            tokens = rng.integers(0, 5000, starts[-1]).tolist()
            for offset in (0, -1):
                given = (tokens, starts, first, widths, places, blocks_np, size, offset)
                (mine, tables, begins), (theirs, oracle, expected) = packer.pack(*given), _pack(*given)
                for a, b in zip(mine, theirs, strict=True):
                    assert a.dtype == torch.int64 and torch.equal(a, b)
                assert np.array_equal(tables, oracle) and tables.dtype == np.int32
                assert np.array_equal(begins, expected) and begins.dtype == np.int32


def test_worked_example() -> None:
    """Blocks (7, 2) and (5,) of four slots: keys 3 and 4 of the first stand in slots 31 and 8, key 1 of the second in
    slot 21."""
    packer = RowPacker(native_or_skip())
    blocks_np = np.array([7, 2, 5], np.int32)
    (tokens, positions, slots), tables, _ = packer.pack(
        [10, 11, 12], [0, 2, 3], [3, 1], [2, 1], [0, 2], blocks_np, 4, 0
    )
    assert tokens.tolist() == [10, 11, 12] and positions.tolist() == [3, 4, 1]
    assert slots.tolist() == [31, 8, 21] and tables.tolist() == [[7, 2], [5, 0]]


@pytest.mark.parametrize(
    ("first", "widths", "places"),
    [
        ([8], [2], [0]),  # no block for key 8
        ([-1], [2], [0]),
        ([0], [0], [0]),
        ([0], [4], [0]),  # more blocks than there are
        ([0], [2], [2]),
        ([0], [2], [-1]),
        ([0, 0], [2], [0]),
    ],
)
def test_what_does_not_fit_together_is_refused(
    first: list[int], widths: list[int], places: list[int]
) -> None:
    packer = RowPacker(native_or_skip())
    with pytest.raises(ValueError):
        packer.pack([1], [0, 1], first, widths, places, np.array([1, 2, 3], np.int32), 4, 0)


def test_only_an_own_packer_reuses_tensors() -> None:
    native_or_skip()
    given = ([5, 6], [0, 2], [0], [1], [0], np.array([3], np.int32), 4, 0)
    own, shared = own_packer(CPU), row_packer()
    assert own is not None and shared is not None and own_packer(torch.device("cuda")) is None
    first, again = own.pack(*given)[0], own.pack(*given)[0]
    assert first[0] is again[0]
    assert shared.pack(*given)[0][0] is not shared.pack(*given)[0][0]
    many = list(range(513))
    long = (many, [0, 513], [0], [129], [0], np.arange(129, dtype=np.int32), 4, 0)
    assert own.pack(*long)[0][0] is not own.pack(*long)[0][0]


@pytest.mark.parametrize("known_places", [True, False])
def test_runs_of_known_tokens_are_packed_from_where_they_lie(known_places: bool) -> None:
    packer = RowPacker(native_or_skip())
    rng = np.random.default_rng(6)
    for requests in (1, 3, 8):
        tokens = [rng.integers(0, 5000, int(rng.integers(1, 30))).astype(np.int32) for _ in range(requests)]
        first = [int(rng.integers(0, len(own))) for own in tokens]
        tables = [
            rng.integers(0, 99, -(-len(own) // 4) + int(rng.integers(0, 3))).astype(np.int32)
            for own in tokens
        ]
        keys = [int(rng.integers(0, begin + 1)) for begin in first]
        tokens_at, tables_at = [0] * requests, [0] * requests
        if known_places:
            tokens_at, tables_at = [address(own) for own in tokens], [address(own) for own in tables]
        given = pack_spans(
            first, tokens, tables, tokens_at, tables_at, 4, CPU,
            position_offset=-1, first_keys=keys, packer=packer,
        )  # fmt: skip
        rows = [token for own, begin in zip(tokens, first, strict=True) for token in own[begin:].tolist()]
        starts = [
            0,
            *np.cumsum([len(own) - begin for own, begin in zip(tokens, first, strict=True)]).tolist(),
        ]
        oracle = pack_rows(
            rows, starts, first, Blocks.of(tables), 4, CPU, position_offset=-1, first_keys=keys
        )
        for name in ("token_ids", "positions", "slots"):
            assert torch.equal(getattr(given, name), getattr(oracle, name)), name
        for name in ("query_start_np", "context_len_np", "is_tree_np", "block_tables_np", "first_key_np"):
            mine, theirs = getattr(given.attention, name), getattr(oracle.attention, name)
            if theirs is None:
                assert mine is None
                continue
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name


def test_a_packed_batch_says_where_its_arrays_lie() -> None:
    packer = RowPacker(native_or_skip())
    tokens = [np.arange(9, dtype=np.int32), np.arange(20, dtype=np.int32)]
    tables = [np.array([4, 2, 7], np.int32), np.array([1, 3, 5, 6, 8], np.int32)]
    for requests in (1, 2):
        for keys in ([0, 0], [1, 3]):
            own = slice(requests)
            batch = pack_spans(
                [5, 17][own], tokens[own], tables[own], [0, 0][own], [0, 0][own], 4, CPU,
                first_keys=keys[own], packer=packer,
            ).attention  # fmt: skip
            rows = int(batch.query_start_np[-1])
            assert fields(batch, rows) == fields(replace(batch, cache={}), rows)
            assert ends_of(batch).tolist() == ends_of(replace(batch, cache={})).tolist() == [9, 20][own]
            with pytest.raises(ValueError, match="rows of the requests"):
                fields(batch, rows + 1)
            # what a copy has in its place counts, not what was packed
            moved_np = batch.block_tables_np.copy()
            assert fields(replace(batch, block_tables_np=moved_np), rows)["block_tables"] == address(moved_np)


def fields(batch: AttentionBatch, rows: int) -> dict[str, int | None]:
    view = BatchView()
    fill_view(view, batch, rows)
    return {name: getattr(view, name) for name, _ in BatchView._fields_}


@pytest.mark.parametrize(
    ("first", "stop", "widths", "at"),
    [
        ([8], [9], [2], [1]),  # no block for key 8
        ([-1], [1], [2], [1]),
        ([3], [2], [2], [1]),
        ([0], [1], [1], [0]),  # lies nowhere
        ([0, 0], [1], [1], [1]),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(
    first: list[int], stop: list[int], widths: list[int], at: list[int]
) -> None:
    packer = RowPacker(native_or_skip())
    numbers_np = np.zeros(16, np.int32)
    places = [address(numbers_np) * flag for flag in at]
    with pytest.raises(ValueError):
        packer.pack_spans(first, stop, widths, places, places, 4, 0)


def test_trees_are_placed_as_in_python() -> None:
    packer = RowPacker(native_or_skip())
    rng = np.random.default_rng(7)
    trees = [[int(rng.integers(-1, i)) for i in range(n)] for n in (0, 1, 5, 63)]
    roots, total = [], 2
    for tree in trees:
        roots.append(total)
        total += 1 + len(tree) + int(rng.integers(0, 3))
    mine, theirs = torch.zeros(total, dtype=torch.int64), np.zeros(total, np.int64)
    masks, oracle = np.zeros(total, np.uint64), np.zeros(total, np.uint64)
    for root, tree in zip(roots, trees, strict=True):
        mine[root] = theirs[root] = 10 + root
        own = slice(root, root + 1 + len(tree))
        _place_tree(TreeRows(0, tree), 10 + root, theirs[own], oracle[own])
    packer.place_trees(roots, trees, mine, masks)
    assert np.array_equal(mine.numpy(), theirs) and np.array_equal(masks, oracle)


@pytest.mark.parametrize(
    ("root", "parents"), [(0, [-1] * 64), (3, [-1, -1]), (-1, [-1]), (0, [0]), (0, [-2])]
)
def test_trees_that_cannot_be_are_refused(root: int, parents: list[int]) -> None:
    packer = RowPacker(native_or_skip())
    positions, masks = torch.zeros(5, dtype=torch.int64), np.zeros(5, np.uint64)
    with pytest.raises(ValueError):
        packer.place_trees([root], [parents], positions, masks)

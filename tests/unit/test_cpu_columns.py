"""Rows of a batch packed in one native call, against numpy; and who gets tensors of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.native import native_or_skip

from draftwise.kernels.cpu.columns import RowPacker, own_packer, row_packer
from draftwise.models.inputs import _pack

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

"""Triton's kernels for what adapters add, in the interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.unit.test_triton_kernels import DTYPES, close, random

from draftwise.kernels.additions import Addition, AdditionSite, Up
from draftwise.kernels.stacked import StackedAdditions
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.low_rank import add_low_rank

DEVICE = torch.device("cpu" if interpreted() else "cuda")
PARTS = (0, slice(0, 70)), (1, slice(70, 90)), (0, slice(90, 101))
"""Of a layer's outputs: two layers of the checkpoint, one of them in two pieces."""
OUTPUTS = 101
RANKS = {5: 3, 8: 20}
"""Of adapters by number; the second lacks the second layer."""


def world(inputs: int, dtype: torch.dtype) -> StackedAdditions:
    stacked = StackedAdditions([AdditionSite(inputs, OUTPUTS, PARTS)], 3, 20, dtype, DEVICE)
    for number, rank in RANKS.items():
        parts = [part for part in PARTS if number == 5 or part[0] == 0]
        down = random(rank * len({layer for layer, _ in parts}), inputs, dtype=dtype, seed=number)
        ups = tuple(
            Up(
                layer,
                slice(layer * rank, (layer + 1) * rank),
                outputs,
                random(outputs.stop - outputs.start, rank, dtype=dtype, seed=number + i),
            )
            for i, (layer, outputs) in enumerate(parts)
        )
        stacked.put(number, [Addition(down / inputs**0.5, ups)])
    return stacked


def places(stacked: StackedAdditions, *numbers: int) -> torch.Tensor:
    found = [stacked.place_of(number) or 0 for number in numbers]
    return torch.tensor(found, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "rows"), [(24, 1), (130, 5), (1500, 3), (40, 20)])
def test_additions(inputs: int, rows: int, dtype: torch.dtype) -> None:
    """Also more rows than a tile has, and inputs of several parts; rows lie between others."""
    stacked = world(inputs, dtype)
    stacked.for_pass(places(stacked, 5, 0, 8, 5), rows)
    x = random(4 * rows, inputs + 9, dtype=dtype, seed=1)[:, :inputs]
    wide = random(4 * rows, OUTPUTS + 5, dtype=dtype, seed=2)
    found, wanted = wide.clone(), wide.clone()
    add_low_rank(x, found[:, :OUTPUTS], stacked, 0)
    stacked.add(x, wanted[:, :OUTPUTS], 0)
    close(found, wanted, 4.0)
    assert torch.equal(found[rows : 2 * rows], wide[rows : 2 * rows]), "who has no adapter is let alone"
    assert torch.equal(found[:, OUTPUTS:], wide[:, OUTPUTS:])
    for first in (0, 2 * rows, 3 * rows):
        assert not torch.equal(found[first : first + rows], wide[first : first + rows])
    assert torch.equal(found[2 * rows : 3 * rows, 70:90], wide[2 * rows : 3 * rows, 70:90])


def test_a_rows_bits_are_its_own() -> None:
    stacked, rows = world(200, torch.float32), 4
    x, out = random(3 * rows, 200, seed=1), random(3 * rows, OUTPUTS, seed=2)
    together = out.clone()
    stacked.for_pass(places(stacked, 8, 5, 8), rows)
    add_low_rank(x, together, stacked, 0)
    for request, number in enumerate((8, 5, 8)):
        for row in range(request * rows, (request + 1) * rows):
            alone = out[row : row + 1].clone()
            stacked.for_pass(places(stacked, number), 1)
            add_low_rank(x[row : row + 1], alone, stacked, 0)
            assert torch.equal(alone[0], together[row])


def test_a_place_that_was_given_back_holds_nothing_of_before() -> None:
    stacked = world(24, torch.float32)
    one = stacked.place_of(5)
    stacked.drop(5)
    assert stacked.place_of(5) is None
    up = Up(1, slice(0, 2), slice(70, 90), random(20, 2))
    stacked.put(9, [Addition(random(2, 24), (up,))])
    assert stacked.place_of(9) == one
    x, out = random(2, 24), torch.zeros(2, OUTPUTS, device=DEVICE)
    stacked.for_pass(places(stacked, 9), 2)
    add_low_rank(x, out, stacked, 0)
    assert out[:, 70:90].abs().min() > 0 and not out[:, :70].any() and not out[:, 90:].any()
    for number in (10, 11, 12):  # one more than there are places: it is not kept, and the others are
        stacked.put(number, [None])
    assert [stacked.place_of(number) is None for number in (8, 9, 10, 11, 12)] == [False] * 3 + [True] * 2

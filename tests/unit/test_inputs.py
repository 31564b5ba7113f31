"""The ragged batch of a pass: rows, positions, slots and masks, against a row-by-row construction."""

from __future__ import annotations

import numpy as np
import torch

from draftwise.models.inputs import RowInput, build_step_input, tree_layout

CPU = torch.device("cpu")


def test_tree_layout_of_the_worked_example() -> None:
    assert tree_layout((-1, -1, 0)) == ([1, 1, 2], [0b0011, 0b0101, 0b1011])
    assert tree_layout((-1, 0, 1)) == ([1, 2, 3], [0b0011, 0b0111, 0b1111])


def test_worked_example_of_a_mixed_batch() -> None:
    table = np.array([7, 2, 5, 1], np.int32)
    batch = build_step_input(
        [RowInput([10, 11, 12], 0, table[:1]), RowInput([20, 30, 31], 9, table, parents=(-1, -1))], 4, CPU
    )
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions.tolist() == [0, 1, 2, 9, 10, 10]
    # keys 9, 10, 11 of the second request are in its third block, number 5
    assert batch.slots.tolist() == [28, 29, 30, 21, 22, 23]
    attention = batch.attention
    assert attention.query_start_np.tolist() == [0, 3, 6]
    assert attention.context_len_np.tolist() == [0, 9]
    assert attention.is_tree_np.tolist() == [False, True]
    assert attention.block_tables_np.tolist() == [[7, 0, 0, 0], [7, 2, 5, 1]]
    assert attention.ancestors_np is not None
    assert attention.ancestors_np.tolist()[3:] == [0b001, 0b011, 0b101]


def test_a_full_tree_uses_all_64_bits() -> None:
    parents = tuple(range(-1, 62))
    batch = build_step_input(
        [RowInput(list(range(64)), 5, np.arange(20, dtype=np.int32), parents=parents)], 4, CPU
    )
    assert batch.attention.ancestors_np is not None
    assert int(batch.attention.ancestors_np[-1]) == 2**64 - 1
    assert batch.positions.tolist() == list(range(5, 69))


def test_one_chain_takes_the_short_way_to_the_same_result() -> None:
    table = np.array([3, 0, 9], np.int32)
    row = RowInput([4, 5, 6, 7], 6, table)
    single = build_step_input([row], 4, CPU)
    double = build_step_input([row, RowInput([1], 0, table)], 4, CPU)
    assert torch.equal(single.token_ids, double.token_ids[:4])
    assert torch.equal(single.positions, double.positions[:4])
    assert torch.equal(single.slots, double.slots[:4])
    assert single.slots.dtype == single.token_ids.dtype == single.positions.dtype == torch.int64
    assert single.attention.query_start_np.tolist() == [0, 4]

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


def test_worked_example_of_a_tree_level_by_level() -> None:
    table = np.array([7, 2, 5, 1], np.int32)
    tokens = RowInput([3], 2, table, first_key=1)
    first = build_step_input([RowInput([5, 7], 10, table, ancestors=(0b001, 0b010)), tokens], 4, CPU)
    assert first.positions.tolist() == [10, 10, 2]
    assert first.attention.tree_start_np is None
    assert first.attention.first_key_np is not None
    assert first.attention.first_key_np.tolist() == [0, 1]
    second = build_step_input(
        [RowInput([9], 10, table, ancestors=(0b101,), tree_start=2, first_key=4), tokens], 4, CPU
    )
    assert second.positions.tolist() == [11, 2]
    assert second.slots.tolist() == [4, 30]  # key 12: fourth block, number 1
    assert second.attention.ancestors_np is not None and second.attention.ancestors_np[0] == 0b101
    assert second.attention.tree_start_np is not None
    assert second.attention.tree_start_np.tolist() == [2, 0]
    assert second.attention.is_tree_np.tolist() == [True, False]
    alone = build_step_input(
        [RowInput([9], 10, table, ancestors=(0b101,), tree_start=2, first_key=4)], 4, CPU
    )
    assert alone.positions.tolist() == [11] and alone.slots.tolist() == [4]


def test_positions_of_draft_heads_are_one_less_than_their_keys() -> None:
    table = np.array([7, 2, 5, 1], np.int32)
    chain = RowInput([4, 5], 1, table, first_key=1)
    tree = RowInput([8, 5, 7], 9, table, parents=(-1, -1))
    level = RowInput([5], 9, table, ancestors=(0b11,), tree_start=1)
    for rows, positions, slots in (
        ([chain], [0, 1], [29, 30]),
        ([chain, tree, level], [0, 1, 8, 9, 9, 9], [29, 30, 21, 22, 23, 22]),
    ):
        batch = build_step_input(rows, 4, CPU, position_offset=-1)
        assert batch.positions.tolist() == positions
        assert batch.slots.tolist() == slots
    assert build_step_input([chain], 4, CPU).positions.tolist() == [1, 2]


def test_a_row_each_takes_the_short_way_to_the_same_result() -> None:
    tables = [np.array([3, 0, 9], np.int32), np.array([5], np.int32), np.array([6, 7], np.int32)]
    rows = [
        RowInput([4], 6, tables[0]),
        RowInput([9], 3, tables[1]),
        RowInput([1], 5, tables[2], first_key=2),
    ]
    short = build_step_input(rows, 4, CPU, position_offset=-1)
    general = build_step_input([*rows, RowInput([2, 3], 0, tables[1])], 4, CPU, position_offset=-1)
    assert short.positions.tolist() == general.positions[:3].tolist() == [5, 2, 4]
    assert short.slots.tolist() == general.slots[:3].tolist() == [2, 23, 29]
    assert short.slots.dtype == short.positions.dtype == torch.int64

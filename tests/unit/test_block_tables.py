"""Block tables of the executor's requests, side by side."""

from __future__ import annotations

import numpy as np
import torch

from draftwise.models.inputs import Blocks, pack_rows
from draftwise.runner.rows import BlockTables, Row
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import Speculation


def test_lines_grow_are_cut_and_are_zero_for_the_next_request() -> None:
    tables = BlockTables()
    lines = [tables.open() for _ in range(20)]  # more than there is room for at first
    assert len(set(lines)) == 20
    for i, line in enumerate(lines):
        tables.write(line, 0, [i + 1])
    tables.write(lines[3], 1, range(100, 130))  # wider than at first
    assert tables.line(lines[3])[:4].tolist() == [4, 100, 101, 102]
    for i in (0, 3, 19):
        place = lines[i] * tables.width
        assert tables.ids_np[place : place + 2].tolist() == [i + 1, 100 if i == 3 else 0]
    tables.cut(lines[3], 2)
    assert tables.line(lines[3])[:4].tolist() == [4, 100, 0, 0]
    tables.close(lines[3])
    again = tables.open()
    assert again == lines[3] and not tables.line(again).any()


def test_a_batch_is_a_copy() -> None:
    """A pass may still read it when the next step's blocks are written."""
    tables = BlockTables()
    one, two = tables.open(), tables.open()
    tables.write(one, 0, (5, 6))
    tables.write(two, 0, (7,))
    blocks = Blocks(tables.ids_np, [one * tables.width, two * tables.width], [2, 1])
    batch = pack_rows([1, 2], [0, 1, 2], [0, 0], blocks, 4, torch.device("cpu"))
    tables.write(two, 1, (8,))
    assert batch.attention.block_tables_np.tolist() == [[5, 6], [7, 0]]


def test_what_a_request_shows_of_its_blocks_outlives_the_lines() -> None:
    tables = BlockTables()
    row = make_row(tables)
    row.add_blocks([3, 4, 5])
    shown = row.blocks_np
    tables.write(tables.open(), 0, range(100))  # all lines move
    assert row.blocks_np.tolist() == shown.tolist() == [3, 4, 5]
    row.add_blocks([6])
    row.trim(2)
    assert row.blocks_np.tolist() == [3, 4] == tables.line(row.line)[:2].tolist()
    row.add_blocks([9])
    assert row.blocks_np.tolist() == [3, 4, 9]


def make_row(tables: BlockTables) -> Row:
    tokens_np = np.arange(8, dtype=np.int32)
    params = SamplingParams()
    state = SamplingState(params, seed=1, sample_index=0, token_ids_np=tokens_np, num_prompt=8, vocab_size=10)
    return Row(0, tokens_np, 8, 8, 20, 0, state, Speculation(), frozenset(), None, tables, tables.open())

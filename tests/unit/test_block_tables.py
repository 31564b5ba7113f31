"""Block tables of the executor's requests, side by side."""

from __future__ import annotations

from draftwise.runner.rows import BlockTables


def test_lines_grow_are_cut_and_are_zero_for_the_next_request() -> None:
    tables = BlockTables()
    lines = [tables.open() for _ in range(20)]  # more than there is room for at first
    assert len(set(lines)) == 20
    for i, line in enumerate(lines):
        tables.write(line, 0, [i + 1])
    tables.write(lines[3], 1, range(100, 130))  # wider than at first
    assert tables.of([lines[0], lines[3], lines[19]], 3).tolist() == [[1, 0, 0], [4, 100, 101], [20, 0, 0]]
    assert tables.of([lines[3]], 2).tolist() == [[4, 100]]
    tables.cut(lines[3], 2)
    assert tables.line(lines[3])[:4].tolist() == [4, 100, 0, 0]
    tables.close(lines[3])
    again = tables.open()
    assert again == lines[3] and not tables.line(again).any()


def test_a_batch_of_several_is_a_copy() -> None:
    """A pass may still read it when the next step's blocks are written."""
    tables = BlockTables()
    one, two = tables.open(), tables.open()
    tables.write(one, 0, (5, 6))
    batch = tables.of([one, two], 2)
    tables.write(two, 0, (7,))
    assert batch.tolist() == [[5, 6], [0, 0]]

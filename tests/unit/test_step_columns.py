"""Plans and results in columns, against records."""

from __future__ import annotations

import pickle
from array import array

import pytest

from draftwise.adapt.outcomes import outcomes
from draftwise.names import method_number
from draftwise.sched.columns import NUMBERS, PROPOSED, PlanColumns, RowColumns
from draftwise.types import RowPlan, RowResult, TokenLogprobs, chain_parents

ROWS = [
    RowPlan(4, 1, 3, 2, (7, 9), True),
    RowPlan(2, 30, 0, 0, (), False),
    RowPlan(11, 1, 0, 5),
]


def test_plans_in_columns_are_their_rows() -> None:
    columns = PlanColumns.of(ROWS)
    assert PlanColumns.of(columns) is columns
    assert list(columns) == ROWS and columns[-1] == ROWS[2] and columns[:2] == tuple(ROWS[:2])
    assert dict(columns.by_rid) == {row.rid: row for row in ROWS}
    assert list(pickle.loads(pickle.dumps(columns))) == ROWS
    with pytest.raises(IndexError):
        columns[3]


def test_results_in_columns_are_their_rows() -> None:
    """A tree, of which a path was taken; a request that was decided one by one; a chain; one without a distribution;
    a plain one."""
    other = RowResult(
        6, (8, 1), 1, 1, (0,), (8,), (-1,), "ngram", 3, (TokenLogprobs(8, -1.0, 1), TokenLogprobs(1, -2.0, 1))
    )
    rows = [
        RowResult(5, (30, 50, 2), 4, 2, (1, 2), (10, 30, 50, 70), (-1, -1, 1, 1), "suffix", 4),
        other,
        RowResult(7, (9,), 2, 0, (), (4, 5), chain_parents(2), "mtp", 0),
        RowResult(8, error="RequestError: the model's logits are not finite"),
        RowResult(9, (77,), num_proposed=1),
    ]
    count = len(rows)
    numbers = array("i", bytes(4 * NUMBERS * count))
    decided = {
        0: (4, 2, 2, method_number("suffix"), 0, 3, 0, 0),
        2: (2, 0, 2, method_number("mtp"), 0, 1, 3, 0),
        3: (3, 0, 0, method_number("mtp"), 0, 0, 4, 1),
        4: (0, 0, 0, 0, 0, 1, 4, 0),
    }
    for i, own in decided.items():
        numbers[i::count] = array("i", own)
    for i in decided:
        numbers[PROPOSED * count + i] = rows[i].num_proposed
    drafts, parents = [10, 30, 50, 70, 4, 5, 1, 1, 1], [-1, -1, 1, 1, -1, 0, -1, 0, 1]
    paths = [1, 2, 0, 0, 0, 0, 0, 0, 0]
    columns = RowColumns(
        [row.rid for row in rows],
        numbers,
        array("i", [30, 50, 2, 9, 77]),
        array("i", drafts + parents),
        array("i", paths),
        {},
    )
    columns.take({1: other})
    assert list(columns) == rows and columns[1] is other and columns[2].draft_parents is chain_parents(2)
    assert list(pickle.loads(pickle.dumps(columns))) == rows
    taken = [
        numbers[1::count].tolist()[:6],
        columns.tokens[numbers[1 + 6 * count] : numbers[1 + 6 * count] + 2].tolist(),
    ]
    assert taken == [[1, 1, 1, method_number("ngram"), 3, 2], [8, 1]]
    # The request that failed has drafts in the columns alone; nobody learns from them.
    told = [[outcome for outcome in outcomes(given) if outcome[5]] for given in (columns, rows)]
    assert told[0] == told[1] and len(told[0]) == 4
    assert told[0][0] == (5, 4, 2, 2, 4, 3), "four drafts of depth 2 are a tree"

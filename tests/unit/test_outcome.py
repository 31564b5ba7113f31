"""What the scheduler is told of a row."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise.runner.batch import StepRow
from draftwise.runner.outcome import row_results
from draftwise.types import EMPTY_PROPOSAL, Proposal, RowPlan, Verification, chain


class _Row:
    rid = 3
    proposal = EMPTY_PROPOSAL


@pytest.mark.parametrize(
    ("proposal", "method"), [(chain([5], "ngram"), "ngram"), (Proposal(method="ngram"), "none")]
)
def test_a_step_without_drafts_is_a_plain_one(proposal: Proposal, method: str) -> None:
    """Steps are planned ahead for drafts that then do not come: nobody drafted what such a step verified."""
    row: Any = _Row()
    step = StepRow(row, RowPlan(3, 1, 1, 1), proposal)
    (told,) = row_results([step], [Verification((), (7,))], {}, {})
    assert (told.method, told.num_drafted, told.num_accepted) == (method, len(proposal.tokens), 0)

"""What came of a request in a step, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftwise.runner.batch import StepRow
from draftwise.runner.rows import Row
from draftwise.types import RowResult, TokenLogprobs, Verification, new_record

Outcome = Verification | Exception | None
"""Of a request in a step: what was committed, why it failed, or None: a chunk of its prompt was computed."""


def committed_rows(step: StepRow, answer: Outcome, start: int) -> Sequence[int]:
    """[n] rows of the batch whose tokens are final now; ``start`` is the request's first one.

    Example: rows 5.. are one known token and four nodes, of which nodes 1 and 3 were accepted: rows 5, 7 and 9.
    """
    if isinstance(answer, Exception):
        return ()
    first_node = start + step.planned.num_new
    path = () if answer is None else answer.path
    if not path or path[-1] == len(path) - 1:  # nodes 0, 1, ...
        return range(start, first_node + len(path))
    return [*range(start, first_node), *[first_node + node for node in path]]


def drafting(steps: Sequence[StepRow], outcomes: Sequence[Outcome]) -> list[tuple[Row, int]]:
    """Who drafts after this step, and how much: they may, they reached their root, and are not known to have ended."""
    return [
        (step.row, step.planned.draft_budget)
        for step, outcome in zip(steps, outcomes, strict=True)
        if step.planned.draft_budget
        and outcome.__class__ is Verification
        and step.row.stop_token_ids.isdisjoint(outcome.token_ids)
    ]


def row_result(
    step: StepRow,
    outcome: Outcome,
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
    kv_transfer_params: Mapping[str, object] | None,
) -> RowResult:
    """What the scheduler is told, once the request has drafted; ``prompt_logprobs``: of the chunk's tokens."""
    row, _, proposal = step
    if outcome is None:
        return RowResult(row.rid, prompt_logprobs=prompt_logprobs)
    if isinstance(outcome, Exception):
        return RowResult(row.rid, error=f"{type(outcome).__name__}: {outcome}")
    path, token_ids, logprobs = outcome
    drafts = proposal.tokens
    return new_record(
        RowResult,
        (
            row.rid,
            token_ids,
            len(drafts),
            len(path),
            path,
            drafts,
            proposal.parents,
            proposal.method if drafts else "none",
            len(row.proposal.tokens),
            logprobs,
            prompt_logprobs,
            kv_transfer_params,
            None,
        ),
    )

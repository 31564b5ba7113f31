"""The outcome of a step for a request, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftwise.runner.batch import StepRow
from draftwise.runner.rows import Row
from draftwise.types import RowResult, TokenLogprobs, Verification, new_record

Outcome = Verification | Exception | None
"""A request's outcome in a step: its committed tokens, its error, or None: a chunk of its prompt was computed."""


def committed_rows(start: int, num_new: int, path: Sequence[int]) -> Sequence[int]:
    """[n] rows of the batch whose tokens are final now: ``start`` is the request's first one, ``num_new`` known tokens
    stand there, the tree behind them, of which ``path`` was accepted.

    Example: rows 5.. are one known token and four nodes, of which nodes 1 and 3 were accepted: rows 5, 7 and 9.
    """
    first_node = start + num_new
    if not path or path[-1] == len(path) - 1:  # nodes 0, 1, ...
        return range(start, first_node + len(path))
    return [*range(start, first_node), *[first_node + node for node in path]]


def drafting(steps: Sequence[StepRow], outcomes: Sequence[Outcome]) -> list[tuple[Row, int]]:
    """The requests that draft after this step, and how much: those that may, have reached their root, and are not
    known to have ended."""
    return [
        (step.row, step.planned.draft_budget)
        for step, outcome in zip(steps, outcomes, strict=True)
        if step.planned.draft_budget
        and outcome.__class__ is Verification
        and step.row.stop_token_ids.isdisjoint(outcome.token_ids)
    ]


def row_results(
    steps: Sequence[StepRow],
    outcomes: Sequence[Outcome],
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]],
    transferred: Mapping[int, Mapping[str, object] | None],
) -> tuple[RowResult, ...]:
    """The results for the scheduler, once the requests have drafted. By step row: log-probabilities of a chunk's
    tokens,
    and what came of a prompt (`Proposer.transfer`)."""
    results = []
    more = bool(prompt_logprobs or transferred)
    for i, ((row, _, proposal), outcome) in enumerate(zip(steps, outcomes, strict=True)):
        of_prompt = prompt_logprobs.get(i) if more else None
        if outcome.__class__ is Verification:
            path, token_ids, logprobs = outcome
            drafts = proposal.tokens
            results.append(
                new_record(
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
                        of_prompt,
                        transferred.get(i) if more else None,
                        None,
                    ),
                )
            )
        elif outcome is None:
            results.append(RowResult(row.rid, prompt_logprobs=of_prompt))
        else:
            results.append(RowResult(row.rid, error=f"{type(outcome).__name__}: {outcome}"))
    return tuple(results)

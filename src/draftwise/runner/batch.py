"""What a step computes: the rows of all requests that take part, and which of them need logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from draftwise.models.inputs import TreeRows, pack_rows
from draftwise.runner.rows import BlockTables, Row
from draftwise.types import EMPTY_PROPOSAL, Proposal, RowPlan, StepInput
from draftwise.verify.base import VerifyRequest


class StepRow(NamedTuple):
    """A request's part in a step, with that prefix of its waiting proposal which is verified."""

    row: Row
    planned: RowPlan
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step of R requests, put together.

    ``starts`` [R + 1]: first row of each request in the batch. ``requests``: those that reach their last known token
    and are decided; ``owners[j]``: step row of ``requests[j]``; ``structured``: which of ``requests`` have a grammar;
    ``rows``: batch rows with logits, None for all; ``prompt``: (step row, first batch row, count) where prompt logprobs
    were asked for.
    """

    steps: list[StepRow]
    starts: list[int]
    input: StepInput
    requests: list[VerifyRequest]
    owners: list[int]
    structured: list[int]
    rows: list[int] | None
    prompt: list[tuple[int, int, int]]


def assemble(
    plans: Sequence[RowPlan],
    rows: Mapping[int, Row],
    tables: BlockTables,
    block_size: int,
    device: torch.device,
) -> StepBatch | None:
    """Put a planned step together; None if nobody takes part, because all have all their tokens.

    Example: request 0 computes tokens 5, 6, 7 of its prompt, the last of which is the root; request 1 verifies drafts 8
    and 9 below its root 4. Batch rows: 5 6 7 | 4 8 9; starts 0 3 6; logits of rows 2 | 3 4 5; the requests' first rows
    among them: 0 and 1.
    """
    steps: list[StepRow] = []
    tokens: list[int] = []
    starts = [0]
    contexts: list[int] = []
    trees: list[TreeRows] = []
    requests: list[VerifyRequest] = []
    owners: list[int] = []
    structured: list[int] = []
    logit_rows: list[int] = []
    prompt: list[tuple[int, int, int]] = []
    for planned in plans:
        row = rows[planned.rid]
        if row.num_tokens >= row.max_total:
            continue
        context, num_new, tokens_np = row.num_computed, planned.num_new, row.tokens_np
        known = context + num_new
        if num_new == 1:
            tokens.append(tokens_np.item(context))
        else:
            tokens += tokens_np[context:known].tolist()
        root = len(tokens) - 1
        proposal = EMPTY_PROPOSAL
        if planned.num_draft:
            proposal = row.proposal.prefix(planned.num_draft)
            tokens += proposal.tokens
            if not proposal.is_chain:  # a chain is a causal run of rows: no mask is needed for it
                trees.append(TreeRows(len(steps), proposal.parents))
        if row.prompt_logprobs is not None and context < row.num_prompt - 1:
            prompt.append((len(steps), starts[-1], min(num_new, row.num_prompt - 1 - context)))
        if known == row.num_tokens:  # else a chunk: nothing to sample yet
            request = VerifyRequest(
                row.state, proposal, len(logit_rows), row.speculation.rule, tokens_np[:known], None, root
            )
            if row.grammar is not None:
                structured.append(len(requests))
            requests.append(request)
            owners.append(len(steps))
            logit_rows += range(root, len(tokens))
        steps.append(StepRow(row, planned, proposal))
        contexts.append(context)
        starts.append(len(tokens))
    if not steps:
        return None
    step_input = pack_rows(
        tokens,
        starts,
        contexts,
        tables.of([step.row.line for step in steps], max(step.row.num_blocks for step in steps)),
        block_size,
        device,
        trees=trees,
    )
    all_rows = len(logit_rows) == len(tokens)
    return StepBatch(
        steps, starts, step_input, requests, owners, structured, None if all_rows else logit_rows, prompt
    )

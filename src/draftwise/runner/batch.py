"""The work of a step: the rows of all requests that take part, and which of them need logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from draftwise.kernels.cpu.columns import RowPacker
from draftwise.models.inputs import Blocks, TreeRows, pack_rows
from draftwise.runner.rows import BlockTables, Row
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, Proposal, RowPlan, StateRows, StepInput, new_record
from draftwise.verify.base import VerifyColumns, VerifyRequest


class StepRow(NamedTuple):
    """A request's part in a step, with that prefix of its waiting proposal which is verified."""

    row: Row
    planned: RowPlan
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step of R requests, put together, in columns.

    ``starts`` [R + 1]: first row of each request in the batch. ``decided``: of those that reach their last known token;
    ``owners[j]``: step row of the j-th of them, ``roots[j]``: batch row of its root; ``structured``: which of them have
    a grammar; ``plain``: ``decided`` says all about them. ``rows``: batch rows with logits, None for all; ``prompt``:
    (step row, first batch row, count) where prompt logprobs were asked for.
    """

    steps: list[StepRow]
    starts: list[int]
    input: StepInput
    decided: VerifyColumns
    owners: list[int]
    roots: list[int]
    structured: list[int]
    plain: bool
    rows: list[int] | None
    prompt: list[tuple[int, int, int]]

    def requests(self) -> list[VerifyRequest]:
        """The decisions as records, for readers that need more than the columns."""
        found = []
        for owner, root, first_row in zip(self.owners, self.roots, self.decided.first_rows, strict=True):
            row, _, proposal = self.steps[owner]
            known_np = row.tokens_np[: row.num_tokens]
            found.append(
                VerifyRequest(row.state, proposal, first_row, row.speculation.rule, known_np, None, root)
            )
        return found


def assemble(
    plans: Sequence[RowPlan],
    rows: Mapping[int, Row],
    tables: BlockTables,
    block_size: int,
    device: torch.device,
    packer: RowPacker | None = None,
    carries_state: bool = False,
) -> StepBatch | None:
    """Put a planned step together; None if nobody takes part, because all have all their tokens. ``packer``: see
    `pack_rows`. ``carries_state``: the model has recurrent state; a request's line is its slot.

    Example: request 0 computes tokens 5, 6, 7 of its prompt, the last of which is the root; request 1 verifies drafts 8
    and 9 below its root 4. Batch rows: 5 6 7 | 4 8 9; starts 0 3 6; logits of rows 2 | 3 4 5; the requests' first rows
    among them: 0 and 1.
    """
    steps: list[StepRow] = []
    tokens: list[int] = []
    starts = [0]
    contexts: list[int] = []
    places: list[int] = []
    widths: list[int] = []
    trees: list[TreeRows] = []
    states: list[SamplingState] = []
    proposals: list[Proposal] = []
    first_rows: list[int] = []
    rules: list[str] = []
    owners: list[int] = []
    roots: list[int] = []
    structured: list[int] = []
    logit_rows: list[int] | None = None  # made once they are not all rows
    prompt: list[tuple[int, int, int]] = []
    plain = True
    adapters: list[int] = []
    adapted = 0  # requests with an adapter
    num_logits = 0
    table_width = tables.width
    for planned in plans:
        _, num_new, num_draft, _, _, _ = planned
        row = rows[planned.rid]
        num_tokens = row.num_tokens
        if num_tokens >= row.max_total:
            continue
        context, tokens_np = row.num_computed, row.tokens_np
        known = context + num_new
        if num_new == 1:
            tokens.append(tokens_np.item(context))
        else:
            tokens += tokens_np[context:known].tolist()
        root = len(tokens) - 1
        if num_draft:
            proposal = row.proposal
            if num_draft < len(proposal.tokens):
                proposal = proposal.prefix(num_draft)
            tokens += proposal.tokens
            if not proposal.is_chain:  # a chain is a causal run of rows: no mask is needed for it
                trees.append(TreeRows(len(steps), proposal.parents))
        else:
            proposal = EMPTY_PROPOSAL
        if row.prompt_logprobs is not None and context < row.num_prompt - 1:
            prompt.append((len(steps), starts[-1], min(num_new, row.num_prompt - 1 - context)))
        reached = known == num_tokens  # else a chunk: nothing to sample yet
        if (num_new > 1 or not reached) and logit_rows is None:
            logit_rows = list(range(starts[-1]))
        if reached:
            if row.grammar is not None:
                structured.append(len(owners))
            state = row.state
            if not state.plain:
                plain = False
            states.append(state)
            proposals.append(proposal)
            first_rows.append(num_logits)
            rules.append(row.rule)
            owners.append(len(steps))
            roots.append(root)
            num_logits += len(tokens) - root
            if logit_rows is not None:
                logit_rows += range(root, len(tokens))
        steps.append(new_record(StepRow, (row, planned, proposal)))
        contexts.append(context)
        adapters.append(row.adapter)
        adapted += row.adapter > 0
        places.append(row.line * table_width)
        widths.append(row.num_blocks)
        starts.append(len(tokens))
    if not steps:
        return None
    step_input = pack_rows(
        tokens,
        starts,
        contexts,
        Blocks(tables.ids_np, places, widths),
        block_size,
        device,
        trees=trees,
        packer=packer,
        states=StateRows([s.row.line for s in steps], [len(s.proposal) for s in steps])
        if carries_state
        else None,
    )
    if adapted:
        step_input = replace(step_input, adapters=tuple(adapters))
    return StepBatch(
        steps,
        starts,
        step_input,
        VerifyColumns(states, proposals, first_rows, rules),
        owners,
        roots,
        structured,
        plain and not structured,
        logit_rows,
        prompt,
    )

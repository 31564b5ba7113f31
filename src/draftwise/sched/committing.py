"""What a step did to one request, written into it."""

from __future__ import annotations

from draftwise.kv.manager import KVManager
from draftwise.sched.request import Request, StepTrace
from draftwise.types import RowPlan, RowResult, tree_depth

MAX_TRACE_STEPS = 4096
"""Steps a request remembers when its trace is kept; what comes later is not traced, so that a trace is bounded."""


def commit_row(
    request: Request, plan: RowPlan, row: RowResult, kv: KVManager, now: float
) -> tuple[int, str | None]:
    """Take in the row of a running request: commit its K/V, append its tokens as far as stop conditions let them come,
    and count. ``now``: seconds of the scheduler's clock.

    Returns:
        How many tokens were taken, and why the request ends; None: it goes on.
    """
    if row.error is not None:
        request.error = row.error
        return 0, "error"
    (
        _,
        token_ids,
        drafted,
        accepted,
        nodes,
        drafts,
        parents,
        method,
        proposed,
        logprobs,
        of_prompt,
        params,
        _,
    ) = row
    if of_prompt is not None:
        assert request.prompt_logprobs is not None
        request.prompt_logprobs.extend(of_prompt)
    request.num_proposed = proposed
    if not token_ids:  # a chunk that did not reach the last known token
        kv.commit(request.rid, plan.num_new, request.tokens_np, request.num_tokens)
        request.num_computed += plan.num_new
        return 0, None

    if params is not None:
        request.kv_transfer_params = params
    taken, reason = request.append(token_ids)
    if request.logprobs is not None:
        assert logprobs is not None
        request.logprobs.extend(logprobs[:taken])
    # K/V exists for the new tokens and the accepted drafts; of a cut step only what was delivered counts.
    if accepted > taken:
        accepted = taken
    computed = plan.num_new + accepted
    kv.commit(request.rid, computed, request.tokens_np, request.num_tokens)
    request.num_computed += computed
    request.counts.add(method, drafted, accepted, tree_depth(parents) if drafted else 0)
    if request.trace is not None and len(request.trace) < MAX_TRACE_STEPS:
        request.trace.append(StepTrace(method, drafts, parents, nodes, token_ids[:taken]))
    request.last_token_time = now
    return taken, reason

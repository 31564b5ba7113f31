"""Processes the target's logits for rules that take processed ones: masks of grammars, penalties, biases,
temperatures and truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from draftwise.errors import ParametersError
from draftwise.sampling.logits import LogitsRow, adjust, process
from draftwise.sampling.masks import exclude
from draftwise.verify.base import VerifyRequest


def process_rows(
    logits: torch.Tensor, requests: Sequence[VerifyRequest], *, shaped: bool = True
) -> dict[int, Exception]:
    """Process all rows in place; returns errors by row of ``logits``. ``shaped`` off: without temperature,
    min_p, top_k and top_p."""
    if shaped and not any(
        request.state.needs_processing or request.masks is not None for request in requests
    ):
        _scale(logits, requests)
        return {}
    order: list[int] = []  # the logits row of each entry of `rows`
    rows: list[LogitsRow] = []
    can_exclude = False
    for request in requests:
        state, proposal = request.state, request.proposal
        first = request.first_row
        assert len(request.token_ids_np) == state.num_tokens, "state and tokens must stand at the same step"
        order.extend(range(first, first + request.num_rows))
        can_exclude = can_exclude or state.can_exclude or request.masks is not None
        if not state.needs_history:  # all positions are treated alike
            rows.extend([LogitsRow(state, (), request.token_ids_np)] * request.num_rows)
            continue
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        rows.extend(LogitsRow(state, path, request.token_ids_np) for path in paths)
    _apply_masks(logits, requests)
    errors: dict[int, Exception] = {}
    whole = order == list(range(logits.shape[0]))
    part = logits if whole else logits[order]
    if shaped:
        done = process(part, rows, errors)
    else:
        adjust(part, rows, errors)
        done = part
    failures = {order[i]: error for i, error in errors.items()}
    if can_exclude:
        dead = done.amax(dim=-1) == -math.inf
        for i in dead.nonzero().flatten().tolist():
            failures.setdefault(order[i], ParametersError(_nothing_left(rows[i])))
            done[i] = 0.0  # any distribution will do: the request fails if it gets here
    if done is not logits:
        logits[order] = done
    return failures


def _nothing_left(row: LogitsRow) -> str:
    words = "the sampling parameters exclude every token at this position"
    if (
        row.state.num_output + len(row.path) < row.state.min_tokens
    ):  # under a grammar whose text is whole, say
        words += f"; min_tokens ({row.state.min_tokens}) excludes the end"
    return words


def _scale(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> None:
    """`_process` for rows that need only a temperature. Rows of no request are divided by 1."""
    temperatures = [request.state.temperature for request in requests]
    if len(set(temperatures)) == 1:
        if temperatures[0] != 1.0:
            logits.div_(logits.new_full((1, 1), temperatures[0]))
        return
    of_rows = np.ones((logits.shape[0], 1), np.float32)
    for request, temperature in zip(requests, temperatures, strict=True):
        if temperature != 1.0:
            of_rows[request.first_row : request.first_row + request.num_rows] = temperature
    logits.div_(torch.from_numpy(of_rows).to(logits.device))


def _apply_masks(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> None:
    """Exclude tokens that grammars forbid, before everything else."""
    masked = [request for request in requests if request.masks is not None]
    if len(masked) > 1 and sum(request.num_rows for request in masked) == logits.shape[0]:
        masked.sort(key=lambda request: request.first_row)
        exclude(logits, np.concatenate([request.masks for request in masked if request.masks is not None]))
        return
    for request in masked:
        assert request.masks is not None
        exclude(request.rows_of(logits), request.masks)

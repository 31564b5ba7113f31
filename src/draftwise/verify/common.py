"""Small pieces that several rules share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.names import ACCEPT, RECOVER
from draftwise.sampling.noise import many_uniforms, uniform
from draftwise.verify.base import VerifyRequest


def rows_of(requests: Sequence[VerifyRequest]) -> tuple[list[int], list[int]]:
    """All logits rows of the requests, and where each request's root stands among them.

    Example: requests with rows 4..6 and 10..11 -> [4, 5, 6, 10, 11] and [0, 3].
    """
    rows: list[int] = []
    starts: list[int] = []
    for request in requests:
        starts.append(len(rows))
        nodes = len(request.proposal.tokens)
        if nodes:
            rows.extend(range(request.first_row, request.first_row + 1 + nodes))
        else:
            rows.append(request.first_row)
    return rows, starts


def select_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """[len(rows), V]: a view where the rows are consecutive, else a copy."""
    n = len(rows)
    first = rows[0]
    if n == 1 or (rows[-1] - first == n - 1 and list(rows) == list(range(first, first + n))):
        return logits if n == logits.shape[0] else logits[first : first + n]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def accept_uniform(request: VerifyRequest, node: int, depth: int) -> float:
    """The uniform that judges a node. Its token would stand at position num_tokens - 1 + depth."""
    state = request.state
    base = state.num_tokens
    return uniform(state.seed, state.sample_index, ACCEPT, base - 1 + depth, node, base)


def recover_uniform(request: VerifyRequest, node: int, depth: int) -> float:
    """The uniform that draws the token after ``node`` (of that depth; -1 and 0 for the root)."""
    state = request.state
    base = state.num_tokens
    return uniform(state.seed, state.sample_index, RECOVER, base + depth, node, base)


_FEW = 8
"""Requests up to which uniforms are made one by one: array operations take 25 us however few there are."""


def root_uniforms(requests: Sequence[VerifyRequest]) -> list[float]:
    """`recover_uniform` of every request's root."""
    if len(requests) <= _FEW:
        return [recover_uniform(request, -1, 0) for request in requests]
    states = [request.state for request in requests]
    bases = [state.num_tokens for state in states]
    seeds = [state.seed for state in states]
    return many_uniforms(RECOVER, seeds, [s.sample_index for s in states], bases, [-1] * len(states), bases)

"""Rule ``greedy``: keep drafts while they are the target's most likely token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.sampling.rows import wanted_rows
from draftwise.types import Proposal, Verification
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.common import rows_of, select_rows


class GreedyRule(Rule):
    """Chains and trees. Ties go to the lowest token id, with and without speculation."""

    lossless = True

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        if not any(request.proposal.tokens for request in requests):
            first_rows = [request.first_row for request in requests]
            return [Verification((), (token,)) for token in wanted_rows(select_rows(logits, first_rows))]
        rows, starts = rows_of(requests)
        best = wanted_rows(select_rows(logits, rows))
        return [walk(request.proposal, best, start) for request, start in zip(requests, starts, strict=True)]


def walk(proposal: Proposal, wanted: Sequence[int], start: int) -> Verification:
    """Follow the tokens the target wants: ``wanted[start]`` after the root, ``wanted[start + 1 + i]`` after node i.

    One pass over the nodes suffices, because parents precede their children.
    """
    if not proposal.tokens:
        return Verification((), (wanted[start],))
    path: list[int] = []
    out: list[int] = []
    node = -1
    want = wanted[start]
    for i, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        if parent == node and token == want:
            path.append(i)
            out.append(want)
            node = i
            want = wanted[start + 1 + i]
    out.append(want)
    return Verification(tuple(path), tuple(out))

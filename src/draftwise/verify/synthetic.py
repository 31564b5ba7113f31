"""Rule ``synthetic``: acceptance at given rates, whatever was drafted. For benchmarks only."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.types import Verification
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.common import accept_uniform, rows_of, select_rows
from draftwise.verify.rates import SyntheticAcceptance
from draftwise.verify.rejection import End, finish


class SyntheticRule(Rule):
    """One uniform u per step; drafts are kept while u < rates[depth - 1], so that position i is reached in exactly
    rates[i] of the steps. The kept tokens are the draft's own (of a tree, the first children); the last one is
    the target's."""

    lossless = False

    def __init__(self, acceptance: SyntheticAcceptance) -> None:
        self.rates = acceptance.rates

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        rows, starts = rows_of(requests)
        p = select_rows(logits, rows).softmax(dim=-1)
        ends = []
        for request, start in zip(requests, starts, strict=True):
            u = accept_uniform(request, -1, 0)
            path: list[int] = []
            node = -1
            for i, parent in enumerate(request.proposal.parents):
                if parent == node and len(path) < len(self.rates) and u < self.rates[len(path)]:
                    path.append(i)
                    node = i
            ends.append(End(tuple(path), start + 1 + node))
        return finish(requests, ends, p)

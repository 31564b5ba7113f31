"""Verification that costs what the greedy rule costs, and accepts what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from draftwise.types import Verification
from draftwise.verify.base import BatchRules, PassSlots, VerifyRequest
from draftwise.verify.common import accept_uniform
from draftwise.verify.rates import SyntheticAcceptance
from draftwise.verify.registry import get_rule


class ForcedAcceptance(BatchRules):
    """Random weights agree about nothing. So the greedy rule decides, by the kernels that would decide for users, and
    then as many drafts of each chain are taken as `SyntheticAcceptance` says."""

    names: ClassVar[frozenset[str]] = frozenset({"greedy"})

    def __init__(self, inner: BatchRules | None, acceptance: SyntheticAcceptance) -> None:
        """``inner``: kernels; None: the rule in torch."""
        self._inner = inner
        self.forced = acceptance

    def verify(
        self,
        logits: Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: PassSlots | None = None,
    ) -> list[Verification]:
        if self._inner is not None:
            answers: Sequence[Verification] = self._inner.verify(logits, requests, rules, stored)
        else:
            answers = get_rule("greedy").verify(logits, requests)
        return [self._forced(answer, request) for answer, request in zip(answers, requests, strict=True)]

    def _forced(self, answer: Verification, request: VerifyRequest) -> Verification:
        drafts = request.proposal.tokens
        if not drafts:
            return answer
        assert self.forced is not None
        u = accept_uniform(request, -1, 0)
        kept = sum(u < rate for rate in self.forced.rates[: len(drafts)])
        return Verification(tuple(range(kept)), (*drafts[:kept], answer.token_ids[-1]))

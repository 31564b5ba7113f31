"""Rule ``typical``: typical acceptance (Medusa, arXiv:2401.10774, section 2.3.1). Lossy; only on request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftwise.errors import ConfigError
from draftwise.names import TYPICAL_DELTA, TYPICAL_EPSILON
from draftwise.types import Verification
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.common import rows_of, select_rows
from draftwise.verify.rejection import End, finish, gather_drafts


class TypicalRule(Rule):
    """Keep a draft x if p(x) > min(epsilon, delta * exp(-H(p))), H the entropy of p in nats: in unsure places
    less likely tokens pass. Of a tree the longest kept path wins (the first of equals). The last token is
    drawn from p, or the most likely one at temperature 0. Raises `ConfigError` for values outside [0, 1]."""

    lossless = False

    def __init__(self, epsilon: float = TYPICAL_EPSILON, delta: float = TYPICAL_DELTA) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} of rule 'typical' is {value!r}; it must be in [0, 1]")
        self.epsilon = epsilon
        self.delta = delta

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        rows, starts = rows_of(requests)
        part = select_rows(logits, rows)
        p = part.softmax(dim=-1)
        p_of, _ = gather_drafts(p, starts, requests)
        # H = log(sum exp l) - sum p l, with log(sum exp l) = max l - log max p: no logarithm over the vocabulary
        log_total = part.amax(dim=-1) - p.amax(dim=-1).log()
        entropies = (log_total - (p * part.clamp(min=-1e30)).sum(dim=-1)).tolist()
        ends = []
        for request, start, px in zip(requests, starts, p_of, strict=True):
            paths: dict[int, tuple[int, ...]] = {-1: ()}
            best: tuple[int, ...] = ()
            for i, parent in enumerate(request.proposal.parents):
                threshold = min(self.epsilon, self.delta * math.exp(-entropies[start + 1 + parent]))
                if parent in paths and px[i] > threshold:
                    paths[i] = (*paths[parent], i)
                    if len(paths[i]) > len(best):
                        best = paths[i]
            ends.append(End(best, start + 1 + (best[-1] if best else -1)))
        return finish(requests, ends, p)

"""Rule ``coupled``: drafter and target read the same noise; the emitted token is always the target's own.

Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.names import SHARED
from draftwise.sampling.noise import NoiseKey, gumbel
from draftwise.sampling.rows import wanted_rows
from draftwise.types import Verification
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.common import select_rows


class CoupledRule(Rule):
    """The token at position t is argmax(log p + g_t), g_t Gumbel noise of the SHARED stream: a function of the
    target's logits and (seed, sample index, t, token). A draft is kept if it is that token. Without a proposal
    this is plain sampling, so speculation cannot be told from its output.

    Chains and trees; how drafts came about does not matter. For total variation d between p and q, a draft
    made with the same noise matches with probability at least (1 - d)/(1 + d).
    """

    lossless = True

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        """Level by level over all requests: noise is made only for positions that are reached."""
        paths: list[list[int]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        active = [(r, -1) for r in range(len(requests))]  # (request, last accepted node)
        while active:
            keys = []
            for r, _ in active:
                state = requests[r].state
                position = state.num_tokens + len(paths[r])
                keys.append(NoiseKey(state.seed, state.sample_index, SHARED, position))
            part = select_rows(logits, [requests[r].row_of(node) for r, node in active])
            emitted = wanted_rows(gumbel(keys, logits.shape[1], logits.device).add_(part))
            reached = []
            for (r, node), token in zip(active, emitted, strict=True):
                tokens[r].append(token)
                proposal = requests[r].proposal
                for child in range(node + 1, len(proposal.tokens)):
                    if proposal.parents[child] == node and proposal.tokens[child] == token:
                        paths[r].append(child)
                        reached.append((r, child))
                        break
            active = reached
        return [Verification(tuple(p), tuple(t)) for p, t in zip(paths, tokens, strict=True)]

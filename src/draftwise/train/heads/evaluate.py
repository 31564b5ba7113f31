"""Acceptance of chains, read off the target's own text without an engine.

In text that the target has written greedily every token is its most likely one. A chain of drafts from any place in it
is therefore accepted as far as the head's most likely tokens agree with the target's: no engine is needed
to know the number. At temperature 1 a draft is accepted with the overlap of the two distributions; the product along
the text estimates how far a chain gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from .batch import HeadBatch, row_weights


class DraftHead(Protocol):
    """The interface of a head for evaluation."""

    draft_ids: Tensor | None

    def predictions(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> Iterable[Tensor]:
        """Return the logits [B, M, Vd] of each unroll."""
        ...


@torch.no_grad()
def evaluate_head(module: nn.Module, batches: Iterable[HeadBatch], unrolls: int) -> dict[str, Any]:
    """Measure a head on held-out batches.

    Returns:
        `greedy`: share of places where the first i + 1 drafts are all accepted, per i; `greedy_length`: tokens per
        step those give (one and the accepted ones); `sampled`, `sampled_length`: the same at temperature 1, estimated;
        `loss`: cross-entropy of the first draft.
    """
    head = cast(DraftHead, module)
    greedy, sampled = torch.zeros(unrolls), torch.zeros(unrolls)
    places = entropy = 0.0
    for batch in batches:
        rows = torch.arange(batch.ids.shape[1] - unrolls)
        whole = row_weights(batch, rows, unrolls - 1) * row_weights(batch, rows, 0)
        every, chance = whole.clone(), whole.clone()
        for i, logits in enumerate(head.predictions(batch, rows, unrolls)):
            target = batch.probs[:, rows + 1 + i].float()
            log_q = torch.log_softmax(logits.float(), -1)
            best = log_q.argmax(-1)
            if head.draft_ids is not None:
                every = every * (head.draft_ids[best] == target.argmax(-1))
                target = target[..., head.draft_ids]
            else:
                every = every * (best == target.argmax(-1))
            chance = chance * torch.minimum(log_q.exp(), target).sum(-1)
            greedy[i] += float(every.sum())
            sampled[i] += float(chance.sum())
            if i == 0:
                entropy += float(-((target * log_q).sum(-1) * whole).sum())
        places += float(whole.sum())
    count = max(1.0, places)
    return {
        "greedy_length": round(1 + float(greedy.sum()) / count, 4),
        "greedy": [round(float(x) / count, 4) for x in greedy],
        "sampled_length": round(1 + float(sampled.sum()) / count, 4),
        "sampled": [round(float(x) / count, 4) for x in sampled],
        "loss": round(entropy / count, 4),
    }

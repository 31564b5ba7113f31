"""Parallel drafting with a head: all draft tokens from one of its passes (docs/algorithms/parallel.md).

Source: Hui et al., *P-EAGLE: Parallel-Drafting EAGLE with Scalable Training* (arXiv:2602.01469).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from draftwise.models.heads.base import HeadModel
from draftwise.propose.base import DraftRow, ProposerContext
from draftwise.propose.chains import draw_in_one_pass
from draftwise.propose.heads.passes import HeadDraft
from draftwise.propose.heads.proposer import HeadProposer
from draftwise.types import EMPTY_PROPOSAL, Proposal


class ParallelHeadProposer(HeadProposer):
    """Runs an EAGLE-3 head that was trained to fill in masks: K drafts are one pass of the rows that it has not seen,
    the last known token's among them, and K - 1 mask rows behind them.

    A mask row reads the mask token and the head's mask feature: neither the draft before it nor what the head gave
    there. So a draft's distribution depends on committed tokens alone. Features, chunks, prefix hits and preemption are
    `HeadProposer`'s; what is stored of mask rows is overwritten by the rows of the tokens that come there.
    """

    name: ClassVar[str] = "eagle3"
    drafts_trees: ClassVar[bool] = False
    drafts_dynamic_trees: ClassVar[bool] = False

    @classmethod
    def load(cls, context: ProposerContext) -> HeadModel:
        from draftwise.models.heads.loading import load_eagle3

        return load_eagle3(context)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        drafts = [self._start(row) for row in rows]
        active = [d for d in drafts if d is not None and d.length > len(d.tokens)]
        if active:
            self._draft_in_one_pass(active)
        self.forward_time += self._passes.take_time()
        return [
            EMPTY_PROPOSAL if draft is None else draft.proposal(self.name, self._sample_method)
            for draft in drafts
        ]

    def _draft_in_one_pass(self, drafts: Sequence[HeadDraft]) -> None:
        """Forced tokens take the places of drafts; their rows are masks like the others, as in training."""
        logits = self._passes.masked([(draft, len(draft.tokens), draft.length) for draft in drafts])
        draw_in_one_pass(drafts, logits, self._sample_method, self._head.target_ids)

"""Drafts that a grammar forces, and pruning of other drafts to fit a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from draftwise.propose.base import DraftRow, Proposer
from draftwise.structured.cursor import Cursor, is_point_mass
from draftwise.types import EMPTY_PROPOSAL, Proposal, chain


class GrammarProposer(Proposer):
    """Proposes what the grammar forces, such as the keys of a JSON object. Where the mask has one token left the
    target has no other, so these drafts are always kept. Present in every engine; the method of requests with
    structured outputs where no drafter is loaded."""

    name: ClassVar[str] = "grammar"
    evident: ClassVar[bool] = True

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [chain(row.forced, self.name) if row.forced else EMPTY_PROPOSAL for row in rows]


def fit(proposal: Proposal, grammar: Cursor, forced: tuple[int, ...]) -> Proposal:
    """``proposal`` without tokens that the grammar forbids; ``forced`` itself if less than that remains.

    Nodes drawn from a distribution stay as they are: their drafter drew them under the grammar's masks, and
    dropping some would not be lossless. What is left of point masses begins with the forced tokens as far
    as it goes, for everything else was pruned, so the longer one contains the other.
    """
    if not is_point_mass(proposal):
        return proposal
    if proposal.tokens and proposal.tokens != forced:
        proposal = grammar.prune(proposal)
    if len(proposal) >= len(forced):
        return proposal
    return chain(forced, GrammarProposer.name)

"""The method ``draft_model``: a small model drafts, token by token, level by level, or all tokens in one pass."""

from __future__ import annotations

from typing import ClassVar, Self, cast

from draftwise.propose.base import ProposerContext
from draftwise.propose.models.parallel import ParallelDraftProposer
from draftwise.propose.models.proposer import ModelProposer


class DraftModelProposer(ModelProposer):
    """A smaller model of the target's vocabulary, or a mapped one; PARD models, if ``parallel_drafting`` is set."""

    name: ClassVar[str] = "draft_model"

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        if context.speculative.parallel_drafting and cls is DraftModelProposer:
            return cast(Self, ParallelDraftProposer.create(context))
        return super().create(context)

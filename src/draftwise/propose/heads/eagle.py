"""The methods ``eagle`` and ``eagle3``: see docs/algorithms/eagle.md."""

from __future__ import annotations

from typing import ClassVar, Self, cast

from draftwise.models.heads.base import HeadModel
from draftwise.propose.base import ProposerContext
from draftwise.propose.heads.parallel import ParallelHeadProposer
from draftwise.propose.heads.proposer import HeadProposer


class EagleProposer(HeadProposer):
    """EAGLE heads (Li et al., arXiv:2401.15077), chains and, as EAGLE-2 (arXiv:2406.16858), trees."""

    name: ClassVar[str] = "eagle"

    @classmethod
    def load(cls, context: ProposerContext) -> HeadModel:
        from draftwise.models.heads.loading import load_eagle

        return load_eagle(context)


class Eagle3Proposer(HeadProposer):
    """EAGLE-3 heads (Li et al., arXiv:2503.01840), chains and trees; P-EAGLE heads, if ``parallel_drafting`` is set."""

    name: ClassVar[str] = "eagle3"

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        if context.speculative.parallel_drafting and cls is Eagle3Proposer:
            return cast(Self, ParallelHeadProposer.create(context))
        return super().create(context)

    @classmethod
    def load(cls, context: ProposerContext) -> HeadModel:
        from draftwise.models.heads.loading import load_eagle3

        return load_eagle3(context)

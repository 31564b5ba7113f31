"""The method ``mtp``: see docs/algorithms/mtp.md."""

from __future__ import annotations

from typing import ClassVar

from draftwise.models.heads.base import HeadModel
from draftwise.propose.base import ProposerContext
from draftwise.propose.heads.proposer import HeadProposer


class MtpProposer(HeadProposer):
    """Multi-token-prediction layers (DeepSeek-V3, arXiv:2412.19437), of the target's own checkpoint or of a folder."""

    name: ClassVar[str] = "mtp"

    @classmethod
    def load(cls, context: ProposerContext) -> HeadModel:
        from draftwise.models.heads.loading import load_mtp

        return load_mtp(context)

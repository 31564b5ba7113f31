"""Facts about the computing side of an engine that the host's side needs. The computing side may be in other
processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from draftwise.adapt.performance import PassTime
from draftwise.models.config import ModelConfig
from draftwise.propose.base import Proposer


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts about a drafter; see `Proposer`."""

    prompt_only: bool = False
    drafts_trees: bool = False
    drafts_dynamic_trees: bool = False
    most_drafts: int | None = None
    evident: bool = False
    observes: bool = False
    has_storage: bool = False

    @classmethod
    def of(cls, proposer: Proposer) -> Self:
        """The facts that a proposer states about itself."""
        return cls(
            proposer.prompt_only,
            proposer.drafts_trees,
            proposer.drafts_dynamic_trees,
            proposer.most_drafts,
            proposer.evident,
            proposer.observes,
            proposer.has_storage,
        )


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about a loaded model and its drafters. Can be pickled."""

    model: ModelConfig  # of several ranks: rank 0's part
    drafters: Mapping[str, Traits]
    max_model_len: int
    num_seqs: int  # most requests in one step
    num_blocks: int
    cache_bytes: int
    weight_bytes: int  # the target's
    same_bits: bool
    most_drafts: int | None  # of a model with recurrent state; None: it has none
    pass_times: Sequence[PassTime] | None = None  # where steps stay on a device; None: they do not

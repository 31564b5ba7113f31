"""Models with recurrent state: the room for requests and drafts, and the features that such an engine refuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from draftwise.config import EngineConfig, SpeculativeConfig
from draftwise.errors import ConfigError
from draftwise.kv.states import StateSpec, StateStore, most_sequences
from draftwise.models.base import DecoderModel
from draftwise.propose.base import Proposer

logger = logging.getLogger("draftwise")

_USUAL_DRAFTS = 8
"""Drafts per request for which states are kept if no drafter is configured, because look-ups and grammars draft
anyway."""
WHY_NO_TREES = (
    "the model carries recurrent state, which is kept along a chain of drafts, not in every branch of a tree"
)


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Room for the states of ``slots`` requests, of which each may verify ``drafts`` drafts in a step."""

    spec: StateSpec
    slots: int
    drafts: int

    @property
    def nbytes(self) -> int:
        return StateStore.bytes_of(self.spec, self.slots, self.drafts + 1)

    def store(self, device: torch.device) -> StateStore:
        return StateStore(self.spec, self.slots, self.drafts + 1, device)


def plan_states(
    config: EngineConfig, model: DecoderModel, num_seqs: int, memory: int | None
) -> StatePlan | None:
    """The storage of the target's states; None: the target has none.

    Args:
        num_seqs: requests that should run at once, if there is room for their states.
        memory: the most bytes for states; None: no limit.

    Raises:
        ConfigError: a tree is configured.
    """
    spec = model.state_spec()
    if spec is None:
        return None
    for one in config.speculative:
        for name in ("speculative_token_tree", "speculative_dynamic_tree"):
            if getattr(one, name) is not None:
                raise ConfigError(f"speculative_config.{name}: {WHY_NO_TREES}; leave it out to draft chains")
    drafts = max((one.num_speculative_tokens for one in config.speculative), default=_USUAL_DRAFTS)
    slots = num_seqs if memory is None else most_sequences(spec, drafts + 1, memory, num_seqs)
    if slots < num_seqs:
        logger.warning(
            "at most %d requests run at once, not %d: the recurrent states of one take %d bytes, with %d drafts",
            slots, num_seqs, spec.num_bytes * (drafts + 1), drafts,
        )  # fmt: skip
    plan = StatePlan(spec, slots, drafts)
    logger.info(
        "%s carries recurrent state: %d bytes per request and draft, %d in all for %d requests with %d drafts each; "
        "prompts share no prefixes, and drafts are chains",
        model.config.architecture, spec.num_bytes, plan.nbytes, slots, drafts,
    )  # fmt: skip
    return plan


def check_drafters(drafters: Mapping[str, SpeculativeConfig], proposers: Mapping[str, Proposer]) -> None:
    """Raises ConfigError for a tree whose drafter carries recurrent state."""
    for name, one in drafters.items():
        for field, able in (
            ("speculative_token_tree", proposers[name].drafts_trees),
            ("speculative_dynamic_tree", proposers[name].drafts_dynamic_trees),
        ):
            if getattr(one, field) is not None and proposers[name].most_drafts is not None and not able:
                raise ConfigError(f"speculative_config.{field}: {WHY_NO_TREES}; it drafts chains")

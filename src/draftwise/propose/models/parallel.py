"""Parallel drafting with a draft model: all draft tokens from one pass over mask tokens (docs/algorithms/parallel.md).

Source: An et al., *PARD* (2504.18583), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import torch

from draftwise.config.heads import mask_token_of
from draftwise.config.methods import read_config
from draftwise.errors import ConfigError
from draftwise.models.inputs import RowInput
from draftwise.propose.base import DraftRow, ProposerContext
from draftwise.propose.chains import draw_in_one_pass
from draftwise.propose.models.passes import CATCH_UP_ROWS, ModelDraft
from draftwise.propose.models.proposer import ModelProposer
from draftwise.types import Proposal


class ParallelDraftProposer(ModelProposer):
    """Runs a draft model that was trained to fill in mask tokens: K drafts cost one pass of K - 1 rows more than the
    tokens it catches up on, instead of K passes.

    Fed are the tokens without K/V, the root last, then K - 1 masks; draft i is drawn behind row i of root and masks.
    So a draft's distribution depends on committed tokens alone, not on the drafts before it; it is reported as it is,
    and the proposal is a chain like any other. What was stored of masks is no draft's K/V: accepted
    drafts are fed again.
    """

    name: ClassVar[str] = "draft_model"
    drafts_trees: ClassVar[bool] = False
    drafts_dynamic_trees: ClassVar[bool] = False
    mask_token = 0

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Load the draft model; its config.json names the mask token.

        Raises:
            ConfigError: it does not, or the model does not fit the target.
        """
        config = context.speculative
        assert config.model is not None, "resolved by the configuration"
        token = mask_token_of(read_config(config.model, config.revision) or {})
        if token is None:
            raise ConfigError(
                f"speculative_config.parallel_drafting: the config.json of {config.model!r} names no mask token "
                "(pard_token); the model was not trained to draft in parallel"
            )
        proposer = super().create(context)
        if proposer._carried is not None:
            raise ConfigError(
                f"speculative_config.parallel_drafting: {config.model!r} carries recurrent state, in which masks would "
                "leave their mark; drafting in parallel needs attention alone"
            )
        if not 0 <= token < proposer._model.config.vocab_size:
            raise ConfigError(
                f"speculative_config.parallel_drafting: the mask token {token} of {config.model!r} is not in its "
                f"vocabulary of {proposer._model.config.vocab_size} tokens"
            )
        proposer.mask_token = token
        return proposer

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self._drafts = {}
        drafts = [self._start(row) for row in rows]
        left = [d for d in drafts if d.length > len(d.tokens)]
        while left:
            group = self._together(left)
            self._draft(left[:group])
            left = left[group:]
        return [draft.proposal(self.name, self._sample_method) for draft in drafts]

    def _together(self, drafts: Sequence[ModelDraft]) -> int:
        """How many of the first drafts fit one pass; at least one."""
        rows = 0
        for i, draft in enumerate(drafts):
            rows += min(len(draft.context_np) - draft.fed, CATCH_UP_ROWS) + draft.length
            if i and rows > CATCH_UP_ROWS:
                return i
        return len(drafts)

    def _draft(self, drafts: Sequence[ModelDraft]) -> None:
        inputs: list[RowInput] = []
        wanted: list[int] = []  # rows of the pass that drafts are drawn from
        total = 0
        for draft in drafts:
            end = len(draft.context_np)
            while end - draft.fed > CATCH_UP_ROWS:  # a long prompt, in pieces
                piece = draft.context_np[draft.fed : draft.fed + CATCH_UP_ROWS]
                self._forward([RowInput(piece, draft.fed, draft.row.block_table_np)])
                draft.fed += CATCH_UP_ROWS
            start = min(draft.fed, end - 1)
            masks = draft.length - len(draft.tokens) - 1
            fed_np = np.concatenate([draft.context_np[start:], np.full(masks, self.mask_token, np.int32)])
            inputs.append(RowInput(fed_np, start, draft.row.block_table_np))
            total += len(fed_np)
            wanted += range(total - masks - 1, total)
            draft.fed = end
            draft.stored = end - draft.row.num_tokens  # forced tokens; the masks' K/V is worth nothing
        logits = self._forward(inputs, all_rows=True)
        logits = logits[torch.tensor(wanted, device=logits.device)]
        draw_in_one_pass(drafts, logits, self._sample_method)

"""Drafting with a smaller causal model of the same vocabulary (Leviathan 2211.17192, Chen 2302.01318)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch

from draftwise.errors import ConfigError
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.base import DraftRow, Proposer
from draftwise.propose.registry import ProposerContext
from draftwise.sampling.draw import DraftSampleMethod, draft_tokens, draws_from_q
from draftwise.sampling.logits import LogitsRow
from draftwise.types import EMPTY_PROPOSAL, Proposal, chain

_CATCH_UP_ROWS = 2048
"""Rows of one catch-up pass: a long prompt is caught up in pieces, so that activations stay small."""


@dataclass(slots=True)
class _Draft:
    """One row while it drafts."""

    row: DraftRow
    length: int  # tokens to draft
    tokens: list[int]
    filled: int  # committed tokens with K/V
    stored: int = 0  # drafts with K/V behind them


class DraftModelProposer(Proposer):
    """Runs a draft model autoregressively, all requests of the batch in one pass per position.

    The drafter's K/V lives in its own storage, indexed by the target's block tables. Before it drafts, it catches
    up on committed tokens it has not seen: one token after an accepted chain, more after steps without drafting, a
    rejected tail, a prefix-cache hit it does not share, or a prompt.
    """

    name: ClassVar[str] = "draft_model"
    has_storage: ClassVar[bool] = True

    def __init__(
        self,
        model: DecoderModel,
        *,
        block_size: int,
        max_model_len: int,
        sample_method: DraftSampleMethod = "probabilistic",
    ) -> None:
        """``max_model_len``: no token at this position or later is fed to the drafter; drafting stops there.
        ``sample_method``: "probabilistic" draws from the drafter's distribution, "greedy" takes its argmax."""
        self._model = model
        self._storage: KVStorage | None = None  # see `allocate`
        self._block_size = block_size
        self._max_len = min(max_model_len, model.config.max_model_len)
        self._sample_method = sample_method
        self._drafts: dict[int, _Draft] = {}

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Load the draft model named by ``speculative_config``; raises ConfigError if it does not fit the target."""
        from draftwise.models.loader import load_model

        config = context.speculative
        if config.model is None:
            raise ConfigError("speculative_config: method 'draft_model' needs 'model', a folder or hub id")
        model = load_model(
            config.model,
            dtype=context.dtype,
            device=context.device,
            revision=config.revision,
            quantization=config.quantization,
        )
        if model.config.vocab_size != context.vocab_size:
            raise ConfigError(
                f"the draft model {config.model!r} has a vocabulary of {model.config.vocab_size} tokens, the target "
                f"one of {context.vocab_size}; they must be the same"
            )
        limit = min(config.max_model_len or context.max_model_len, context.max_model_len)
        return cls(
            model,
            block_size=context.block_size,
            max_model_len=limit,
            sample_method="greedy" if config.draft_sample_method == "greedy" else "probabilistic",
        )

    # -------------------------------------------------------------------------------------------- propose

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self._drafts = {}
        drafts = [self._start(row) for row in rows]
        active = [d for d in drafts if d.length > 0]
        if not active:
            return [EMPTY_PROPOSAL] * len(rows)
        hidden = self._catch_up(active)
        columns: list[tuple[list[_Draft], torch.Tensor | None]] = []  # who drew at each depth, from what
        depth = 0
        while active:
            tokens, q = self._draw(active, hidden, depth)
            columns.append((active, q))
            for draft, token in zip(active, tokens, strict=True):
                draft.tokens.append(token)
            depth += 1
            active = [d for d in active if d.length > depth]
            if active:
                hidden = self._advance(active, depth)
        return self._proposals(drafts, columns)

    def _start(self, row: DraftRow) -> _Draft:
        # Draft d (1..length) is drawn from the row at position num_tokens - 2 + d, the last row that is fed.
        n = row.num_tokens
        slots = len(row.block_table_np) * self._block_size
        length = min(row.budget, row.max_depth, self._max_len - n + 1, slots - n + 1)
        if n > self._max_len or n > slots:
            length = 0
        draft = _Draft(row, length, [], min(row.filled, n))
        self._drafts[row.rid] = draft
        return draft

    def _catch_up(self, active: Sequence[_Draft]) -> torch.Tensor:
        """Feed every committed token that has no K/V yet, the root included; hidden states of the roots [R, H]."""
        last: dict[int, torch.Tensor] = {}
        pending = list(active)
        while pending:
            left = _CATCH_UP_ROWS
            inputs: list[RowInput] = []
            members: list[_Draft] = []
            for draft in pending:
                # The root is always fed: its hidden state is needed even if its K/V is there already.
                start = min(draft.filled, draft.row.num_tokens - 1)
                count = min(draft.row.num_tokens - start, left)
                if count == 0:
                    break
                left -= count
                tokens = draft.row.token_ids_np[start : start + count]
                inputs.append(RowInput(tokens, start, draft.row.block_table_np))
                members.append(draft)
                draft.filled = start + count
            if len(members) == len(active) and all(d.filled == d.row.num_tokens for d in members):
                return self._forward(inputs)
            hidden = self._forward(inputs)
            for i, draft in enumerate(members):
                if draft.filled == draft.row.num_tokens:
                    last[draft.row.rid] = hidden[i]
            pending = [d for d in pending if d.filled < d.row.num_tokens or d.row.rid not in last]
        return torch.stack([last[d.row.rid] for d in active])

    def _advance(self, active: Sequence[_Draft], depth: int) -> torch.Tensor:
        """Feed the last drawn token of each active row: hidden states [R, H]."""
        inputs = [
            RowInput((d.tokens[-1],), d.row.num_tokens + depth - 1, d.row.block_table_np) for d in active
        ]
        for draft in active:
            draft.stored = depth
        return self._forward(inputs)

    def _forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """One pass; hidden states of the last row of each request [R, H]."""
        start = time.perf_counter()
        assert self._storage is not None, "allocate comes before propose"
        batch = build_step_input(inputs, self._block_size, self._model.device)
        hidden = self._model.forward(batch, self._storage).hidden
        if hidden.shape[0] != len(inputs):
            ends = batch.attention.query_start_np[1:].astype(np.int64) - 1
            hidden = hidden[torch.from_numpy(ends).to(hidden.device)]
        self.forward_time += time.perf_counter() - start
        return hidden

    def _draw(
        self, active: Sequence[_Draft], hidden: torch.Tensor, depth: int
    ) -> tuple[list[int], torch.Tensor | None]:
        """Draw one token per row from the drafter's distribution at this depth."""
        start = time.perf_counter()
        logits = self._model.logits(hidden)
        self.forward_time += time.perf_counter() - start
        rows = [
            LogitsRow(state=d.row.sampling, path=tuple(d.tokens), token_ids_np=d.row.token_ids_np)
            for d in active
        ]
        return draft_tokens(
            logits,
            rows,
            rules=[d.row.speculation.rule for d in active],
            positions=[d.row.num_tokens + depth for d in active],
            nodes=[depth] * len(active),
            bases=[d.row.num_tokens for d in active],
            method=self._sample_method,
        )

    def _proposals(
        self, drafts: Sequence[_Draft], columns: Sequence[tuple[list[_Draft], torch.Tensor | None]]
    ) -> list[Proposal]:
        """Turn columns (one per depth, over requests) into rows (one chain per request)."""
        q_rows: dict[int, list[torch.Tensor]] = {}
        for members, q in columns:
            if q is None:
                continue
            for i, draft in enumerate(members):
                q_rows.setdefault(draft.row.rid, []).append(q[i])
        out: list[Proposal] = []
        for draft in drafts:
            if not draft.tokens:
                out.append(EMPTY_PROPOSAL)
                continue
            rows = q_rows.get(draft.row.rid)
            sampled = draws_from_q(draft.row.sampling, draft.row.speculation.rule, self._sample_method)
            q = torch.stack(rows) if rows is not None and sampled else None
            out.append(chain(draft.tokens, self.name, q))
        return out

    # ------------------------------------------------------------------------------------------ state kept

    def filled_after(self, row: DraftRow) -> int:
        draft = self._drafts.get(row.rid)
        return row.filled if draft is None or draft.length <= 0 else draft.filled

    def drafts_stored(self, row: DraftRow) -> int:
        draft = self._drafts.get(row.rid)
        return 0 if draft is None else draft.stored

    def move_slots(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        assert self._storage is not None
        self._storage.move(src, dst)

    def memory_per_block(self) -> int:
        return KVStorage.bytes_per_block(self._model.kv_layout(), self._block_size, self._model.dtype)

    def allocate(self, num_blocks: int) -> None:
        self._storage = KVStorage(
            self._model.kv_layout(), num_blocks, self._block_size, self._model.dtype, self._model.device
        )

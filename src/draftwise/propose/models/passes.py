"""The passes of a draft model over a batch of requests, and the storage of its keys and values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from draftwise.graphs.decoder import GraphedDecoder
from draftwise.kernels.cpu.columns import own_packer
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.base import DraftRow, Proposer
from draftwise.propose.chains import ChainDraft
from draftwise.propose.models.carried import CarriedStates
from draftwise.propose.trees.expansion import ScratchBlocks, TreeModel
from draftwise.propose.trees.growth import TreeLevel
from draftwise.types import IntArray

CATCH_UP_ROWS = 2048
"""Rows of one catch-up pass: a long prompt is caught up in pieces, so that activations stay small."""


@dataclass(slots=True)
class ModelDraft(ChainDraft):
    """One row while it drafts. ``context_np`` [num_tokens + forced]: what is fed before the first draw; ``fed``: how
    much of it has K/V; ``stored``: drafts with K/V behind it."""

    context_np: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    fed: int = 0
    stored: int = 0


class ModelPasses(Proposer, TreeModel):
    """Runs a draft model, all requests of the batch in one pass.

    The drafter's K/V lives in its own storage, indexed by the target's block tables. Before it drafts, it catches
    up on committed tokens it has not seen: one token after an accepted chain, more after steps without drafting, a
    rejected tail, a prefix-cache hit it does not share, or a prompt.
    """

    has_storage: ClassVar[bool] = True

    def __init__(self, model: DecoderModel, block_size: int, max_num_seqs: int, num_drafts: int) -> None:
        """``num_drafts``: tokens of a chain that states are kept for, if the model carries any."""
        self._model = model
        self._storage: KVStorage | None = None  # see `allocate`
        self._scratch: ScratchBlocks
        self._packer = own_packer(model.device)
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        spec = model.state_spec()
        self._carried = None if spec is None else CarriedStates(spec, max_num_seqs, num_drafts, model.device)

    def _filled(self, row: DraftRow) -> int:
        """Leading tokens of the row that have K/V, and state where the model has any."""
        return row.filled if self._carried is None else self._carried.known(row)

    def _catch_up(self, active: Sequence[ModelDraft]) -> torch.Tensor:
        """Feed every committed token that has no K/V yet, the root included, and the forced ones: logits behind the
        last of them [R, V]."""
        last: dict[int, torch.Tensor] = {}
        pending = list(active)
        while pending:
            left = CATCH_UP_ROWS
            inputs: list[RowInput] = []
            members: list[ModelDraft] = []
            for draft in pending:
                # The last one is always fed: its logits are needed even if its K/V is there already.
                end = len(draft.context_np)
                start = min(draft.fed, end - 1)
                count = min(end - start, left)
                if count == 0:
                    break
                left -= count
                tokens = draft.context_np[start : start + count]
                inputs.append(self._input(draft.row, tokens, start))
                members.append(draft)
                draft.fed = start + count
                draft.stored = max(draft.fed - draft.row.num_tokens, 0)
            if len(members) == len(active) and all(d.fed == len(d.context_np) for d in members):
                return self._forward(inputs)
            logits = self._forward(inputs)
            for i, draft in enumerate(members):
                if draft.fed == len(draft.context_np):
                    last[draft.row.rid] = logits[i]
            pending = [d for d in pending if d.fed < len(d.context_np) or d.row.rid not in last]
        return torch.stack([last[d.row.rid] for d in active])

    def _advance(self, active: Sequence[ModelDraft]) -> torch.Tensor:
        """Feed the last drawn token of each active row: logits [R, V]."""
        inputs = [self._input(d.row, (d.tokens[-1],), d.row.num_tokens + len(d.tokens) - 1) for d in active]
        for draft in active:
            draft.stored = len(draft.tokens)
        return self._forward(inputs)

    def _input(self, row: DraftRow, tokens: Sequence[int] | IntArray, start: int) -> RowInput:
        """Tokens of a request from ``start`` on. What stands behind its known ones may be taken back."""
        if self._carried is None:
            return RowInput(tokens, start, row.block_table_np)
        revocable = max(start + len(tokens) - row.num_tokens, 0)
        slot = self._carried.slot(row.rid)
        return RowInput(tokens, start, row.block_table_np, state_slot=slot, revocable=revocable)

    def _forward(self, inputs: Sequence[RowInput], all_rows: bool = False) -> torch.Tensor:
        """One pass; logits of the last row of each request [R, V], or of all rows."""
        start = time.perf_counter()
        assert self._storage is not None, "allocate comes before propose"
        batch = build_step_input(inputs, self._block_size, self._model.inputs_on, packer=self._packer)
        rows = None
        if not all_rows and batch.token_ids.shape[0] != len(inputs):
            rows = (batch.attention.query_start_np[1:] - 1).tolist()
        logits = self._model.logits_alone(batch, self._storage, rows)
        self.forward_time += time.perf_counter() - start
        return logits

    def expand(self, levels: Sequence[TreeLevel]) -> torch.Tensor:
        inputs = [
            RowInput(
                level.tokens,
                level.task.context_len,
                self._scratch.table(level.member, level.task.row.block_table_np),
                ancestors=level.ancestors,
                tree_start=level.start,
            )
            for level in levels
        ]
        return self._forward(inputs, all_rows=True)

    def _scratch_blocks(self, num_blocks: int) -> ScratchBlocks:
        fed = self._model.captures.fed if isinstance(self._model, GraphedDecoder) else 0
        return ScratchBlocks(num_blocks, self._block_size, self._max_num_seqs, fed)

    def memory_per_block(self) -> int:
        return KVStorage.bytes_per_block(self._model.kv_layout(), self._block_size, self._model.dtype)

    def memory_fixed(self) -> int:
        scratch = self.memory_per_block() * self._scratch_blocks(0).count
        return scratch + (0 if self._carried is None else self._carried.nbytes)

    def remove(self, rid: int) -> None:
        if self._carried is not None:
            self._carried.remove(rid)

    def memory_static(self) -> int:
        return self._model.static_bytes()

    def allocate(self, num_blocks: int) -> None:
        self._scratch = self._scratch_blocks(num_blocks)
        if not self.has_storage:
            return
        total = num_blocks + self._scratch.count
        model = self._model
        self._storage = KVStorage(
            model.kv_layout(), total, self._block_size, model.dtype, model.device, spare=model.pads,
            states=None if self._carried is None else self._carried.store,
        )  # fmt: skip
        model.prepare(self._storage)

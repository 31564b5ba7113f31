"""A draft model's part in steps that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.graphs.loop import DraftLoop
from draftwise.graphs.seats.drafter import Place, SeatedDrafter
from draftwise.graphs.seats.features import DrafterSeats
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.sampling.draw import DraftSampleMethod
from draftwise.types import IntArray

_TOGETHER = 2048
"""Tokens of a prompt in one pass."""


class SeatedModel(SeatedDrafter):
    """A draft model. One that shares the target's storage is asked for its loops alone."""

    def __init__(
        self,
        loops: Sequence[DraftLoop],
        max_len: int,
        sample_method: DraftSampleMethod,
        model: DecoderModel,
        storage: KVStorage,
        block_size: int,
        scratch: Sequence[range],
    ) -> None:
        super().__init__(loops, max_len, sample_method, scratch)
        self._model = model
        self._storage = storage
        self._block_size = block_size

    def _seats(self, loop: DraftLoop) -> DrafterSeats:
        return DrafterSeats(loop, self._max_len)

    def catch_up(self, rid: int, token_ids_np: IntArray, blocks_np: IntArray, filled: int) -> int:
        known = len(token_ids_np)
        if known > self._max_len:
            return filled
        while filled < known - 1:  # the loop reads the last one
            end = min(known - 1, filled + _TOGETHER)
            inputs = [RowInput(token_ids_np[filled:end], filled, blocks_np)]
            batch = build_step_input(inputs, self._block_size, self._model.inputs_on)
            self._model.forward_logits(batch, self._storage, [end - filled - 1])
            filled = end
        return filled

    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        # the loop reads what a step accepts, unless it is stored, and the root
        accepted = drafts if self.plan is None or self.joined is not None else min(drafts, self.plan.levels)
        unseen = known - filled + accepted - stored
        return Place(filled, stored, 0) if filled >= known - 1 and unseen < self.rows else None

    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        return fed, max(drafts - 1, 0) if self.keeps_drafts else 0

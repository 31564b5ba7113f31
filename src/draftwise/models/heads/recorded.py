"""A draft head whose passes are recorded once and replayed as native calls, a whole chain of drafts in one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.blocks import BlockLayout, NativeBlocks
from draftwise.kernels.cpu.book_drafts import BookDrafts, InBooks
from draftwise.kernels.cpu.book_passes import BookPasses
from draftwise.kernels.cpu.chains import Feedback
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.recording import Recording
from draftwise.kernels.cpu.rounds import RoundPasses
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel, HeadOutput
from draftwise.models.heads.block import BLOCK, CONTEXT, BlockHead
from draftwise.models.heads.wrapped import WrappedHead
from draftwise.models.recorded import NO_BATCH
from draftwise.types import ChainDraws, DraftedTree, StepInput, TreeDraws

logger = logging.getLogger("draftwise")

_FEATURES = 0  # the number under which a program captures the next rows' features


class RecordedHead(WrappedHead):
    """Behaves as the head it wraps, which must be finished and run on `NativeOps`.

    There is one recording per storage and depth. A head whose forward cannot be recorded (it does more with tensors
    than call operations) runs call by call, and the log says so once.
    """

    def __init__(self, head: HeadModel, ops: NativeOps) -> None:
        super().__init__(head)
        self._ops = ops
        ids_np = None
        if head.target_ids is not None:
            ids_np = np.ascontiguousarray(head.target_ids.numpy())
        self._feedback = Feedback(_FEATURES, ids_np), Feedback(None, ids_np)
        """By whether hidden states and next features are one result."""
        self._programs: dict[tuple[int, int], tuple[KVStorage, Program, bool]] = {}
        self._books: dict[Program, BookPasses] = {}
        self._eager = False
        # on a storage of one slot: an error shows before the recording is used
        tiny = KVStorage(head.kv_layout(), 1, 1, head.dtype, head.device)
        for depth in range(max(self.num_depths, self.num_passes)):
            self._program(tiny, depth)
        self._programs.clear()
        self.same_bits = not self._eager

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        found = self._found(kv, depth)
        if found is None:
            return self.inner.forward(batch, features, kv, depth)
        program, one = found
        output = program.run(batch, features=features)
        return HeadOutput(output.hidden, output.hidden if one else output.captured[_FEATURES])

    def forward_logits(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None = None,
        depth: int = 0,
    ) -> tuple[HeadOutput, Tensor]:
        found = self._found(kv, depth)
        if found is None:
            return super().forward_logits(batch, features, kv, rows, depth)
        program, one = found
        wanted = batch.token_ids.shape[0] if rows is None else np.asarray(rows, np.int64)
        output = program.run(batch, wanted, features)
        logits = output.logits
        if logits is None:
            logits = torch.empty((0, self.draft_vocab_size), dtype=torch.float32)
        return HeadOutput(output.hidden, output.hidden if one else output.captured[_FEATURES]), logits

    def draft_chains(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        if self.num_depths > 1 and steps > 1:
            return None  # each pass has another layer
        found = self._found(kv, 0)
        if found is None:
            return None
        program, one = found
        wanted = batch.token_ids.shape[0] if rows is None else np.asarray(rows, np.int64)
        return program.chains(batch, wanted, steps, draws, features, self._feedback[one])

    def draft_trees(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        draws: Sequence[TreeDraws],
    ) -> Sequence[DraftedTree] | None:
        if self.num_depths > 1:
            return None  # what the first depth gives is queued for the next one
        found = self._found(kv, 0)
        if found is None:
            return None
        program, one = found
        wanted = len(draws) if rows is None else np.asarray(rows, np.int64)
        return program.trees(batch, wanted, draws, features, self._feedback[one])

    def draft_books(self, asked: BookDrafts, kv: KVStorage) -> InBooks | None:
        books = self._book_passes(kv)
        return None if books is None else books.draft(asked)

    def round_passes(self, asked: BookDrafts, kv: KVStorage, rows: int) -> RoundPasses | None:
        books = self._book_passes(kv)
        return None if books is None else books.for_rounds(asked, rows)

    def _book_passes(self, kv: KVStorage) -> BookPasses | None:
        if self.num_depths > 1:
            return None  # what the first depth gives is queued for the next one
        found = self._found(kv, 0)
        if found is None:
            return None
        program, one = found
        books = self._books.get(program)
        if books is None:
            books = BookPasses(self._ops.library, self._ops.pool, program, self._feedback[one])
            self._books[program] = books
        return books

    def _found(self, kv: KVStorage, depth: int) -> tuple[Program, bool] | None:
        return self._program(kv, depth) if self.inner.recordable() else None

    def _program(self, kv: KVStorage, depth: int) -> tuple[Program, bool] | None:
        """The recording, and whether hidden states and next features are one result."""
        if self._eager:
            return None
        key = (id(kv), depth)
        known = self._programs.get(key)
        if known is not None:
            return known[1:]
        try:
            program, one = self._record(kv, depth)
        except Exception as error:
            # Whatever a head from outside does to a symbol ends here; the head itself need not be at fault.
            logger.warning("the draft head's forward cannot be recorded and runs call by call: %s", error)
            self._eager = True
            return None
        self._programs[key] = (kv, program, one)  # keeps the storage, so that its id stays its own
        return program, one

    def _record(self, kv: KVStorage, depth: int) -> tuple[Program, bool]:
        recording = Recording(self.dtype, self.feature_size)
        assert recording.features is not None
        batch = StepInput(recording.token_ids, recording.positions, recording.slots, NO_BATCH)
        output = self.inner.forward(batch, recording.features, kv, depth)
        one = output.features is output.hidden
        captured = {} if one else {_FEATURES: output.features}
        logits = self.inner.logits(recording.pick(output.hidden))
        finish = recording.finish(self._ops.library, self._ops.pool, output.hidden, captured, logits)
        return finish, one


class RecordedBlock(RecordedHead):
    """A block drafter: features are stored, a block is read and its drafts are drawn in one call."""

    def __init__(self, head: BlockHead, ops: NativeOps) -> None:
        super().__init__(head, ops)
        self._layout: BlockLayout | None = None
        self._blocks: tuple[KVStorage, NativeBlocks] | None = None
        self._parts = None if head.correction is None else head.correction.parts()
        self._vocab_size = head.vocab_size

    def _book_passes(self, kv: KVStorage) -> BookPasses | None:
        blocks, store = self._native(kv), self._program(kv, CONTEXT)
        if blocks is None or store is None:
            return None
        books = self._books.get(store[0])
        if books is None:
            books = BookPasses(self._ops.library, self._ops.pool, store[0], blocks=blocks)
            self._books[store[0]] = books
        return books

    def lay_out(self, layout: BlockLayout) -> None:
        """Blocks are drafted in this layout from now on; without one they are not drafted in one call."""
        self._layout = layout
        self._blocks = None
        self._books.clear()

    def draft_chains(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        blocks = self._native(kv)
        return None if blocks is None else blocks.chains(batch, features, steps, draws)

    def draft_trees(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        draws: Sequence[TreeDraws],
    ) -> Sequence[DraftedTree] | None:
        blocks = self._native(kv)
        return None if blocks is None else blocks.trees(batch, features, draws)

    def _native(self, kv: KVStorage) -> NativeBlocks | None:
        if self._layout is None or not self.inner.recordable():
            return None
        if self._blocks is not None and self._blocks[0] is kv:
            return self._blocks[1]
        store, block = self._program(kv, CONTEXT), self._program(kv, BLOCK)
        correction = None if self._parts is None else self._parts.native(self.dtype, self._vocab_size)
        if store is None or block is None or (correction is None) != (self._parts is None):
            return None
        made = NativeBlocks(
            self._ops.library,
            self._ops.pool,
            store[0],
            block[0],
            self._layout,
            correction,
            self._feedback[0].target_ids_np,
        )
        self._blocks = kv, made
        return made


def recorded_head(head: HeadModel, ops: Ops) -> HeadModel:
    """``head`` replayed where its operations can be recorded, else itself."""
    if not isinstance(ops, NativeOps):
        return head
    return RecordedBlock(head, ops) if isinstance(head, BlockHead) else RecordedHead(head, ops)

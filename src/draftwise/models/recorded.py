"""A decoder whose pass is recorded once and replayed as one native call."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.book_drafts import BookDrafts, InBooks
from draftwise.kernels.cpu.book_passes import BookPasses
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pass_records import PassOutput
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.recording import Recording
from draftwise.kernels.cpu.rounds import RoundPasses
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel, SharedWeights
from draftwise.models.wrapped import WrappedDecoder
from draftwise.types import AttentionBatch, ChainDraws, DraftedTree, StepInput, TargetOutput, TreeDraws

logger = logging.getLogger("draftwise")


class RecordedDecoder(WrappedDecoder):
    """Behaves as the model it wraps, which must run on `NativeOps`.

    There is one recording per storage and set of captured layers. A model whose forward cannot be recorded (it does
    more with tensors than call operations) runs call by call, and the log says so once.
    """

    def __init__(self, model: DecoderModel, ops: NativeOps) -> None:
        super().__init__(model)
        self._ops = ops
        self._programs: dict[tuple[int, tuple[int, ...]], tuple[KVStorage, Program]] = {}
        self._books: dict[Program, BookPasses] = {}
        self._eager = False
        # on a storage of one slot: an error shows before the recording is used
        self._program(KVStorage(model.kv_layout(), 1, 1, model.dtype, model.device), ())
        self._programs.clear()
        self.same_bits = not self._eager

    @property
    def records(self) -> bool:
        """Whether passes are replayed; else the model runs call by call."""
        return not self._eager

    def of(self, model: DecoderModel) -> RecordedDecoder | None:
        """Another model on the same operations, replayed; None: it cannot be recorded."""
        found = RecordedDecoder(model, self._ops)
        return found if found.records else None

    def shared_weights(self) -> SharedWeights:
        return self.inner.shared_weights()

    def first_layers(self, count: int) -> DecoderModel:
        return recorded(self.inner.first_layers(count), self._ops)

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        program = self._program(kv, capture)
        if program is None:
            return self.inner.forward(batch, kv, capture)
        output = program.run(batch)
        return TargetOutput(output.hidden, output.captured)

    def forward_logits(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None, capture: Sequence[int] = ()
    ) -> tuple[TargetOutput, Tensor]:
        program = self._program(kv, capture)
        if program is None:
            return super().forward_logits(batch, kv, rows, capture)
        output = program.run(batch, _head_rows(batch, rows))
        return TargetOutput(output.hidden, output.captured), self._logits_of(output)

    def logits_alone(self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None) -> Tensor:
        program = self._program(kv, ())
        if program is None:
            return super().logits_alone(batch, kv, rows)
        return self._logits_of(program.run(batch, _head_rows(batch, rows), head_only=True))

    def _logits_of(self, output: PassOutput) -> Tensor:
        if output.logits is None:
            return torch.empty((0, self.config.vocab_size), dtype=torch.float32)
        return output.logits

    def draft_chains(
        self,
        batch: StepInput,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        program = self._program(kv, ())
        if program is None:
            return None
        return program.chains(batch, _head_rows(batch, rows), steps, draws)

    def pass_of(self, kv: KVStorage, capture: Sequence[int], *, adapted: bool = False) -> Program | None:
        assert not adapted, "see AdaptedDecoder"
        return self._program(kv, capture)

    def draft_books(self, asked: BookDrafts, kv: KVStorage) -> InBooks | None:
        books = self._book_passes(kv)
        return None if books is None else books.draft(asked)

    def round_passes(self, asked: BookDrafts, kv: KVStorage, rows: int) -> RoundPasses | None:
        books = self._book_passes(kv)
        return None if books is None else books.for_rounds(asked, rows)

    def _book_passes(self, kv: KVStorage) -> BookPasses | None:
        program = self._program(kv, ())
        if program is None:
            return None
        books = self._books.get(program)
        if books is None:
            books = self._books[program] = BookPasses(self._ops.library, self._ops.pool, program)
        return books

    def draft_trees(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None, draws: Sequence[TreeDraws]
    ) -> Sequence[DraftedTree] | None:
        program = self._program(kv, ())
        if program is None:
            return None
        return program.trees(batch, len(draws) if rows is None else np.asarray(rows, np.int64), draws)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def _program(self, kv: KVStorage, capture: Sequence[int]) -> Program | None:
        if self._eager:
            return None
        key = (id(kv), tuple(capture))
        known = self._programs.get(key)
        if known is not None:
            return known[1]
        try:
            program = self._record(kv, tuple(capture))
        except Exception as error:
            # Whatever a model from outside does to a symbol ends here; the model itself need not be at fault.
            logger.warning("the model's forward cannot be recorded and runs call by call: %s", error)
            self._eager = True
            return None
        self._programs[key] = (kv, program)  # keeps the storage, so that its id stays its own
        return program

    def _record(self, kv: KVStorage, capture: tuple[int, ...]) -> Program:
        recording = Recording(self.dtype)
        batch = StepInput(recording.token_ids, recording.positions, recording.slots, NO_BATCH)
        output = self.inner.forward(batch, kv, capture)
        captured = dict(output.captured)
        logits = self.inner.logits(recording.pick(output.hidden))
        return recording.finish(self._ops.library, self._ops.pool, output.hidden, captured, logits)


NO_BATCH = AttentionBatch(
    query_start_np=np.zeros(1, np.int32),
    context_len_np=np.zeros(0, np.int32),
    is_tree_np=np.zeros(0, np.bool_),
    block_tables_np=np.zeros((0, 1), np.int32),
    ancestors_np=None,
    block_size=1,
)


def _head_rows(batch: StepInput, rows: Sequence[int] | None) -> npt.NDArray[np.int64] | int:
    return batch.token_ids.shape[0] if rows is None else np.asarray(rows, np.int64)


def recorded(model: DecoderModel, ops: Ops) -> DecoderModel:
    """``model`` replayed where its operations can be recorded, else itself."""
    return RecordedDecoder(model, ops) if isinstance(ops, NativeOps) else model

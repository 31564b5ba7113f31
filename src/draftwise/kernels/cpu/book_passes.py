"""Drafts of a recorded pass for requests in books, in one native call (``csrc/book_drafts.cpp``)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.kernels.cpu.blocks import BlockPlan, NativeBlocks
from draftwise.kernels.cpu.book_drafts import DRAFTED, NO_ROOM, STREAM_OF, BookDrafts, BookRecord, InBooks
from draftwise.kernels.cpu.chains import ChainOutput, Feedback, target_ids_at
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pass_records import PassInput
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.rounds import RoundPasses
from draftwise.kernels.cpu.trees import TreeOutput

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64

_FEW = 8
"""Drafts in a row for which there is room at once; for more, once somebody needs it."""


class BookPasses:
    """Drafts with one program, or with one that stores features and a block's (`kernels.cpu.blocks`)."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ThreadPool,
        program: Program,
        feedback: Feedback | None = None,
        blocks: NativeBlocks | None = None,
    ) -> None:
        """``feedback``: of a head that reads its own features; ``blocks``: of a block drafter, whose features
        ``program`` stores."""
        kind = "" if blocks is None else "block_"
        more = () if blocks is None else (_PTR, ctypes.POINTER(PassInput), ctypes.POINTER(BlockPlan))
        self._calls = [
            library.function(
                f"dw_book_{kind}{name}",
                _I64,
                [
                    *(_PTR, _PTR, ctypes.POINTER(PassInput), ctypes.POINTER(output)),
                    *(ctypes.POINTER(BookRecord), *more),
                ],
            )
            for name, output in (("chains", ChainOutput), ("trees", TreeOutput))
        ]
        self._pool, self._program, self._blocks = pool, program, blocks
        self._vocab = program.widths[1] if blocks is None else blocks.vocab_size
        self._chains, self._trees = ChainOutput(), TreeOutput()
        ids_np = None
        for out in (self._chains, self._trees):
            out.vocab = self._vocab
            out.feature_in = out.feature_out = -1
            if feedback is not None:
                ids_np = feedback.target_ids_np
                program.feed_back(out, feedback)
            elif blocks is not None:
                ids_np, out.key_offset = blocks.target_ids_np, 1
                out.target_ids = target_ids_at(ids_np, self._vocab)
        self._target_ids = None if ids_np is None else torch.from_numpy(ids_np)

    def draft(self, asked: BookDrafts) -> InBooks | None:
        """Draft for the requests that ``asked`` names; None: it cannot, and their books are as they were."""
        record, features = asked.record, asked.features
        self._program.give_features(None if features is None else features.values, record.feature_rows)
        out = self._output(asked)
        own, told = self._distributions(asked)
        if not self._drafted(out, asked):
            return None
        if told is None or own is None:
            return InBooks()
        if self._target_ids is not None:
            told[:, self._target_ids] = own
        return InBooks(told)

    def for_rounds(self, asked: BookDrafts, rows: int) -> RoundPasses | None:
        """What native code needs to draft so behind every round for the requests that ``asked`` names, as long as
        nothing else is drafted with these passes. Their features are given by it. ``rows``: tokens that have to be read
        then, at most; if there are more, Python drafts."""
        if self._blocks is not None:
            return None
        out = self._output(asked)
        own, told = self._distributions(asked)
        usual, head_rows = self._usual_room(asked)
        kept = self._make_room(asked, max(usual, rows), head_rows)
        return RoundPasses(
            self._program.pointer, self._program.given_room, out, asked, own, told, self._target_ids, kept
        )

    def _output(self, asked: BookDrafts) -> ChainOutput | TreeOutput:
        if asked.tree is not None:
            return self._trees
        out = self._chains
        out.stream = STREAM_OF[asked.kind]
        return out

    def _distributions(self, asked: BookDrafts) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Room for what chains are drawn from, over the drafter's vocabulary and over the target's, if they are."""
        if asked.tree is not None or asked.kind != "sampled":
            self._chains.q = None
            return None, None
        rows = asked.count * asked.deepest
        own = told = torch.empty((rows, self._vocab), dtype=torch.float32)
        if self._target_ids is not None:  # the books speak the target's vocabulary
            told = torch.zeros((rows, asked.record.vocab), dtype=torch.float32)
        self._chains.q, asked.record.q = own.data_ptr(), told.data_ptr()
        return own, told

    def _usual_room(self, asked: BookDrafts) -> tuple[int, int]:
        """Rows, and rows of logits. In the usual step a drafter has to read the tokens that came, of which there are no
        more than drafts and one."""
        rows, head_rows, tree = asked.count * (min(asked.deepest, _FEW) + 1), asked.count, asked.tree
        if tree is not None:
            head_rows *= len(tree.parents) or tree.top_k
        return rows, head_rows

    def _make_room(self, asked: BookDrafts, rows: int, head_rows: int) -> object:
        found = self._program.make_room(rows, head_rows, own=True)
        asked.record.room, asked.record.head_room = found.hidden.shape[0], found.logits.shape[0]
        return found

    def _drafted(self, out: ChainOutput | TreeOutput, asked: BookDrafts) -> bool:
        record, program = asked.record, self._program
        call = self._calls[isinstance(out, TreeOutput)]
        rows, head_rows = self._usual_room(asked)
        answer = NO_ROOM
        while answer == NO_ROOM:
            kept = self._make_room(asked, rows, head_rows)
            given = (program.pointer, self._pool.pointer, program.given_room, out, record)
            answer = call(*given, *(() if self._blocks is None else self._blocks.own_pass()))
            rows, head_rows = max(rows, record.rows), max(head_rows, record.head_rows)
            del kept
        return bool(answer == DRAFTED)

"""Drafts of a recorded pass for requests in books, in one native call (``csrc/book_drafts.cpp``)."""

from __future__ import annotations

import ctypes

import torch

from draftwise.kernels.cpu.blocks import BlockPlan, NativeBlocks
from draftwise.kernels.cpu.book_drafts import DRAFTED, NO_ROOM, STREAM_OF, BookDrafts, BookRecord, InBooks
from draftwise.kernels.cpu.chains import ChainOutput, Feedback, target_ids_at
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import PassInput, Program
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
        if asked.tree is not None:
            return InBooks() if self._drafted(1, self._trees, asked) else None
        out = self._chains
        out.stream = STREAM_OF[asked.kind]
        if asked.kind != "sampled":
            out.q = None
            return InBooks() if self._drafted(0, out, asked) else None
        rows = asked.count * asked.deepest
        own = told = torch.empty((rows, self._vocab))
        ids = self._target_ids
        if ids is not None:  # the books speak the target's vocabulary
            told = torch.zeros((rows, record.vocab))
        out.q, record.q = own.data_ptr(), told.data_ptr()
        if not self._drafted(0, out, asked):
            return None
        if ids is not None:
            told[:, ids] = own
        return InBooks(told)

    def _drafted(self, call: int, out: ChainOutput | TreeOutput, asked: BookDrafts) -> bool:
        record, program = asked.record, self._program
        # In the usual step a drafter has to read the tokens that came, of which there are no more than drafts and one.
        rows = asked.count * (min(asked.deepest, _FEW) + 1)
        head_rows, tree = asked.count, asked.tree
        if tree is not None:
            head_rows *= len(tree.parents) or tree.top_k
        answer = NO_ROOM
        while answer == NO_ROOM:
            found = program.make_room(rows, head_rows, own=True)
            record.room, record.head_room = found.hidden.shape[0], found.logits.shape[0]
            given = (program.pointer, self._pool.pointer, program.given_room, out, record)
            answer = self._calls[call](*given, *(() if self._blocks is None else self._blocks.own_pass()))
            rows, head_rows = max(rows, record.rows), max(head_rows, record.head_rows)
            del found
        return bool(answer == DRAFTED)

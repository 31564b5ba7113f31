"""Drafts of a head in one call of it: all passes of a chain or of a tree, for many requests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftwise.kernels.cpu.book_drafts import BookFeatures
from draftwise.models.inputs import last_rows, pack_spans
from draftwise.propose.base import DraftRow
from draftwise.propose.heads.passes import HeadPasses
from draftwise.propose.heads.state import HeadState, Piece, Track, joined
from draftwise.types import ChainDraws, DraftedTree, IntArray, StepInput, TreeDraws

T = TypeVar("T")
Call = Callable[[StepInput, Tensor, list[int] | None], T | None]
"""Asks a head for drafts: the batch, features [rows, F], and the last row of each request, None: each has one row."""


class HeadLoops:
    """Drafts that a head computes in one call, over its `HeadPasses`."""

    def __init__(self, passes: HeadPasses) -> None:
        self._passes = passes
        self.filled: list[int] = []
        """The stored leading tokens of each request of the latest `chains` or `trees` that was not None."""

    def chains(
        self, rows: Sequence[DraftRow], states: Sequence[HeadState], steps: int, draws: ChainDraws | None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        """`HeadModel.draft_chains` for these requests, if the head can; what is missing (`missing`) is stored on the
        way."""
        return self._at_once(
            rows,
            states,
            [row.block_table_np for row in rows],
            [row.blocks_at for row in rows],
            lambda batch, features, last: self._passes.head.draft_chains(
                batch, features, self._passes.kv, last, steps, draws
            ),
        )

    def trees(
        self,
        rows: Sequence[DraftRow],
        states: Sequence[HeadState],
        draws: Sequence[TreeDraws],
        tables: Sequence[IntArray] | None = None,
    ) -> Sequence[DraftedTree] | None:
        """`HeadModel.draft_trees` for these requests, if the head can. ``tables``: their blocks, with scratch ones
        behind them; None: their own alone."""
        own = tables is None
        return self._at_once(
            rows,
            states,
            [row.block_table_np for row in rows] if tables is None else tables,
            [row.blocks_at if own else 0 for row in rows],
            lambda batch, features, last: self._passes.head.draft_trees(
                batch, features, self._passes.kv, last, draws
            ),
        )

    def missing(self, known: Sequence[int], states: Sequence[HeadState]) -> BookFeatures:
        """The features of what the head has not read of ``known`` [R] tokens, see `HeadPasses.first_missing`."""
        pieces: list[Piece] = []
        seen, counts = array("i"), array("i")
        for stop, state in zip(known, states, strict=True):
            track = state.tracks[0]
            first = self._passes.first_missing(track, stop)
            pieces += track.queue.of(first - 1, stop - 1)
            seen.append(first - 1)
            counts.append(stop - first)
        gaps = array("i", [-1 if state.gap is None else state.gap for state in states])
        first_keys = array("i", [state.tracks[0].first_key for state in states])
        return BookFeatures(joined(pieces), counts, seen, seen[:], gaps, first_keys)

    def _at_once(
        self,
        rows: Sequence[DraftRow],
        states: Sequence[HeadState],
        tables: Sequence[IntArray],
        tables_at: Sequence[int],
        call: Call[T],
    ) -> T | None:
        """Let the head do all passes for these requests, the first of them over what is missing; None: it cannot."""
        if self._passes.head.num_depths > 1:
            return None  # what the first depth gives is queued for the next one
        begun = time.perf_counter()
        firsts: list[int] = []
        first_keys: list[int] = []
        pieces: list[Piece] = []
        saved: list[tuple[Track, int, tuple[int, int, list[Piece]]]] = []
        filled: list[int] = []
        stops = [len(row.token_ids_np) for row in rows]
        # What is stored is written down before it is: behind the passes the caches are full of weights, and what is at
        # hand now would have to be fetched again, at four times the cost.
        for stop, state in zip(stops, states, strict=True):
            track = state.tracks[0]
            queue = track.queue
            first = self._passes.first_missing(track, stop)
            firsts.append(first)
            first_keys.append(track.first_key)
            pieces += queue.of(first - 1, stop - 1)
            saved.append((track, track.next, queue.saved()))
            track.advance(stop)
            filled.append(state.filled)
        answer: T | None = None
        try:
            batch = pack_spans(
                firsts,
                [row.token_ids_np for row in rows],
                tables,
                [row.tokens_at for row in rows],
                tables_at,
                self._passes.block_size,
                self._passes.head.inputs_on,
                position_offset=-1,
                first_keys=first_keys,
                packer=self._passes.packer,
            )
            last = None if sum(stops) - sum(firsts) == len(stops) else last_rows(firsts, stops)
            answer = call(batch, joined(pieces), last)
        finally:
            if answer is None:
                for track, stored, queue_was in saved:
                    track.next = stored
                    track.queue.restore(queue_was)
        self._passes.add_time(begun)
        if answer is not None:
            self.filled = filled
        return answer

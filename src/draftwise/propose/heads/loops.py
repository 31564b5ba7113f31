"""Drafts of a head in one call of it: all passes of a chain or of a tree, for many requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftwise.models.inputs import last_rows, pack_places, pack_spans
from draftwise.propose.base import DraftRow
from draftwise.propose.columns import DraftColumns
from draftwise.propose.heads.passes import HeadPasses
from draftwise.propose.heads.state import HeadState, Piece, Track, joined
from draftwise.propose.heads.steady import SteadyHeads
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

    def columns(self, columns: DraftColumns, states: Sequence[HeadState], call: Call[T]) -> T | None:
        """Let the head do all passes for requests in columns, as `chains` and `trees` do; ``call``: asks it."""
        return self._fed(
            columns.known,
            states,
            lambda firsts, first_keys: self._pack(columns, firsts, first_keys),
            call,
        )

    def steady(
        self, steady: SteadyHeads, features: Tensor, turns: Sequence[tuple[slice, DraftColumns, Call[T]]]
    ) -> list[T] | None:
        """`columns` of requests that go on together, some of them at a time. ``features`` [n, F]: of all their rows
        (`SteadyHeads.ready`). Nothing is noted of what is stored."""
        begun = time.perf_counter()
        answers: list[T] = []
        start = 0
        firsts, first_keys = steady.next_np.tolist(), steady.first_keys
        for own, part, call in turns:
            batch = self._pack(part, firsts[own], first_keys[own])
            if batch is None:
                return None
            stop = start + batch.token_ids.shape[0]
            last = None
            if stop - start > len(part.rids):
                last = last_rows(firsts[own], part.known)
            answer = call(batch, features if len(turns) == 1 else features[start:stop], last)
            if answer is None:
                return None
            answers.append(answer)
            start = stop
        self._passes.add_time(begun)
        return answers

    def _pack(
        self, columns: DraftColumns, firsts: Sequence[int], first_keys: Sequence[int]
    ) -> StepInput | None:
        return pack_places(
            firsts,
            columns.known,
            columns.num_blocks,
            columns.tokens_at,
            columns.blocks_at,
            self._passes.block_size,
            self._passes.head.inputs_on,
            position_offset=-1,
            first_keys=first_keys,
            packer=self._passes.packer,
        )

    def _at_once(
        self,
        rows: Sequence[DraftRow],
        states: Sequence[HeadState],
        tables: Sequence[IntArray],
        tables_at: Sequence[int],
        call: Call[T],
    ) -> T | None:
        """Let the head do all passes for these requests, the first of them over what is missing; None: it cannot."""
        return self._fed(
            [len(row.token_ids_np) for row in rows],
            states,
            lambda firsts, first_keys: pack_spans(
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
            ),
            call,
        )

    def _fed(
        self,
        stops: Sequence[int],
        states: Sequence[HeadState],
        pack: Callable[[list[int], list[int]], StepInput | None],
        call: Call[T],
    ) -> T | None:
        """``stops``: known tokens of each request; ``pack``: makes a batch of them, from some token of each on and with
        its first key."""
        if self._passes.head.num_depths > 1:
            return None  # what the first depth gives is queued for the next one
        begun = time.perf_counter()
        firsts: list[int] = []
        first_keys: list[int] = []
        pieces: list[Piece] = []
        saved: list[tuple[Track, int, tuple[int, int, list[Piece]]]] = []
        filled: list[int] = []
        size = 0
        # What is stored is written down before it is: behind the passes the caches are full of weights, and what is at
        # hand now would have to be fetched again, at four times the cost.
        for stop, state in zip(stops, states, strict=True):
            track = state.tracks[0]
            queue = track.queue
            first = self._passes.first_missing(track, stop)
            firsts.append(first)
            first_keys.append(track.first_key)
            pieces += queue.of(first - 1, stop - 1)
            size += stop - first
            saved.append((track, track.next, queue.saved()))
            track.advance(stop)
            filled.append(state.filled)
        answer: T | None = None
        try:
            batch = pack(firsts, first_keys)
            if batch is not None:
                last = None if size == len(stops) else last_rows(firsts, stops)
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

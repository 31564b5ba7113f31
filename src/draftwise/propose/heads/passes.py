"""The passes of a draft head over the rows of several requests, and the state that they store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.cpu.columns import own_packer
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel, HeadOutput
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.chains import ChainDraft
from draftwise.propose.heads.features import FeatureSource
from draftwise.propose.heads.state import Features, HeadState, Piece, Track, joined
from draftwise.types import IntArray, StepInput

_PASS_ROWS = 2048
"""Rows of one pass that fills in what is missing: a long prompt is filled in pieces, so that activations stay small."""


@dataclass(slots=True)
class HeadDraft(ChainDraft):
    """One row while it drafts. With n known tokens, row n - 1 gives draft 0, and row n - 1 + i, of draft i - 1, gives
    draft i."""

    state: HeadState = field(default_factory=HeadState)
    own: list[Tensor] = field(default_factory=list)
    """[1, F] each: of rows n, n + 1, ..., what the newest pass at a new depth gave."""

    def tokens_of(self, start: int, stop: int) -> IntArray:
        """Tokens of rows start..stop-1: known ones, then drafts."""
        n = self.row.num_tokens
        known_np = self.row.token_ids_np[start : min(stop, n)]
        if stop <= n:
            return known_np
        return np.concatenate((known_np, np.asarray(self.tokens[max(start - n, 0) : stop - n], np.int32)))


@dataclass(frozen=True, slots=True)
class Fill:
    """The rows of a request that `HeadPasses.fill` computes: rows of ``token_ids_np`` below ``stop``, if features are
    there."""

    state: HeadState
    token_ids_np: IntArray
    block_table_np: IntArray
    stop: int


class Rows(NamedTuple):
    """Consecutive rows of one request in a pass, in slots ``input.context_len ..``."""

    input: RowInput
    features: list[Piece]  # [rows, F] together; none: they are given for all requests in one

    @property
    def first(self) -> int:
        return self.input.context_len

    @property
    def size(self) -> int:
        return len(self.input.tokens)


def _rows(
    tokens: Sequence[int] | IntArray,
    first: int,
    block_table_np: IntArray,
    first_key: int,
    features: list[Piece],
) -> Rows:
    return Rows(RowInput(tokens, first, block_table_np, None, None, 0, first_key), features)


class HeadPasses:
    """A head with its storage. Nothing here draws tokens."""

    def __init__(self, head: HeadModel, block_size: int) -> None:
        self.head = head
        self.block_size = block_size
        self.packer = own_packer(head.device)
        self._time = 0.0
        self._storage: KVStorage | None = None
        self.block_features: Tensor
        """[blocks + 1, depths, F] of each block's last token, as each depth reads it; the last one is spare."""
        self.source: FeatureSource  # see `allocate`

    def memory_per_block(self) -> int:
        """Bytes: K/V and features."""
        head = self.head
        return self.kv_bytes_per_block() + head.num_depths * head.feature_size * head.dtype.itemsize

    def kv_bytes_per_block(self) -> int:
        """Bytes of K/V alone: scratch blocks keep no features."""
        return KVStorage.bytes_per_block(self.head.kv_layout(), self.block_size, self.head.dtype)

    def allocate(self, num_blocks: int, scratch_blocks: int) -> None:
        """Make the storage: ``num_blocks`` of the cache, then scratch ones."""
        head = self.head
        total = num_blocks + scratch_blocks
        self._storage = KVStorage(
            head.kv_layout(), total, self.block_size, head.dtype, head.device, spare=head.pads
        )
        head.prepare(self._storage)
        shape = (num_blocks + 1, head.num_depths, head.feature_size)
        self.block_features = torch.zeros(shape, dtype=head.dtype, device=head.device)
        self.source = FeatureSource(head, self.block_features)

    @property
    def kv(self) -> KVStorage:
        assert self._storage is not None, "allocate comes before the first pass"
        return self._storage

    def take_time(self) -> float:
        """Seconds spent in passes since the last call."""
        spent, self._time = self._time, 0.0
        return spent

    def add_time(self, start: float) -> None:
        """Count what passed since ``start``, for a pass that somebody else runs."""
        self._time += time.perf_counter() - start

    # ------------------------------------------------------------------------------------ blocks' features

    def open(self, computed: int, filled: int, block_table_np: IntArray) -> HeadState:
        """The state of a request whose first ``computed`` tokens are cached, and ``filled`` of them filled here."""
        stored = None
        if computed and filled == computed:
            self.source.compute()
            stored = self.block_features[int(block_table_np[computed // self.block_size - 1])]
        return HeadState.opened(self.head.num_depths, computed, filled, stored)

    def ends(self, first_token: int, count: int, block_table_np: IntArray) -> list[tuple[int, int]]:
        """Which of the tokens first_token ... are the last of their blocks: (how far behind the first, block).

        Example: block size 4, 7 tokens from number 6 on: tokens 7 and 11, of the request's blocks 1 and 2; [(1,
        block_table_np[1]), (5, block_table_np[2])].
        """
        size = self.block_size
        start = -(first_token + 1) % size
        if start >= count:
            return []
        return [(i, int(block_table_np[(first_token + i) // size])) for i in range(start, count, size)]

    def keep(self, depth: int, first_token: int, features: Tensor, block_table_np: IntArray) -> None:
        """Keep those of ``features`` [m, F] (tokens first_token ...) that belong to blocks' last tokens beside their
        blocks."""
        ends = self.ends(first_token, features.shape[0], block_table_np)
        if ends:
            blocks = torch.tensor([block for _, block in ends], device=features.device)
            self.block_features[blocks, depth] = features[ends[0][0] :: self.block_size]

    # ---------------------------------------------------------------------------------------------- passes

    @staticmethod
    def first_missing(track: Track, stop: int) -> int:
        """Where rows up to the last known token, ``stop - 1``, begin. That one is always fed: its output is needed,
        whether its K/V is there or not."""
        return track.next if track.next < stop else stop - 1

    def missing(self, draft: HeadDraft) -> Rows:
        """Rows up to the last known token, see `first_missing`."""
        track, stop = draft.state.tracks[0], draft.row.num_tokens
        first = self.first_missing(track, stop)
        features = track.queue.of(first - 1, stop - 1)
        tokens_np = draft.row.token_ids_np[first:]
        return _rows(tokens_np, first, draft.row.block_table_np, track.first_key, features)

    def catch_up(self, drafts: Sequence[HeadDraft]) -> tuple[Tensor, Tensor]:
        """Feed all rows that are missing: logits [R, Vd] and features [R, F] of the last one of each request."""
        jobs = [self.missing(draft) for draft in drafts]
        output, logits, last = self._forward(jobs, 0)
        for draft, job, end in zip(drafts, jobs, last, strict=True):
            self._stored(draft.state, 0, job, output.features[end + 1 - job.size : end + 1])
        features = output.features if len(last) == output.features.shape[0] else output.features[last]
        return logits, features

    def catch_up_deeper(self, drafts: Sequence[HeadDraft], depth: int) -> Tensor:
        """Feed all rows of known tokens that are missing at ``depth`` > 0, and that the depth before has seen: features
        [R, F] that it gives for the last one of each request."""
        jobs = []
        for draft in drafts:
            track, stop = draft.state.tracks[depth], draft.row.num_tokens
            first = min(track.next, stop - 1)
            features = track.queue.of(first - 1, stop - 1)
            tokens = draft.tokens_of(first, stop)
            jobs.append(_rows(tokens, first, draft.row.block_table_np, track.first_key, features))
        start = time.perf_counter()
        batch, joined, last = self.batch(jobs)
        given = self.head.forward(batch, joined, self.kv, depth).features
        self._time += time.perf_counter() - start
        ends = last if last is not None else list(range(len(jobs)))
        for draft, job, end in zip(drafts, jobs, ends, strict=True):
            self._stored(draft.state, depth, job, given[end + 1 - job.size : end + 1])
        return given[ends]

    def masked(self, wanted: Sequence[tuple[HeadDraft, int, int]]) -> Tensor:
        """Feed all rows that are missing and mask rows behind them: logits of drafts ``first .. stop - 1`` of each
        request (draft, first, stop), one request after the other, [sum of stop - first, Vd].

        Example: 6 known tokens, of which the rows of the last two are missing, and 3 drafts: rows 4, 5 and masks in
        slots 6 and 7. Drafts 0, 1, 2 come from rows 5, 6, 7. The masks' K/V is no token's: `Track.next` is 6 then.
        """
        head = self.head
        assert head.mask_token is not None and head.mask_feature is not None, "a head that drafts in parallel"
        start = time.perf_counter()
        jobs: list[Rows] = []
        rows: list[int] = []
        end = 0
        for draft, first, stop in wanted:
            job, masks = self.missing(draft), stop - 1
            tokens = np.concatenate((job.input.tokens, np.full(masks, head.mask_token, np.int32)))
            pieces = [*job.features, Piece.of(head.mask_feature.expand(masks, -1))]
            jobs.append(Rows(job.input._replace(tokens=tokens), pieces))
            end += len(tokens)
            rows += range(end - stop + first, end)
        batch, features, _ = self.batch(jobs)
        logits = head.forward_logits(batch, features, self.kv, rows)[1]
        for draft, _, _ in wanted:
            draft.state.tracks[0].advance(draft.row.num_tokens)
        self._time += time.perf_counter() - start
        return logits

    def advance(
        self, drafts: Sequence[HeadDraft], features: Tensor, step: int, *, deeper: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Feed draft ``step - 1`` of each request, in row num_tokens - 1 + step: logits [R, Vd], features [R, F].

        ``features`` [R, F]: of the row before. With several depths, the first passes go one deeper each.
        """
        if deeper and step < self.head.num_depths:
            return self._deepen(drafts, step)
        depth = self.head.num_depths - 1 if deeper else 0
        jobs = [
            _rows(
                (draft.tokens[step - 1],),
                draft.row.num_tokens - 1 + step,
                draft.row.block_table_np,
                draft.state.tracks[depth].first_key,
                [],
            )
            for draft in drafts
        ]
        output, logits, _ = self._forward(jobs, depth, features)
        return logits, output.features

    def _deepen(self, drafts: Sequence[HeadDraft], depth: int) -> tuple[Tensor, Tensor]:
        """The first pass of this call at ``depth``: known tokens that it has not seen, then the drafts so far. Row s
        reads what the depth before gave for row s - 1.

        Example: n known tokens, depth 2: rows .. n - 1 from features that have been queued, row n from the queued one
        of row n - 1, row n + 1 from what the pass at depth 1 gave for row n.
        """
        jobs = []
        for draft in drafts:
            track, n = draft.state.tracks[depth], draft.row.num_tokens
            stop = n + depth
            first = min(track.next, stop - 1)
            pieces = track.queue.of(first - 1, n) if first <= n else []
            pieces += [Piece.of(own) for own in draft.own[max(first - 1 - n, 0) : depth - 1]]
            tokens = draft.tokens_of(first, stop)
            jobs.append(_rows(tokens, first, draft.row.block_table_np, track.first_key, pieces))
        output, logits, last = self._forward(jobs, depth)
        for draft, job, end in zip(drafts, jobs, last, strict=True):
            given = output.features[end + 1 - job.size : end + 1]
            known = max(draft.row.num_tokens - job.first, 0)
            self._stored(draft.state, depth, job, given[:known])
            draft.own = [given[i : i + 1] for i in range(known, given.shape[0])]
        return logits, output.features[last]

    def fill(self, requests: Sequence[Fill]) -> None:
        """Compute rows of committed tokens, depth by depth, as far as features are there."""
        for depth in range(self.head.num_depths):
            pending = requests
            while pending:
                pending = self._fill_some(pending, depth)

    def _fill_some(self, requests: Sequence[Fill], depth: int) -> list[Fill]:
        """One pass of bounded size; the requests that are not complete after it."""
        left = _PASS_ROWS
        jobs: list[Rows] = []
        states: list[HeadState] = []
        rest: list[Fill] = []
        for request in requests:
            track = request.state.tracks[depth]
            stop = min(track.queue.end + 1, request.stop)
            end = min(stop, track.next + left)
            if end < stop:
                rest.append(request)
            if end <= track.next:
                continue
            left -= end - track.next
            features = track.queue.of(track.next - 1, end - 1)
            tokens = request.token_ids_np[track.next : end]
            jobs.append(_rows(tokens, track.next, request.block_table_np, track.first_key, features))
            states.append(request.state)
        if not jobs:
            return rest
        start = time.perf_counter()
        batch, joined, _ = self.batch(jobs)
        output = self.head.forward(batch, joined, self.kv, depth)
        self._time += time.perf_counter() - start
        first = 0
        for state, job in zip(states, jobs, strict=True):
            count = job.size
            self._stored(state, depth, job, output.features[first : first + count])
            first += count
        return rest

    def _stored(self, state: HeadState, depth: int, job: Rows, given: Tensor) -> None:
        """Rows job.first .. of known tokens are stored now; they gave ``given`` [m, F] to the depth below."""
        stop = job.first + given.shape[0]
        if depth + 1 < len(state.tracks) and given.shape[0]:
            self.keep(depth + 1, job.first, given, job.input.block_table_np)
            queue = state.tracks[depth + 1].queue
            assert queue.end >= job.first, "a row of this depth was computed without its feature being kept"
            if queue.end < stop:
                new = given[queue.end - stop :]
                queue.append(Features.of(new), 0, new.shape[0])
        state.tracks[depth].advance(stop)

    def _forward(
        self, jobs: Sequence[Rows], depth: int, features: Tensor | None = None
    ) -> tuple[HeadOutput, Tensor, list[int]]:
        """One pass: output of all rows, logits of the last of each request [R, Vd], and which rows these are."""
        start = time.perf_counter()
        batch, joined, last = self.batch(jobs, features)
        output, logits = self.head.forward_logits(batch, joined, self.kv, last, depth)
        self._time += time.perf_counter() - start
        return output, logits, last if last is not None else list(range(len(jobs)))

    def batch(
        self, jobs: Sequence[Rows], features: Tensor | None = None
    ) -> tuple[StepInput, Tensor, list[int] | None]:
        """The rows as a batch, their features [T, F], and each request's last row (None: each has one)."""
        inputs = [job.input for job in jobs]
        batch = build_step_input(inputs, self.block_size, self.head.inputs_on, -1, self.packer)
        if features is None:
            features = joined([piece for job in jobs for piece in job.features])
        last = None
        if batch.token_ids.shape[0] != len(jobs):
            last = (batch.attention.query_start_np[1:] - 1).tolist()
        return batch, features, last

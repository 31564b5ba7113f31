"""Steps that stay on the device: the target's pass, verification, the draft loop, the rows of the next step, replayed
one after the other without the host having read anything in between.

What is captured elsewhere, the target's pass and the draft loop, is replayed as it is; three small graphs stand between
them. So a step is one copy to the device, five replays, and one copy back, whose end an event tells::

    told -> [rows] -> [target's pass] -> [verify, advance] -> [draft loop] -> [keep drafts] -> answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs import resident_rows as rows
from draftwise.graphs.backend import Fence, Graph, GraphBackend
from draftwise.graphs.buffers import PassBuffers
from draftwise.graphs.loop import ChainLoop
from draftwise.graphs.resident_rules import verify
from draftwise.kernels.resident import STATE, LoopSeats, ResidentMemory, ResidentRule
from draftwise.kernels.select import on_triton
from draftwise.kernels.triton import resident as kernels
from draftwise.kernels.triton.resident import ResidentVerification
from draftwise.models.heads.base import HeadModel
from draftwise.sampling.noise import token_counters
from draftwise.types import IntArray, TargetOutput

_IN_FLIGHT = 2


class PassSeats(NamedTuple):
    """A captured pass of the target, and what a replay of it leaves behind."""

    rows: PassBuffers
    graph: Graph
    output: TargetOutput
    logits: Tensor  # [rows of the pass, V] float32
    spare_slot: int


class DrafterSeats(NamedTuple):
    """A drafter's captured loop. Of a head also itself, and where features of blocks' last tokens are kept,
    [blocks + 1, depths, F], the last one for rows that are none."""

    loop: ChainLoop
    max_len: int  # no token at this position or later is fed to it
    spare_slot: int
    head: HeadModel | None = None
    block_features: Tensor | None = None

    @property
    def own_q(self) -> bool:
        """Whether what it draws from has to be spread over the target's vocabulary."""
        return self.loop.kind == "draft" and self.loop.drafter.target_ids is not None


@dataclass(frozen=True, slots=True)
class SlotState:
    """A request that takes a slot; see `kernels.resident` for the words."""

    known: int
    root: int
    drafts: Sequence[int]
    fed: int
    stored: int
    seed: int
    sample_index: int
    temperature: float
    first_key: int
    blocks_np: IntArray
    q: Tensor | None  # [>= len(drafts), V] float32 over the target's vocabulary


class Landing:
    """A step on its way: what comes of it, once it is there."""

    def __init__(self, buffer: Tensor, fence: Fence, slots: int) -> None:
        self._buffer = buffer
        self._fence = fence
        self._slots = slots

    def wait(self) -> npt.NDArray[np.int64]:
        """[S, 6 + 2 K + 1], see `kernels.resident`; to be read before the step after the next is launched."""
        self._fence.synchronize()
        answer: npt.NDArray[np.int64] = self._buffer.numpy().reshape(self._slots, -1)
        return answer


class ResidentStep:
    """A step of S slots under one rule, captured once and used by one run after another."""

    def __init__(
        self,
        target: PassSeats,
        drafter: DrafterSeats | None,
        rule: ResidentRule,
        vocab_size: int,
        block_size: int,
        backend: GraphBackend,
        q: Tensor | None = None,
    ) -> None:
        """The pass has one row more than the loop has drafts; both have as many requests. ``q`` [>= S, K, V] float32,
        for a loop that draws from a vocabulary of its own: zeros where it has no token."""
        shape = target.rows.shape
        self.slots, self.drafts, self.max_keys = shape.requests, shape.rows - 1, shape.keys
        if drafter is not None:
            loop = drafter.loop
            assert (loop.shape.requests, loop.steps) == (self.slots, self.drafts)
            self.max_keys = min(self.max_keys, loop.shape.keys)
        self.rule = rule
        self._target, self._drafter, self._backend = target, drafter, backend
        device = backend.device
        self.memory = memory = ResidentMemory(self.slots, self.drafts, block_size, device)
        self._seats: LoopSeats | None = None
        self._target_ids: Tensor | None = None
        self._ends: Tensor | None = None
        if drafter is not None:
            self._take_seats(drafter, q, device)
        self._counters = token_counters(vocab_size, device)
        self._kernels: ResidentVerification | None = None
        if on_triton(device):
            self._kernels = ResidentVerification(memory, rule, self._q)
        self._told = [backend.host_buffer(memory.told.numel()) for _ in range(_IN_FLIGHT)]
        self._answers = [backend.host_buffer(memory.answer.numel()) for _ in range(_IN_FLIGHT)]
        self._turn = 0
        self._graphs: tuple[Graph, Graph, Graph | None] | None = None

    def _take_seats(self, drafter: DrafterSeats, q: Tensor | None, device: torch.device) -> None:
        loop, memory = drafter.loop, self.memory
        nothing_np = np.empty(0, np.int32)
        self._seats = loop.seat(np.empty(0), nothing_np)
        self._target_ids = loop.drafter.target_ids
        if drafter.own_q:
            assert q is not None
            memory.q = q[: self.slots]
        if drafter.head is not None:
            size = self.slots * (self.drafts + 1)
            self._ends = torch.zeros(size, dtype=torch.int64, device=device)

    def capture(self) -> None:
        """Capture what stands between the pass and the loop."""
        backend = self._backend
        self._target.rows.clear()
        begun, _ = backend.capture(self._begin)
        advanced, _ = backend.capture(self._advance)
        finished = None if self._seats is None else backend.capture(self._finish)[0]
        self._graphs = (begun, advanced, finished)

    # -------------------------------------------------------------------------------------------- host side

    def board(self, members: Sequence[SlotState]) -> None:
        """Take in the requests of a run, in slots 0, 1, ...; nothing may be on its way. It waits for the device."""
        if self._graphs is None:
            self.capture()
        self._backend.fence().synchronize()  # buffers that the ordinary way has filled may be filled again
        memory, count = self.memory, len(members)
        state_np = np.zeros((self.slots, STATE + self.drafts), np.int64)
        state_np[:, 0] = 1  # known tokens of nobody
        for row, member in zip(state_np, members, strict=False):
            seed = member.seed & ((1 << 64) - 1)
            row[:STATE] = (
                member.known,
                member.root,
                len(member.drafts),
                member.fed,
                member.stored,
                seed - (1 << 64) if seed >> 63 else seed,
                member.sample_index,
                np.float64(member.temperature).view(np.int64),
            )
            row[STATE : STATE + len(member.drafts)] = member.drafts
        state_np[count:, 7] = np.float64(1.0).view(np.int64)
        memory.state.copy_(torch.from_numpy(state_np))
        first_key_np = np.array([member.first_key for member in members], np.int32)
        self._target.rows.clear()
        width = max(len(member.blocks_np) for member in members)
        tables_np = np.zeros((self.slots, width), np.int32)
        for row_np, member in zip(tables_np, members, strict=False):
            row_np[: len(member.blocks_np)] = member.blocks_np
        self._target.rows.tables.fill(tables_np)
        if self._drafter is not None:
            loop = self._drafter.loop
            loop.seat(1.0 / np.array([member.temperature for member in members]), first_key_np)
            loop.rows.tables.fill(tables_np)
            q = self._q
            for slot, member in enumerate(members):
                if q is not None and member.q is not None and len(member.drafts):
                    self._board_q(slot, member.q[: len(member.drafts)])
        self._backend.fence().synchronize()

    def _board_q(self, slot: int, given: Tensor) -> None:
        q = self._q
        assert q is not None
        q[slot, : given.shape[0]].copy_(given)

    @property
    def _q(self) -> Tensor | None:
        """[S, K, V]: what waiting drafts were drawn from."""
        return self.memory.q if self.memory.q is not None else self._seats.q if self._seats else None

    def told(self) -> npt.NDArray[np.int64]:
        """[S, 3 + 2 P] for the coming step, to be filled in whole: see `kernels.resident`."""
        told: npt.NDArray[np.int64] = self._told[self._turn].numpy().reshape(self.slots, -1)
        return told

    def launch(self) -> Landing:
        """Start the step that `told` describes, behind those on their way: one at most."""
        assert self._graphs is not None, "requests come first"
        begun, advanced, finished = self._graphs
        memory, backend = self.memory, self._backend
        memory.told.view(-1).copy_(self._told[self._turn], non_blocking=True)
        begun.replay()
        self._target.graph.replay()
        advanced.replay()
        if finished is not None:
            assert self._drafter is not None
            self._drafter.loop.replay()
            finished.replay()
        answer = self._answers[self._turn]
        answer.copy_(memory.answer.view(-1), non_blocking=True)
        self._turn = (self._turn + 1) % _IN_FLIGHT
        return Landing(answer, backend.fence(), self.slots)

    def q_of(self, slot: int, count: int) -> Tensor | None:
        """What the first ``count`` waiting drafts of a slot were drawn from, [count, V], a copy; None: point masses.
        Nothing may be on its way."""
        q = self._q
        return None if q is None or not count else q[slot, :count].clone()

    def features_of(self, slot: int, accepted: int) -> Tensor | None:
        """[1, F] a copy: the feature of the last token that the target has read in the newest step, of which it
        accepted so many drafts. None: the drafter is no head."""
        if self._seats is None or self._seats.features is None:
            return None
        row = slot * (self.drafts + 1) + accepted
        return self._seats.features[row : row + 1].clone()

    # ----------------------------------------------------------------------------------- what is captured

    def _begin(self) -> None:
        target = self._target
        tables = [target.rows.tables.tables]
        if self._drafter is not None:
            tables.append(self._drafter.loop.rows.tables.tables)
        if self._kernels is not None:
            kernels.begin(self.memory, target.rows.batch, tables, target.spare_slot, self._kernels)
        else:
            rows.begin(self.memory, target.rows.batch, tables, target.spare_slot)

    def _advance(self) -> None:
        memory, target, drafter, seats = self.memory, self._target, self._drafter, self._seats
        size = self.slots * (self.drafts + 1)
        if self._kernels is not None:
            kernels.verify(memory, target.logits[:size], self._kernels)
        else:
            verify(memory, target.logits[:size], self.rule, self._q, self._counters)
        advance = rows.advance if self._kernels is None else kernels.advance
        if drafter is None or seats is None:
            advance(memory)
            return
        head, kept = drafter.head, drafter.block_features
        advance(
            memory,
            seats=seats,
            batch=drafter.loop.rows.batch,
            kind=drafter.loop.kind,
            max_len=drafter.max_len,
            spare_slot=drafter.spare_slot,
            head=head is not None,
            ends=self._ends,
            spare_block=0 if kept is None else kept.shape[0] - 1,
        )
        if head is not None:
            assert seats.features is not None and kept is not None and self._ends is not None
            # row j of a slot is token known + j, with what the target computed when it read the one before: its row j
            seats.features.copy_(head.combine(target.output, slice(0, size)))
            kept[:, 0].index_copy_(0, self._ends, seats.features)

    def _finish(self) -> None:
        assert self._seats is not None
        finish = rows.finish if self._kernels is None else kernels.finish
        finish(self.memory, self._seats, self._target_ids)

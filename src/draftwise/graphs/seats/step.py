"""Steps of seats: the target's pass, verification, draft loops, and the rows of the next step, replayed one after the
other without the host having read anything in between.

What is captured elsewhere, the target's pass and the draft loops, is replayed as it is; small graphs stand between
them. So a step is one copy to the device, some replays, and one copy back, whose end an event tells::

    told -> [rows] -> [pass] -> [process, verify] -> { [rows] -> [draft loop] -> [keep] } { [look up] } -> answer

The braces stand for every loop, and every look-up, that somebody drafts with; requests with other drafters, or other
kinds of draws, fill up a loop's rows. Small graphs are captured when a step needs them first, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import Fence, Graph, GraphBackend
from draftwise.graphs.buffers import PassSeats
from draftwise.graphs.seats import kernels, lookup, rows
from draftwise.graphs.seats.entering import Entering, Entries
from draftwise.graphs.seats.features import SeatedLoop, SeatFeatures
from draftwise.graphs.seats.kernels import SeatVerification
from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.seats.memory import ADAPTER, TEMPERATURE, SeatMemory
from draftwise.graphs.seats.rows import DraftShape, LoopRows
from draftwise.graphs.seats.rules import Deciding, verify
from draftwise.graphs.seats.shaping import LOGPROBS, Shaping
from draftwise.graphs.seats.texts import Texts
from draftwise.graphs.trees import TreeLoop
from draftwise.kernels.select import on_triton
from draftwise.sampling.noise import token_counters
from draftwise.types import IntArray

_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Landing:
    """A running step, and its results when they are there. ``report_np`` [S, K + 1, 2 + 2 T], see `Shaping.report`;
    behind `wait`, of a step in which somebody wants it."""

    answer_np: npt.NDArray[np.int64]
    report_np: npt.NDArray[np.float32] | None
    fence: Fence

    def wait(self) -> npt.NDArray[np.int64]:
        """[S, 6 + 4 K + 1], see `memory`; to be read before the step after the next is launched."""
        self.fence.synchronize()
        return self.answer_np


class SeatedSteps:
    """Steps over one memory. At most two are on their way."""

    def __init__(
        self,
        memory: SeatMemory,
        backend: GraphBackend,
        *,
        rates: tuple[float, ...] = (),
        num_sources: int = 0,
    ) -> None:
        """``rates``: of rule ``synthetic``. ``num_sources``: drafters that may draw from a distribution."""
        self.memory = memory
        self.shaping = Shaping(memory)
        self._backend = backend
        self._rates = rates
        self._counters = token_counters(memory.limits.vocab_size, memory.device)
        self._fused = on_triton(memory.device)
        self._verification = SeatVerification(memory, rates, num_sources)
        self._graphs: dict[object, Graph] = {}
        self.features = SeatFeatures(memory)
        self._told = [backend.host_buffer(memory.told.numel()) for _ in range(_IN_FLIGHT)]
        self._answers = [backend.host_buffer(memory.answer.numel()) for _ in range(_IN_FLIGHT)]
        self._entries = Entries(memory, backend, _IN_FLIGHT)
        self.texts = Texts(memory, backend, _IN_FLIGHT)
        self._reports: list[Tensor] = []
        self._turn = 0
        self._filling = False  # requests have entered since the newest launch

    # -------------------------------------------------------------------------------------------- host side

    def told(self) -> npt.NDArray[np.int64]:
        """[S, 5 + 2 P] for the coming step, to be filled in whole: see `memory`."""
        told: npt.NDArray[np.int64] = self._told[self._turn].numpy().reshape(self.memory.seats, -1)
        return told

    def enter(self, entering: Sequence[tuple[int, Entering]], outputs: Sequence[IntArray] = ()) -> None:
        """Let requests take seats, by their numbers, before the coming step: once between two launches. ``outputs``:
        see `Texts.take_in`."""
        texts = [(seat, new.text_np) for seat, new in entering if new.text_np is not None]
        if not entering and not outputs:
            return
        if self._filling:  # the launch did not come; the buffers may still be read
            self._backend.fence().synchronize()
        self._filling = True
        self.texts.take_in(self._turn, texts, outputs)
        self._entries.take_in(self._turn, entering)
        for seat, new in entering:
            self.shaping.enter(seat, new.sampling)
            if new.carried is not None:
                self.features.enter(seat, new.drafter, new.carried)

    def move(self, old: int, new: int) -> None:
        """A request takes another seat, before the coming step."""
        for part in (self.memory, self.shaping, self.features):
            part.move(old, new)

    def open_source(self, number: int, draws: int) -> None:
        """Drafts will be drawn from what this drafter says: of a request, from so many distributions."""
        if number not in self.memory.q:
            self._verification.open_source(number, self.memory.open_source(number, draws))

    def launch(
        self,
        target: PassSeats,
        loops: Sequence[SeatedLoop],
        rules: Sequence[str],
        shaped: frozenset[str] = frozenset(),
        look_ups: Sequence[tuple[int, LookUp]] = (),
    ) -> Landing:
        """Start the step that `told` describes, behind those on their way: one at most.

        Args:
            target: pass of the first R seats.
            loops: those that somebody drafts with, each over R requests.
            rules: those that somebody has.
            shaped: what of `Shaping` somebody has.
            look_ups: those that somebody drafts with, by their numbers.
        """
        memory, shape = self.memory, target.rows.shape
        of_pass = shape, target.rows.adapted  # passes with adapters have buffers of their own
        memory.told.view(-1).copy_(self._told[self._turn], non_blocking=True)
        self._replay(("begin", of_pass), partial(self._begin, target))
        target.graph.replay()
        trees = any(isinstance(loop.drafter.loop, TreeLoop) for loop in loops)
        step = Deciding(shape.requests, shape.rows, rules, self._rates, trees)
        decided = ("decide", of_pass, tuple(rules), trees, shaped, tuple(memory.q))
        logits = target.logits[: shape.size]
        self._replay(decided, partial(self._decide, target, step, shaped), (logits,))
        if trees:
            moving = kernels.compact if self._fused else rows.compact
            slots = target.rows.batch.slots
            run = partial(moving, memory, shape.requests, shape.rows, slots, target.pools)
            self._replay(("compact", of_pass), run, idle=True)
        for loop in loops:
            self.features.open(loop)
            self._replay(("advance", of_pass, id(loop.drafter.loop)), partial(self._advance, target, loop))
            loop.drafter.loop.replay()
            self._replay(("finish", id(loop.drafter.loop)), partial(self._finish, loop))
        looking = kernels.look_up if self._fused else lookup.look_up
        for number, look in look_ups:
            run = partial(looking, memory, shape.requests, number, look)
            self._replay(("look up", shape.requests, number), run)
        answer = self._answers[self._turn]
        answer.copy_(memory.answer.view(-1), non_blocking=True)
        report_np: npt.NDArray[np.float32] | None = None
        if LOGPROBS in shaped:
            made = self.shaping.report
            if len(self._reports) < _IN_FLIGHT:
                size = (made.numel() + 1) // 2
                self._reports = [self._backend.host_buffer(size) for _ in range(_IN_FLIGHT)]
            report = self._reports[self._turn].view(torch.float32)[: made.numel()].view(made.shape)
            report.copy_(made, non_blocking=True)
            report_np = report.numpy()
        self._turn = (self._turn + 1) % _IN_FLIGHT
        self._filling = False
        return Landing(answer.numpy().reshape(memory.seats, -1), report_np, self._backend.fence())

    @property
    def num_captured(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def capture(
        self,
        target: PassSeats,
        loops: Sequence[SeatedLoop],
        rules: Sequence[str],
        look_ups: Sequence[tuple[int, LookUp]] = (),
    ) -> None:
        """Capture the graphs that `launch` would need, with empty seats."""
        self.memory.told.zero_()
        self.told()[:] = 0
        self.launch(target, loops, rules, look_ups=look_ups).wait()

    def q_of(self, seat: int, source: int) -> Tensor | None:
        """The distributions that a seat's waiting drafts were drawn from, [draws, V], a copy; None: point masses.
        Nothing may be on its way."""
        return self.memory.q[source][seat].clone() if source else None

    def _replay(
        self, key: object, run: Callable[[], None], consumed: Sequence[Tensor] = (), *, idle: bool = False
    ) -> None:
        """Replay a small graph, captured on first use.

        A capture runs the function twice, and what a step did may not be done again: so state is put back, and what is
        ``consumed``. ``idle``: what it does cannot be put back; while it is captured nobody has accepted anything."""
        graph = self._graphs.get(key)
        if graph is None:
            kept = [(tensor, tensor.clone()) for tensor in (*self._persistent(), *consumed)]
            if idle:
                self.memory.walk.packed.zero_()
            graph, _ = self._backend.capture(run)
            for tensor, value in kept:
                tensor.copy_(value)
            self._graphs[key] = graph
        graph.replay()

    def _persistent(self) -> list[Tensor]:
        memory = self.memory
        kept = [memory.state, memory.own_forms, memory.now, memory.answer, memory.walk.packed]
        return [*kept, *self.shaping.persistent()]

    # ----------------------------------------------------------------------------------- what is captured

    def _begin(self, target: PassSeats) -> None:
        memory = self.memory
        batch, spare = target.rows.batch, target.rows.tables.spare_slot
        if self._fused:
            kernels.begin(memory, batch, spare, self._verification)
        else:
            rows.begin(memory, batch, spare)
        # behind what adds new blocks
        target.rows.take_over(memory.tables, memory.state[:, ADAPTER])

    def _decide(self, target: PassSeats, step: Deciding, shaped: frozenset[str]) -> None:
        memory = self.memory
        scores = target.logits[: target.rows.shape.size]
        raw = scores.clone() if LOGPROBS in shaped else None
        self.shaping.process(scores, step, shaped)
        if self._fused:
            kernels.verify(memory, scores, step, self._verification)
        else:
            verify(memory, scores, step, self._counters)
        self.shaping.commit(step, shaped)
        if raw is not None:
            self.shaping.tell(raw, step)
        (kernels if self._fused else rows).advance(memory, step.requests)

    def _loop_rows(self, seated: SeatedLoop, ends: Tensor | None = None) -> LoopRows:
        drafter = seated.drafter
        loop, kept = drafter.loop, drafter.block_features
        shape: DraftShape = "masked" if loop.masks else "chain"
        if isinstance(loop, TreeLoop):
            shape = "dynamic" if loop.plan.shape is None else "static"
        return LoopRows(
            seated.number,
            loop.seats,
            loop.rows.batch,
            loop.kind,
            drafter.max_len,
            loop.rows.tables.spare_slot,
            drafter.head is not None,
            shape,
            ends,
            0 if kept is None else kept.shape[0] - 1,
            seated.source if loop.kind == "draft" else 0,
        )

    def _advance(self, target: PassSeats, seated: SeatedLoop) -> None:
        memory, count, loop = self.memory, target.rows.shape.requests, seated.drafter.loop
        loop.rows.take_over(memory.tables)
        seats = loop.seats
        seats.scale.copy_(memory.number(TEMPERATURE)[:count].reciprocal())
        self.shaping.steer(loop)
        ends = self.features.give(target, seated)
        (kernels if self._fused else rows).advance(memory, count, self._loop_rows(seated, ends))

    def _finish(self, seated: SeatedLoop) -> None:
        memory, loop = self.memory, seated.drafter.loop
        (kernels if self._fused else rows).finish(memory, loop.shape.requests, self._loop_rows(seated))
        self.features.keep(seated)
        seats = loop.seats
        if seats.q is None:
            return
        # only these drafts were drawn from this source; other tokens of the vocabulary stay at 0
        q = memory.q[seated.source][: loop.shape.requests]
        ids = loop.drafter.target_ids
        if ids is None:
            q.copy_(seats.q)
        else:
            q.index_copy_(2, ids, seats.q)

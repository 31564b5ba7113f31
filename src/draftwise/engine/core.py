"""The engine's one loop. `LLM` and `AsyncLLM` are facades over it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from draftwise.kv.events import CacheEvent
from draftwise.models.lora.low_rank import LowRank
from draftwise.runner.executor import ClosedExecutor, Executor
from draftwise.sched.request import Request, RequestUpdate, SpeculationCounts
from draftwise.sched.scheduler import Scheduler
from draftwise.types import StepResult

CacheListener = Callable[[Sequence[CacheEvent]], None]
"""Called in the engine's thread with the changes of cached blocks, in order. It must be quick and must not raise."""


@dataclass(slots=True)
class Totals:
    """Totals over the engine's life, of fixed size."""

    num_steps: int = 0
    step_time: float = 0.0
    forward_time: float = 0.0
    draft_time: float = 0.0
    draft_forward_time: float = 0.0
    verify_time: float = 0.0
    num_requests_finished: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    drafter_failures: dict[str, int] = field(default_factory=dict)


class _Flight(NamedTuple):
    """A step that was handed to the executor; ``queued``: another step was still running."""

    result: Future[StepResult]
    queued: bool


class EngineCore:
    """Host side (scheduler) and device side (executor) of one engine.

    ``lock`` guards requests and scheduler: it is held while a step is planned and taken in, not while it runs on
    the device, so that others may add, cancel and read requests meanwhile.

    Ahead, a step is planned and handed over while the one before it runs, and its results are taken in one call of
    `step` later. What comes out is the same: the executor knows at once what was accepted, and the scheduler needs it
    only to deliver (`sched.ahead`). A request that turns out to have ended has then computed a row for nothing, which
    is dropped.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float], *, ahead: bool = False
    ) -> None:
        """``ahead``: plan steps while the ones before them run; for executors whose `Executor.submit` does not wait."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.lock = threading.RLock()
        self.totals = Totals()
        self.computing = False
        """Whether the step waits for the device: broken off there, it is computed again. Elsewhere it writes books."""
        self.adapters: dict[int, Mapping[str, LowRank]] = {}
        """By number: those that the executor may be told to hold."""
        self._ahead = ahead
        self._stepping = False  # a thread is in `step`
        self._flights: deque[_Flight] = deque()  # handed over, not taken in: two at most
        self._cache_listeners: tuple[CacheListener, ...] = ()
        self._closers: list[Callable[[], None]] = []
        self._moved = False  # adapters were, since the last step was taken in
        self._taken_in = 0.0  # when the latest step was, or the first one was handed over
        self._captured = (0, 0)  # `Executor.num_captured` when the last two steps were taken in

    @property
    def in_flight(self) -> bool:
        """Whether a step was handed over and not taken in."""
        return bool(self._flights)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flights)

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError if it can never be served."""
        with self.lock:
            self.scheduler.add(request)
            self.executor.hurry(True)

    def move_adapters(self) -> None:
        """Have the executor hold the adapters of the requests that run now, instead of others. Between two steps."""
        places = self.scheduler.adapters
        while True:
            with self.lock:
                move = places.take_move()
                adapter = None if move is None else self.adapters.get(move.adapter)
            if move is None:
                return
            try:
                if move.what == "drop":
                    self.executor.drop_adapter(move.adapter)
                elif adapter is not None:  # else all its requests were cancelled in the meantime
                    self.executor.load_adapter(move.adapter, adapter)
            except BaseException:
                with self.lock:
                    places.put_back(move)
                raise

    def cancel(self, rid: int) -> bool:
        """Stop a request; False if it had ended."""
        with self.lock:
            found = self.scheduler.cancel(rid)
            if found:
                self.executor.hurry(True)
            return found

    def step(self) -> list[RequestUpdate]:
        """Compute one step for all requests that can take part. When planning ahead, returns the results of the step
        before."""
        self._stepping = True
        try:
            updates = self._step_ahead() if self._ahead else self._step()
        finally:
            self._stepping = False
        if self._cache_listeners:
            self.tell_cache()
        return updates

    def observe_cache(self, listener: CacheListener) -> bool:
        """Call ``listener`` after every step with the changes of cached blocks. False: this engine has no prefix
        cache."""
        with self.lock:
            logged = self.scheduler.kv.log_events()
        if logged:
            self._cache_listeners = (*self._cache_listeners, listener)
        return logged

    def tell_cache(self) -> None:
        """Send listeners the changes that they have not received."""
        with self.lock:
            events = self.scheduler.kv.take_events()
        if events:
            for listener in self._cache_listeners:
                listener(events)

    def _step(self) -> list[RequestUpdate]:
        start = self.clock()
        with self.lock:
            self.executor.hurry(False)
            plan = self.scheduler.schedule()
        try:
            moved = bool(self.scheduler.adapters.moves)
            if moved:
                self.move_adapters()
            self.computing = True
            result = self.executor.execute(plan)
            self.computing = False
        except BaseException:  # Ctrl-C, say: the step has no results
            self.computing = False
            with self.lock:
                self.scheduler.break_off(plan)
            raise
        with self.lock:
            updates = self.scheduler.commit(result)
            seconds = self.clock() - start
            if result.rows:
                self.scheduler.learn(result, None if moved else seconds)
            self._count(result, updates, seconds)
        return updates

    def _step_ahead(self) -> list[RequestUpdate]:
        start = self.clock()
        if len(self._flights) < 2:  # two: the wait for the first was interrupted
            with self.lock:
                plan = self.scheduler.schedule()
            if plan.rows or plan.removed or plan.trimmed or not self._flights:
                if self.scheduler.adapters.moves:
                    self._moved = True
                    self.move_adapters()
                queued = bool(self._flights)
                self._flights.append(_Flight(self.executor.submit(plan), queued))
                if not queued:
                    self._taken_in = start  # nothing ran before it
                    return []
        # An empty plan means that nothing can be planned before the step that runs is taken in.
        flight = self._flights[0]
        try:
            self.computing = True
            result = flight.result.result()
        finally:
            self.computing = False
        with self.lock:
            self._flights.popleft()
            updates = self.scheduler.commit(result)
            now = self.clock()
            seconds, self._taken_in = now - self._taken_in, now
            if result.rows:
                # While one step follows on another, the time from one end to the next is what a step takes.
                new = self._made_something() or self._moved
                self._moved = False
                self.scheduler.learn(result, seconds if flight.queued and not new else None)
            self._count(result, updates, seconds)
        return updates

    def _made_something(self) -> bool:
        """Whether a graph was captured since the last step but one was taken in. What that takes is in the time of the
        step that is launched then, and of the one before it."""
        captured = self.executor.num_captured
        before, self._captured = self._captured, (self._captured[1], captured)
        return before[0] != captured

    def _count(self, result: StepResult, updates: list[RequestUpdate], seconds: float) -> None:
        totals = self.totals
        if result.rows:
            totals.num_steps += result.num_rounds
            totals.step_time += seconds
            totals.forward_time += result.forward_time
            totals.draft_time += result.draft_time
            totals.draft_forward_time += result.draft_forward_time
            totals.verify_time += result.verify_time
        for failure in result.drafter_failures:
            kind = f"{failure.method}.{failure.hook}"
            totals.drafter_failures[kind] = totals.drafter_failures.get(kind, 0) + 1
        for update in updates:
            totals.num_generation_tokens += update.num_new
            if update.finished:
                totals.num_requests_finished += 1
                reason = update.request.finish_reason or "abort"
                totals.finish_reasons[reason] = totals.finish_reasons.get(reason, 0) + 1
                totals.num_prompt_tokens += update.request.num_prompt
                totals.speculation.merge(update.request.counts)

    def speculation_counts(self) -> SpeculationCounts:
        """Totals of speculation, running requests included. Call it with the lock held."""
        counts = SpeculationCounts()
        counts.merge(self.totals.speculation)
        for other in self.scheduler.unfinished_counts():
            counts.merge(other)
        return counts

    def check_integrity(self) -> None:
        """Raise AssertionError if the books of scheduler and cache do not agree."""
        with self.lock:
            self.scheduler.check_integrity()

    def after_fork_in_child(self) -> bool:
        """Called in a forked child. False: another thread was computing when the process forked, so the copy is
        unusable."""
        # The threads of torch's OpenMP stayed in the parent, and it would wait for them for ever.
        torch.set_num_threads(1)
        whole = not self._stepping and not self._flights and self.lock.acquire(blocking=False)
        self.lock = threading.RLock()  # no other thread is here to release the old one
        return self.executor.forked() and whole

    def at_close(self, closer: Callable[[], None]) -> None:
        """Register a function to call when the engine is closed."""
        self._closers.append(closer)

    def close(self) -> None:
        """Let go of models and memory, also where this object is still held."""
        self.executor.close()
        self.executor = ClosedExecutor()
        self.adapters.clear()
        for closer in self._closers:
            closer()

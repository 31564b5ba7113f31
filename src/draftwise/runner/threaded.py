"""An executor in a thread of its own, so that steps can be planned while others run."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec

from draftwise import lifetime
from draftwise.errors import EngineDeadError
from draftwise.models.lora.low_rank import LowRank
from draftwise.runner.executor import Executor
from draftwise.runner.launched import Launched
from draftwise.types import StepPlan, StepResult

P = ParamSpec("P")


class _Thread:
    """Runs functions one after the other. Unlike a `concurrent.futures` pool it goes on while threads that are no
    daemons still do (an engine may be theirs), and begins anew in a forked child.

    The thread knows the queue and nothing else, so that it ends when nobody can give it work any more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()
        lifetime.stop_at_exit(self)
        lifetime.survive_forks(self)

    def _begin(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # nothing comes behind the end
        self._finish = weakref.finalize(self, self._queue.put, None)

    def start(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have ``function`` called after everything before it. It must not raise.

        Raises ProgramEnding after `ask_to_stop`.
        """
        with self._lock:
            if not self._finish.alive:
                raise lifetime.ProgramEnding(f"{self._name} has stopped")
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
            self._queue.put(lambda: function(*args, **kwargs))

    def ask_to_stop(self) -> None:
        """Work that was given before is still done."""
        with self._lock:
            self._finish()

    def wait_stopped(self, timeout: float | None = None) -> None:
        """Wait for the thread, which was asked to stop."""
        if self._thread is not None:
            self._thread.join(timeout)

    def after_fork_in_child(self) -> None:
        """The thread stayed in the parent, and the queue's lock may be anyhow."""
        self._finish.detach()
        self._begin()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (function := queue.get()) is not None:
        function()
        del function  # what it refers to is not kept alive by a thread that waits


class _Pending(Future[StepResult]):
    """The result of a step. What stays on the device is read when somebody waits for it: the step behind it may have
    been launched by then."""

    def __init__(self, executor: ThreadedExecutor) -> None:
        super().__init__()
        self._executor = executor
        self._asked = False

    def result(self, timeout: float | None = None) -> StepResult:
        if not self._asked and not self.done():
            self._asked = True
            self._executor.land(self)
        return super().result(timeout)


class ThreadedExecutor(Executor):
    """Runs another executor's steps one after the other, in the order in which they were submitted.

    What was accepted in a step is known where the next one runs: a plan may be submitted before the result of the one
    before it was looked at. While the thread waits for a GPU it does not hold the interpreter's lock.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._thread = _Thread("draftwise-executor")
        self._failure: BaseException | None = None
        self._closed = False
        self._flights: deque[tuple[_Pending, Launched]] = deque()  # of the thread

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = _Pending(self)
        self._thread.start(self._launch, plan, future)
        return future

    def land(self, future: Future[StepResult]) -> None:
        """Let the thread wait for a step, behind its earlier orders."""
        self._thread.start(self._land, future)

    def _launch(self, plan: StepPlan, future: _Pending) -> None:
        if self._closed:
            future.cancel()
            return
        # After a failed step, rows are in no known state: what was submitted meanwhile fails likewise.
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        try:
            launched = self.inner.launch(plan)
        except BaseException as error:
            self._fail(error, future)
            return
        self._flights.append((future, launched))
        if launched.done:  # and so is what came before it
            self._land(future)

    def _land(self, future: Future[StepResult]) -> None:
        """Wait for the steps up to this one."""
        while self._flights and not future.done():
            first, launched = self._flights.popleft()
            try:
                first.set_result(launched.finish())
            except BaseException as error:
                self._fail(error, first)

    def _fail(self, error: BaseException, future: Future[StepResult]) -> None:
        self._failure = error
        future.set_exception(error)
        while self._flights:
            self._flights.popleft()[0].set_exception(error)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    @property
    def num_captured(self) -> int:
        return self.inner.num_captured

    @property
    def failure(self) -> EngineDeadError | None:
        return self.inner.failure

    def forked(self) -> bool:
        return self.inner.forked()

    def forget(self) -> None:
        self._between_steps(self.inner.forget)

    def check_adapter(self, adapter: Mapping[str, LowRank]) -> None:
        self._between_steps(lambda: self.inner.check_adapter(adapter))

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        self._thread.start(self._move, lambda: self.inner.load_adapter(slot, adapter))

    def drop_adapter(self, slot: int) -> None:
        self._thread.start(self._move, lambda: self.inner.drop_adapter(slot))

    def _move(self, work: Callable[[], None]) -> None:
        """Nobody waits for it: neither the next plan, nor one who presses Ctrl-C during a long step. If it fails, so
        does the next step."""
        if self._failure is None:
            try:
                work()
            except BaseException as error:
                self._failure = error

    def _between_steps(self, work: Callable[[], None]) -> None:
        """Have something done in the thread, and wait for it."""
        done: Future[None] = Future()
        self._thread.start(self._do, work, done)
        done.result()

    def _do(self, work: Callable[[], None], done: Future[None]) -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def close(self) -> None:
        self._closed = True
        self._thread.ask_to_stop()
        self._thread.wait_stopped()
        while self._flights:
            self._flights.popleft()[0].cancel()
        self.inner.close()

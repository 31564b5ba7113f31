"""An executor in a thread of its own, so that steps can be planned while others run."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from draftwise.runner.executor import Executor
from draftwise.runner.launched import Launched
from draftwise.types import StepPlan, StepResult


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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draftwise-executor")
        self._failure: BaseException | None = None
        self._flights: deque[tuple[_Pending, Launched]] = deque()  # of the thread

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = _Pending(self)
        self._thread.submit(self._launch, plan, future)
        return future

    def land(self, future: Future[StepResult]) -> None:
        """Let the thread wait for a step, behind what it was told to do before."""
        self._thread.submit(self._land, future)

    def _launch(self, plan: StepPlan, future: _Pending) -> None:
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

    def forget(self) -> None:
        self._thread.submit(self.inner.forget).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        while self._flights:
            self._flights.popleft()[0].cancel()
        self.inner.close()

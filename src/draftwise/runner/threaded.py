"""An executor in a thread of its own, so that steps can be planned while others run."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from draftwise.runner.executor import Executor
from draftwise.types import StepPlan, StepResult


class ThreadedExecutor(Executor):
    """Runs another executor's steps one after the other, in the order in which they were submitted.

    What was accepted in a step is known where the next one runs: a plan may be submitted before the result of the one
    before it was looked at. While the thread waits for a GPU it does not hold the interpreter's lock.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draftwise-executor")
        self._failure: BaseException | None = None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._run, plan)

    def _run(self, plan: StepPlan) -> StepResult:
        # After a failed step, rows are in no known state: what was submitted meanwhile fails likewise.
        if self._failure is not None:
            raise self._failure
        try:
            return self.inner.execute(plan)
        except BaseException as error:
            self._failure = error
            raise

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def forget(self) -> None:
        self._thread.submit(self.inner.forget).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.inner.close()

"""The thread in which an asynchronous engine's core steps: what wakes it, what it does between steps, how it ends."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from draftwise import lifetime
from draftwise.engine.core import EngineCore
from draftwise.errors import EngineDeadError
from draftwise.sched.request import RequestUpdate

logger = logging.getLogger("draftwise")

_FORKED = "the engine runs in the process that this one was forked from: build one here, or start processes with spawn"


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """A bound method that does not keep its object alive: without the object, a call does nothing."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = found()
        if bound is not None:
            bound(*arguments)

    return call


class EngineThread:
    """Steps a core for as long as it has work. ``wakeup``: guards the core and the streams of its requests; notified
    when there is something to do."""

    def __init__(
        self, core: EngineCore, announce: Callable[[Sequence[RequestUpdate]], None], end: Callable[[], None]
    ) -> None:
        """``announce`` gets the changes of every step; ``end`` is called once, when the thread ends. Both are called in
        the thread, without the lock."""
        self._core = core
        self._announce = announce
        self._end = end
        self.wakeup = threading.Condition(core.lock)
        self._between: list[tuple[Callable[[], object], Future[None]]] = []  # to be done before the next step
        self._closing = False
        self._abandoned = False
        self._failure: BaseException | None = None
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="draftwise-engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether no step will follow: the engine failed or was closed."""
        return self._failure is not None

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._failure is None and not self._closing and self._core.executor.failure is None

    @property
    def in_step(self) -> float:
        """Seconds since the running step began; 0 between steps. It takes no lock."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def death(self) -> EngineDeadError | None:
        """Why no request is accepted; None: they are."""
        try:
            self.check_alive()
        except EngineDeadError as error:
            return error
        return self._core.executor.failure

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine has failed or was closed."""
        if isinstance(self._failure, EngineDeadError):
            raise EngineDeadError(str(self._failure))
        if self._failure is not None:
            failure = self._failure
            raise EngineDeadError(f"the engine failed: {type(failure).__name__}: {failure}") from failure
        if self._closing:
            raise EngineDeadError("the engine was closed")

    def between_steps(self, work: Callable[[], object]) -> Future[None]:
        """Have a function run in the thread before its next step. Raises EngineDeadError."""
        done: Future[None] = Future()
        with self.wakeup:
            self.check_alive()
            self._between.append((work, done))
            self._core.executor.hurry(True)
            self.wakeup.notify()
        return done

    # ---------------------------------------------------------------------------------------------- its end

    def close(self) -> bool:
        """Ask the thread to end, but do not wait. False: it was asked before."""
        with self.wakeup:
            if self._closing:
                return False
            self._closing = True
            if self._failure is None:
                self._failure = EngineDeadError("the engine was closed")
            self.wakeup.notify()
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def ask_to_stop(self) -> None:
        """Called at the end of the program: begin no further step."""
        self._closing = True
        # The thread holds the lock for moments only, unless something has gone wrong.
        if self.wakeup.acquire(timeout=1.0):
            self.wakeup.notify_all()
            self.wakeup.release()

    def after_fork_in_child(self) -> None:
        """Called in a forked child. The thread stayed in the parent."""
        self.wakeup = threading.Condition(self._core.lock)
        if self._failure is None:
            self._failure = EngineDeadError(_FORKED)

    def abandon(self) -> None:
        """Nobody has the engine any more: end after this step, and release the models."""
        self._abandoned = True
        self.ask_to_stop()

    # ------------------------------------------------------------------------------------------- the thread

    @torch.inference_mode()
    def _run(self) -> None:
        core = self._core
        try:
            with core.executor.many_steps():
                self._step_until_closed()
        except lifetime.ProgramEnding:
            pass
        except BaseException as error:
            logger.exception("the engine failed")
            with self.wakeup:
                self._failure = error
        finally:
            self._step_began = None
            with self.wakeup:
                tasks, self._between = self._between, []
            for _, done in tasks:
                done.set_exception(EngineDeadError("the engine has stopped"))
            self._end()
            if self._abandoned:
                core.close()

    def _step_until_closed(self) -> None:
        core = self._core
        while True:
            with self.wakeup:
                while not (core.has_work or self._closing or self._between):
                    self.wakeup.wait()
                if self._closing:
                    return
            self._do_between()
            if not core.has_work:
                continue
            self._step_began = time.monotonic()
            updates = core.step()
            self._step_began = None
            self._announce(updates)

    def _do_between(self) -> None:
        with self.wakeup:
            tasks, self._between = self._between, []
        for work, done in tasks:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

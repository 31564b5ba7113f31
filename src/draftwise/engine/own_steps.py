"""Engines whose steps run in their caller's thread: when a step fails, and when the process forks."""

from __future__ import annotations

from collections.abc import Iterable

from draftwise import lifetime
from draftwise.engine.builder import Engine
from draftwise.engine.interrupts import WholeSteps
from draftwise.errors import DraftwiseError, EngineDeadError


class OwnSteps:
    """Has an engine, or says why it has none any more."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._gone = "it was closed or has failed"
        lifetime.survive_forks(self)

    def _alive(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError(f"there is no engine: {self._gone}")
        return self._engine

    def _inspected(self) -> Engine:
        return self._alive()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold some."""
        core = self._alive().core
        with WholeSteps(), core.lock:
            return core.scheduler.kv.reset_prefix_cache()

    def reset_drafters(self) -> None:
        """Make drafters forget what they learned from past requests (method ``suffix``: their outputs)."""
        with WholeSteps():
            self._alive().core.executor.forget()

    def _broken_off(self, error: BaseException, rids: Iterable[int] = (), *, asked: bool = False) -> None:
        """A step ended with an error: end these requests, of which nobody will ask again; what the others lack is
        computed again (`Scheduler.break_off`). The engine stays usable, as after Ctrl-C, if the error is not one of the
        engine's, or a handler of a signal raised it between two steps (``asked``). Else the engine is closed, and
        EngineDeadError is raised."""
        engine = self._alive()
        for rid in rids:
            engine.core.cancel(rid)
        if isinstance(error, lifetime.ProgramEnding):
            lifetime.rest()
        if isinstance(error, Exception) and not isinstance(error, DraftwiseError) and not asked:
            self._engine = None
            engine.core.close()
            raise EngineDeadError(f"the engine failed: {type(error).__name__}: {error}") from error

    def after_fork_in_child(self) -> None:
        """Called in a forked child. An idle engine goes on; one with a step under way is unusable, as is one whose
        model is in other processes."""
        if self._engine is None:
            return
        self._engine.adapters.after_fork_in_child()
        if not self._engine.core.after_fork_in_child():
            self._engine = None
            self._gone = (
                "its steps or ranks stayed in the process that this one was forked from; build one here"
            )

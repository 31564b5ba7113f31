"""Whether an asynchronous engine is alive, under this engine's names and vLLM's."""

from __future__ import annotations

from draftwise.engine.thread import EngineThread
from draftwise.errors import EngineDeadError


class Health:
    """What the thread of an `AsyncLLM` says about it."""

    _thread: EngineThread

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive

    is_running = is_alive
    """vLLM's name."""

    @property
    def errored(self) -> bool:
        """Whether the engine has failed or was closed."""
        return not self.is_alive

    is_stopped = errored
    """vLLM's other name."""

    @property
    def dead_error(self) -> EngineDeadError:
        """What a request would be answered with now, if the engine is not alive."""
        return self._thread.death or EngineDeadError("the engine is alive")

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has failed or was closed."""
        if self._thread.death is not None:
            raise self._thread.death

    @property
    def in_step(self) -> float:
        """Seconds since the running step began; 0 between steps. It takes no lock, so it answers for an engine that
        hangs."""
        return self._thread.in_step

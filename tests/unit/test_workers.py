"""Threads for what would block an event loop: when they end, and when the system has no more."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from draftwise.engine.workers import Lane, Workers
from draftwise.errors import EngineDeadError


class Hurried(SimpleQueue[Any]):
    """A thread takes the last job just when somebody has heard that there is one."""

    def empty(self) -> bool:
        nothing = super().empty()
        if not nothing:
            self.get()
        return nothing


def test_closing_waits_for_no_job_that_a_thread_has_taken() -> None:
    async def main() -> None:
        workers, gate = Workers(), threading.Event()
        workers._queues[Lane.TEXT] = Hurried()
        running = [workers.submit(Lane.TEXT, gate.wait) for _ in range(Lane.TEXT.num_threads)]
        while workers._queues[Lane.TEXT].qsize():
            await asyncio.sleep(0.001)
        waiting = workers.submit(Lane.TEXT, list)
        closing = threading.Thread(target=workers.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, 20)
        assert not closing.is_alive()
        with pytest.raises(EngineDeadError):
            await waiting
        gate.set()
        assert await asyncio.gather(*running) == [True] * len(running)

    asyncio.run(main())


def test_a_thread_that_cannot_be_started_is_started_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        workers = Workers()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                workers.submit(Lane.OUTPUT, list)
        assert await asyncio.wait_for(workers.submit(Lane.OUTPUT, list), 20) == []
        workers.close()

    asyncio.run(main())

"""A few threads for work that would block an event loop, in lanes that do not wait for one another."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from draftwise import lifetime
from draftwise.engine.loops import running_loop
from draftwise.errors import EngineDeadError

T = TypeVar("T")


class Lane(enum.Enum):
    """A kind of work. Value: the most threads for it."""

    TEXT = ("text", 2)  # tokenizing, rendering, automata of stop strings: milliseconds per 10,000 characters
    ADAPTER = ("adapter", 1)  # files of adapters: as long as reading takes
    OUTPUT = ("output", 1)  # outputs with many log-probabilities
    GRAMMAR = ("grammar", 2)  # small grammars: milliseconds, at most a second or two
    LARGE_GRAMMAR = ("large grammar", 1)  # as long as the limits allow

    @property
    def num_threads(self) -> int:
        return self.value[1]


class _Job(Generic[T]):
    """Waiting work, and its future in the caller's event loop."""

    def __init__(self, work: Callable[[], T], future: asyncio.Future[T]) -> None:
        self._work = work
        self._future = future

    def run(self) -> None:
        if self._future.cancelled():  # nobody waits any more
            return
        try:
            with lifetime.computing():
                result = self._work()
        except BaseException as error:
            self._deliver(self._future.set_exception, error)
        else:
            self._deliver(self._future.set_result, result)

    def refuse(self) -> None:
        self._deliver(self._future.set_exception, EngineDeadError("the engine was closed"))

    def _deliver(self, put: Callable[[Any], None], value: Any) -> None:
        def unless_cancelled() -> None:
            if not self._future.done():
                put(value)

        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._future.get_loop().call_soon_threadsafe(unless_cancelled)


class Workers:
    """Threads start when there is work for them, and end with `close`. A lane's work is begun in the order in which it
    came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Lane, SimpleQueue[_Job[Any] | None]] = {lane: SimpleQueue() for lane in Lane}
        self._free = dict.fromkeys(Lane, 0)  # threads without work, less the work that waits for them
        self._threads: dict[Lane, list[threading.Thread]] = {lane: [] for lane in Lane}
        self._closed = False

    def submit(self, lane: Lane, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work`` in a thread; the future belongs to the running event loop. Cancelling it drops work that has
        not begun, and the result of work that has."""
        future: asyncio.Future[T] = running_loop().create_future()
        job = _Job(work, future)
        with self._lock:
            if self._closed:
                job.refuse()
                return future
            threads = self._threads[lane]
            if self._free[lane] <= 0 and len(threads) < lane.num_threads:
                name = f"draftwise-{lane.value[0].replace(' ', '-')}-{len(threads)}"
                thread = threading.Thread(
                    target=_work, args=(self._queues[lane], weakref.ref(self), lane), name=name, daemon=True
                )
                thread.start()  # raises where the system has no more; then nothing has changed
                threads.append(thread)
                self._free[lane] += 1
            self._free[lane] -= 1
            self._queues[lane].put(job)
        return future

    def _done(self, lane: Lane) -> None:
        with self._lock:
            self._free[lane] += 1

    def close(self) -> None:
        """Begin no more work. Waiting work ends with EngineDeadError; running work goes on. Closing twice is
        allowed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for lane, queue in self._queues.items():
                with contextlib.suppress(Empty):  # a thread may take the last job meanwhile
                    while (job := queue.get_nowait()) is not None:
                        job.refuse()
                for _ in self._threads[lane]:
                    queue.put(None)


def _work(queue: SimpleQueue[_Job[Any] | None], owner: weakref.ReferenceType[Workers], lane: Lane) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job  # it may hold a large prompt
        workers = owner()
        if workers is not None:
            workers._done(lane)
        del workers

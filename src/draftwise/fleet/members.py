"""The replicas of a fleet: starting, watching, draining and removing them. The engine handles their requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from draftwise.cluster.children import PATIENCE
from draftwise.config import EngineConfig
from draftwise.errors import ConfigError, EngineDeadError, RequestError
from draftwise.fleet.adapters import FleetAdapters
from draftwise.fleet.child import ReplicaProcesses
from draftwise.fleet.pulse import Pulse
from draftwise.fleet.replicas import Replica, plan
from draftwise.fleet.router import Router
from draftwise.fleet.wire import Ping, Pong
from draftwise.metrics.books import Books

logger = logging.getLogger("draftwise.fleet")

_BOOKS_TIMEOUT = 0.5
"""Seconds that a replica has to tell its numbers; the last known ones stand for one that is late."""
_LOOK = 1.0
"""Seconds between two looks at how replicas are."""

T = TypeVar("T")


class Members:
    """The replicas of one fleet. They belong to one event loop, from `attach` on; `books` and `close` may be called
    from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        count: int,
        max_chunk_rate: float | None,
        receive: Callable[[Replica, Sequence[Any]], None],
        lost: Callable[[Replica, str], None],
    ) -> None:
        """Start ``config.data_parallel_size`` of them. Raises what building one raises; then none is left.

        Args:
            count: among how many the machine is divided.
            max_chunk_rate: of all streams together.
            receive: what a replica says of streams.
            lost: it is gone, and how; it is no member any more.
        """
        self._config = config
        self._count = count
        self._max_chunk_rate = max_chunk_rate
        self._receive, self._lost = receive, lost
        self._by_number: dict[int, Replica] = {}
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scaling = asyncio.Lock()
        self._looked = 0.0
        self.closing = False
        self.adapters = FleetAdapters()
        self._processes = ReplicaProcesses()
        ranked = config.tensor_parallel_size > 1  # a replica itself sees that a rank hangs, and says which
        self._patience = config.worker_timeout + (2 * PATIENCE if ranked else 0.0)
        try:
            made = self._start(config.data_parallel_size)
        except BaseException:
            self._processes.close()
            raise
        self.hello = made[0].hello
        kinship = config.default_method == "suffix"
        self.router = Router(config.block_size, prefixes=self.hello.caches_prefixes, kinship=kinship)
        for replica in made:
            self._join(replica)

    # ---------------------------------------------------------------------------------------------- who is there

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def __getitem__(self, number: int) -> Replica:
        return self._by_number[number]

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    @property
    def serving(self) -> tuple[int, ...]:
        """Numbers of those that get requests; those that drain are not among them."""
        return tuple(n for n, replica in self._by_number.items() if not replica.retired)

    def preferred(self) -> list[int] | None:
        """The replicas that answer; None: all do, or none does."""
        now = time.monotonic()
        serving = self.serving
        prompt = [n for n in serving if not self._by_number[n].pulse.is_late(now)]
        return None if len(prompt) in (0, len(serving)) else prompt

    def state(self) -> list[dict[str, Any]]:
        """The state of every replica: its number, "ready", "late" (it does not answer) or "draining", and how many
        requests it
        has."""
        now = time.monotonic()
        return [
            {
                "replica": number,
                "state": "draining" if replica.retired else "late" if replica.pulse.is_late(now) else "ready",
                "num_requests": len(replica.streams),
            }
            for number, replica in self._by_number.items()
        ]

    def books(self) -> list[Books]:
        """The books of every present replica, under its number."""
        found = []
        for replica in self:
            timeout = 0.0 if replica.process.owes_an_answer else _BOOKS_TIMEOUT
            with contextlib.suppress(TimeoutError, EngineDeadError):
                replica.books = replica.process.order("books", timeout=timeout)
            if replica.books is not None:
                found.append(Books(str(replica.number), *replica.books))
        return found

    # ------------------------------------------------------------------------------------------ coming and going

    def _start(self, count: int) -> list[Replica]:
        """Start processes, all at once, and wait until they are built."""
        first, self._next = self._next, self._next + count
        taken = {replica.slot for replica in self}
        slots = [slot for slot in range(len(taken) + count) if slot not in taken][:count]
        plans = [
            plan(self._config, first + i, self._max_chunk_rate, slot=slot, count=self._count)
            for i, slot in enumerate(slots)
        ]
        started = self._processes.start(plans)
        return [Replica(*one, slot, Pulse(self._patience)) for one, slot in zip(started, slots, strict=True)]

    @property
    def replica_config(self) -> EngineConfig:
        """The configuration of each replica, without its number."""
        return plan(self._config, 0, None, slot=0, count=self._count)[0].config

    def _join(self, replica: Replica) -> None:
        """From now on it gets requests."""
        self._by_number[replica.number] = replica
        self.router.add(replica.number)
        if self._loop is not None:
            self._connect(replica)

    def attach(self) -> None:
        """The running event loop is theirs from the first time on. Raises RequestError in another one."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for replica in self:
                self._connect(replica)
            self._looked = time.monotonic()
            loop.call_later(_LOOK, self._look)
        elif self._loop is not loop:
            raise RequestError("data_parallel_size: requests of several replicas come from one event loop")

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Theirs, unless there is none yet."""
        return self._loop

    def _connect(self, replica: Replica) -> None:
        def receive(batch: Sequence[Any]) -> None:
            for message in batch:
                if isinstance(message, Pong):
                    replica.pulse.answered(message.in_step)
            self._receive(replica, batch)

        replica.connect(receive, functools.partial(self._gone, replica))

    def _look(self) -> None:
        """Ask all how they are, and end those that hang."""
        loop = self._loop
        if self.closing or loop is None:
            return
        now = time.monotonic()
        slept, self._looked = now - self._looked, now
        for replica in self:
            if slept > 2 * _LOOK:
                replica.pulse.forgive(now)
            if (fault := replica.pulse.fault(now)) is not None:
                replica.process.kill()
                self._gone(replica, fault)
            elif replica.pulse.ask(now):
                replica.post(Ping())
        loop.call_later(_LOOK, self._look)

    def _gone(self, replica: Replica, fault: str | None = None) -> None:
        """Its process has ended, or is being ended for a fault."""
        if replica.number not in self._by_number:
            return
        del self._by_number[replica.number]
        self.router.remove(replica.number)
        replica.close()
        if self.closing:
            words = f"replica {replica.number} was closed"
        else:
            words = replica.process.last_words(fault)
            if fault or not replica.retired:
                logger.error("%s", words)
        self._lost(replica, words.partition("\n")[0].partition(";")[0])
        self._processes.forget(replica.process)

    async def scale(self, count: int) -> None:
        """See `FleetEngine.scale`."""
        if count < 1:
            raise ConfigError(f"data_parallel_size: expected an integer >= 1, got {count}")
        self.attach()
        async with self._scaling:
            serving = self.serving
            for number in sorted(serving)[count:]:
                self._retire(self._by_number[number])
            if count > len(serving):
                for replica in await _in_thread(lambda: self._start(count - len(serving))):
                    try:
                        await _in_thread(functools.partial(self.adapters.catch_up, replica))
                    except BaseException:
                        self._processes.forget(replica.process)
                        raise
                    self._join(replica)

    def _retire(self, replica: Replica) -> None:
        replica.retired = True
        self.router.remove(replica.number)
        logger.info("replica %d drains: %d requests", replica.number, len(replica.streams))
        self.end_if_idle(replica)

    def end_if_idle(self, replica: Replica) -> None:
        """One that drains ends with its last request."""
        if replica.retired and not replica.streams:
            replica.process.ask_to_end()

    # ------------------------------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """End all. Closing twice is fine."""
        if self.closing:
            return
        self.closing = True
        self._processes.ask_to_end()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._leave)
        self._processes.close()

    def _leave(self) -> None:
        for replica in self:
            self._gone(replica)

    def forked(self) -> None:
        """In a forked child: they are the parent's."""
        self._processes.forked()
        self._by_number.clear()
        self.closing = True


async def _in_thread(work: Callable[[], T]) -> T:
    """What takes long, in a thread that nobody waits for at the end of the program: building an engine takes minutes,
    and those that are not built by then are ended."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            tell = functools.partial(done.set_result, work())
        except Exception as error:
            tell = functools.partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else tell())

    threading.Thread(target=run, name="draftwise-scaling", daemon=True).start()
    return await done

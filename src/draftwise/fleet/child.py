"""A replica's process as the fleet sees it: started, given orders, and ended."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from draftwise.cluster.children import PATIENCE, Child, Lifeline
from draftwise.errors import EngineDeadError
from draftwise.fleet.wire import Hello, Start


class ReplicaProcess:
    """One of them. Orders may be given by any thread, one at a time."""

    def __init__(self, start: Start, lifeline_read: int, environment: dict[str, str]) -> None:
        """Start it; `hello` waits until it is built.

        Args:
            start: what it is made of.
            lifeline_read: the end of a pipe from which the replica reads that this process is gone.
            environment: variables beside this process's own.
        """
        self.number = start.number
        self.is_built = False
        self._lock = threading.Lock()
        self._order = self._answered = 0  # numbers of the last order, and of the last answer
        mine, theirs = socket.socketpair()
        orders, obeyed = socket.socketpair()
        with theirs, obeyed:
            self._child = Child(
                f"replica {self.number}",
                "draftwise.fleet.replica",
                (theirs.fileno(), obeyed.fileno(), lifeline_read),
                environment=environment,
            )
        self.streams = mine
        self._orders = Connection(orders.detach())
        with contextlib.suppress(OSError):  # it is dead already: `hello` says so
            self._orders.send(start)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        return self._child.has_ended

    def hello(self) -> Hello:
        """Wait until it is built. Raises what it raised then, EngineDeadError if it died."""
        try:
            answer = self._orders.recv()
        except (EOFError, OSError):
            raise EngineDeadError(self.last_words()) from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Hello)
        self.is_built = True
        return answer

    def last_words(self, what: str | None = None) -> str:
        """How it ended (``what``, if somebody knows better), and what it wrote last. Waits a moment for both."""
        self._child.wait(1.0)
        words = "\n".join(self._child.said())
        return f"replica {self.number} {what or self._child.how}" + (
            f"; its last words:\n{words}" if words else ""
        )

    @property
    def owes_an_answer(self) -> bool:
        """Whether the last order has not been answered, and whoever gave it waits no more."""
        return self._order != self._answered and not self._lock.locked()

    def order(self, call: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Have something done and wait for the answer.

        Raises:
            EngineDeadError: it is gone.
            TimeoutError: it did not answer within ``timeout`` seconds.
            Exception: what it raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        try:
            # One order at a time is on its way: what more a replica that hangs is asked would fill the socket, and then
            # whoever asks would hang, too.
            while self._answered != self._order:
                self._receive(deadline)
            self._order += 1
            self._orders.send((self._order, call, arguments))
            answer = self._receive(deadline)
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise EngineDeadError(f"replica {self.number} is gone") from None
        finally:
            self._lock.release()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _receive(self, deadline: float | None) -> Any:
        """The answer to the oldest order that has none. Raises TimeoutError."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([self._orders], [], [], left)[0]:
            raise TimeoutError
        self._answered, answer = self._orders.recv()
        return answer

    def ask_to_end(self) -> None:
        """Let it end by itself."""
        with contextlib.suppress(OSError):
            self._orders.send((0, "close", ()))

    def kill(self) -> None:
        """Begin to end the process, whatever it is doing."""
        self._child.kill()

    def end(self, patience: float = PATIENCE) -> None:
        """See that it has ended, by force after ``patience`` seconds. Asking twice is fine."""
        self._child.end(patience)
        self._orders.close()
        self.streams.close()

    def forked(self) -> None:
        """In a forked child: it is the parent's."""
        self._child.disown()
        self._orders.close()
        self.streams.close()


class ReplicaProcesses:
    """All of a fleet. They end when this object is closed or collected, and when its process is gone."""

    def __init__(self) -> None:
        self._lifeline = Lifeline()
        self._all: list[ReplicaProcess] = []
        self._closer = weakref.finalize(self, _end_all, self._all, self._lifeline)

    def __iter__(self) -> Iterator[ReplicaProcess]:
        return iter(tuple(self._all))

    def start(self, plans: Iterable[tuple[Start, dict[str, str]]]) -> list[tuple[ReplicaProcess, Hello]]:
        """Start some, all at once, and wait until they are built. Raises what building one raised; then none is left of
        these; EngineDeadError once all were ended."""
        if not self._closer.alive:
            raise EngineDeadError("the engine was closed")
        made: list[ReplicaProcess] = []
        try:
            for start, environment in plans:
                made.append(ReplicaProcess(start, self._lifeline.children_end, environment))
                self._all.append(made[-1])
            return [(process, process.hello()) for process in made]
        except BaseException:
            for process in made:
                process.end(0.0)
                self._all.remove(process)
            raise

    def forget(self, process: ReplicaProcess) -> None:
        """It is gone, or about to be: see to its end in a thread."""
        if process in self._all:
            self._all.remove(process)
        threading.Thread(target=process.end, args=(0.5,), daemon=True).start()

    def ask_to_end(self) -> None:
        """Let all end by themselves."""
        for process in self:
            process.ask_to_end()

    def close(self) -> None:
        """End all, and see that they have. Closing twice is fine."""
        self._closer()

    def forked(self) -> None:
        """In a forked child: they are the parent's."""
        if self._closer.detach() is None:
            return  # ended before: their descriptors may be reused by now
        self._lifeline.let_go()
        for process in self:
            process.forked()


def _end_all(processes: list[ReplicaProcess], lifeline: Lifeline) -> None:
    """Built replicas end by themselves; a replica that is still loading hears no order."""
    processes = list(processes)
    for process in processes:
        if process.is_built:
            process.ask_to_end()
        else:
            process.kill()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.end(max(0.01, deadline - time.monotonic()))
    lifeline.let_go()

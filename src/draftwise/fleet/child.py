"""A replica's process as the fleet sees it: started, given orders, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import IO, Any

from draftwise.errors import EngineDeadError
from draftwise.fleet.wire import Hello, Start

_LAST_WORDS = 30
"""Lines of what it wrote that are kept."""
_PATIENCE = 5.0
"""Seconds that a replica has to end once it was asked to."""


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
        self._lock = threading.Lock()
        self._order = 0
        self._said: deque[str] = deque(maxlen=_LAST_WORDS)
        mine, theirs = socket.socketpair()
        orders, obeyed = socket.socketpair()
        with theirs, obeyed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "draftwise.fleet.replica",
                 *(str(fd) for fd in (theirs.fileno(), obeyed.fileno(), lifeline_read))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), obeyed.fileno(), lifeline_read),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | environment,
            )  # fmt: skip
        self.streams = mine
        self._orders = Connection(orders.detach())
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=_listen,
            args=(self._process.stdout, self._said, self.number),
            name=f"draftwise-replica-{self.number}",
            daemon=True,
        )
        self._reader.start()
        with contextlib.suppress(OSError):  # it is dead already: `hello` says so
            self._orders.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def hello(self) -> Hello:
        """Wait until it is built. Raises what it raised then, EngineDeadError if it died."""
        try:
            answer = self._orders.recv()
        except (EOFError, OSError):
            raise EngineDeadError(self.last_words()) from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, Hello)
        return answer

    def last_words(self) -> str:
        """How it ended, and what it wrote last. Waits a moment for both."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._reader.join(0.2)
        code = self._process.poll()
        how = "is running" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"was ended by {signal.Signals(-code).name}"
        words = "\n".join(self._said)
        return f"replica {self.number} {how}" + (f"; its last words:\n{words}" if words else "")

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
            self._order += 1
            self._orders.send((self._order, call, arguments))
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([self._orders], [], [], left)[0]:
                    raise TimeoutError
                number, answer = self._orders.recv()
                if number == self._order:  # not to an order that nobody waits for any more
                    break
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise EngineDeadError(f"replica {self.number} is gone") from None
        finally:
            self._lock.release()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ask_to_end(self) -> None:
        """Let it end by itself."""
        with contextlib.suppress(OSError):
            self._orders.send((0, "close", ()))

    def end(self, patience: float = _PATIENCE) -> None:
        """See that it has ended, by force after ``patience`` seconds. Asking twice is fine."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._orders.close()
        self.streams.close()
        self._reader.join(1.0)

    def forked(self) -> None:
        """In a forked child: it is the parent's."""
        self._process.returncode = 0
        self._orders.close()
        self.streams.close()


class ReplicaProcesses:
    """All of a fleet. They end when this object is closed or collected, and when its process is gone."""

    def __init__(self) -> None:
        self._lifeline_read, self._lifeline = os.pipe()
        self._all: list[ReplicaProcess] = []
        ends = [self._lifeline, self._lifeline_read]
        self._closer = weakref.finalize(self, _end_all, self._all, ends)

    def __iter__(self) -> Iterator[ReplicaProcess]:
        return iter(tuple(self._all))

    def start(self, plans: Iterable[tuple[Start, dict[str, str]]]) -> list[tuple[ReplicaProcess, Hello]]:
        """Start some, all at once, and wait until they are built. Raises what building one raised; then none is left of
        these."""
        made: list[ReplicaProcess] = []
        try:
            for start, environment in plans:
                made.append(ReplicaProcess(start, self._lifeline_read, environment))
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
            return  # ended before: their descriptors may be somebody else's by now
        for descriptor in (self._lifeline, self._lifeline_read):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        for process in self:
            process.forked()


def _end_all(processes: list[ReplicaProcess], descriptors: list[int]) -> None:
    """Nobody holds their lifelines any more, so that they end; those that do not are ended."""
    processes = list(processes)
    for process in processes:
        process.ask_to_end()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        process.end(max(0.01, deadline - time.monotonic()))
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _listen(stream: IO[bytes], said: deque[str], number: int) -> None:
    """Keep the last lines of what it writes, and pass them on."""
    with contextlib.suppress(ValueError, OSError), stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            said.append(text)
            with contextlib.suppress(Exception):  # stderr may be gone at the end of the program
                print(f"[replica {number}] {text}", file=sys.stderr, flush=True)

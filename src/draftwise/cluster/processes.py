"""The ranks' processes as the host sees them: started, asked together, and ended together.

A process that dies, raises or does not answer in time ends all of them: nobody is left waiting for a rank that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any

from draftwise.cluster.messages import Answer, Order, Start, receive, send
from draftwise.errors import DraftwiseError, EngineDeadError

logger = logging.getLogger("draftwise")

_LAST_WORDS = 30
"""Lines of a rank's stderr that are kept."""
_PATIENCE = 5.0
"""Seconds that a rank has to end once it was asked to."""


@dataclass(slots=True)
class RankProcess:
    """One rank."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Connection
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))
    reader: threading.Thread | None = None

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return "\n".join(self.said)

    @property
    def end(self) -> str:
        """How it ended, for people."""
        code = self.process.poll()
        if code is None:
            return "is running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class RankProcesses:
    """All ranks of one engine, on this machine."""

    def __init__(
        self,
        module: str,
        size: int,
        start: Callable[[int, int], Start],
        *,
        seconds: float,
        memory_bytes: int,
    ) -> None:
        """Start them; `first_answer` waits until they are built.

        Args:
            module: what each runs as ``python -m``, with two file descriptors as arguments; see `cluster.ranking`.
            start: from a rank and the shared memory's file descriptor to what it is told first.
            seconds: that an order may take.
            memory_bytes: of the memory that they share.
        """
        self.size = size
        self._seconds = seconds
        self._number = 0
        self._failure: EngineDeadError | None = None
        self._lock = (
            threading.Lock()
        )  # of the failure: the watching thread and who waits for answers may both see it
        memory = _shared_memory(memory_bytes)
        self._memory = mmap.mmap(memory, memory_bytes)
        lifeline_read, self._lifeline = os.pipe()
        self.ranks: list[RankProcess] = []
        self._closer = weakref.finalize(self, _end_all, self.ranks, [self._lifeline])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            for rank in range(size):
                mine, theirs = socket.socketpair()
                with mine, theirs:
                    process = subprocess.Popen(
                        [sys.executable, "-m", module, str(theirs.fileno()), str(lifeline_read)],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        pass_fds=(theirs.fileno(), lifeline_read, memory),
                        env=environment,
                    )
                    one = RankProcess(rank, process, Connection(mine.detach()))
                self.ranks.append(one)
                assert process.stdout is not None
                one.reader = threading.Thread(
                    target=_listen,
                    args=(process.stdout, one.said, rank),
                    name=f"draftwise-rank-{rank}",
                    daemon=True,
                )
                one.reader.start()
            for one in self.ranks:
                with contextlib.suppress(OSError):  # it is dead already: `collect` says so
                    send(one.channel, start(one.rank, memory))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(lifeline_read)
            os.close(memory)

    # ------------------------------------------------------------------------------------------------ orders

    def first_answer(self) -> Any:
        """What rank 0 says of what it has built, once all have.

        Raises:
            DraftwiseError: what a rank raised while it was built; EngineDeadError if it died.
        """
        facts = None
        for one, (answer, told) in self._collected(self.ranks, None):
            if answer.error is not None:
                error = answer.error
                self._give_up(f"rank {one.rank} could not be built: {error}", (one,))
                raise error if isinstance(error, DraftwiseError) else self._dead()
            if one.rank == 0:
                facts = told
        return facts

    def ask(self, order: Callable[[int], Order]) -> list[Answer]:
        """Give all ranks an order and wait for their answers, in the order of the ranks.

        Raises:
            EngineDeadError: a rank died, raised, or did not answer in time; which, and its last words.
        """
        if self._failure is not None:
            raise self._dead()
        self._number += 1
        number = self._number
        message = pickle.dumps(order(number), pickle.HIGHEST_PROTOCOL)
        for one in self.ranks:
            try:
                one.channel.send_bytes(message)
            except OSError:
                raise self._lost(one) from None
        answers: dict[int, Answer] = {}
        for one, answer in self._collected(self.ranks, number):
            if answer.error is not None:
                raise self._give_up(
                    f"rank {one.rank} failed: {type(answer.error).__name__}: {answer.error}", (one,)
                )
            answers[one.rank] = answer
        return [answers[rank] for rank in range(self.size)]

    def _collected(self, ranks: Sequence[RankProcess], number: int | None) -> Any:
        """(rank, answer) as they come; answers to earlier orders, whose caller went away, are thrown away."""
        deadline = time.monotonic() + self._seconds if number is not None else None
        waiting = {one.channel.fileno(): one for one in ranks}
        poller = select.poll()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = poller.poll(left)
            if not ready:
                raise self._late(list(waiting.values()))
            for descriptor, _ in ready:
                one = waiting[descriptor]
                try:
                    answer = receive(one.channel)
                except (EOFError, OSError):
                    raise self._lost(one) from None
                if number is not None and answer.number != number:
                    continue
                poller.unregister(descriptor)
                del waiting[descriptor]
                yield one, answer

    # ----------------------------------------------------------------------------------------------- failing

    @property
    def failure(self) -> EngineDeadError | None:
        """Why nothing can be asked any more; None: nothing has failed that anybody has noticed."""
        if self._failure is None:
            for one in self.ranks:
                if one.process.poll() is not None:
                    self._lost(one)
                    break
        return self._failure

    def part(self, ranks: Sequence[int], what: str) -> EngineDeadError:
        """End all because some ranks came apart from the others."""
        return self._give_up(what, [self.ranks[rank] for rank in ranks])

    def _lost(self, one: RankProcess) -> EngineDeadError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(_PATIENCE)
        return self._give_up(f"rank {one.rank} {one.end}", (one,))

    def _late(self, waiting: Sequence[RankProcess]) -> EngineDeadError:
        """Nobody of ``waiting`` answered in time. Those who wait for another have posted more exchanges than it."""
        posted = [int.from_bytes(self._memory[64 * r : 64 * r + 8], sys.byteorder) for r in range(self.size)]
        behind = min(posted[one.rank] for one in waiting)
        hung = [one for one in waiting if posted[one.rank] == behind]
        names = ", ".join(str(one.rank) for one in hung)
        return self._give_up(f"rank {names} did not answer within {self._seconds:g} s (worker_timeout)", hung)

    def _give_up(self, what: str, about: Sequence[RankProcess]) -> EngineDeadError:
        with self._lock:
            if self._failure is None:
                _kill(self.ranks)
                for one in about:
                    if one.reader is not None:
                        one.reader.join(1.0)
                words = "\n".join(f"[rank {one.rank}] {line}" for one in about for line in one.said)
                self._failure = EngineDeadError(f"{what}; its last words:\n{words}" if words else what)
        return self._dead()

    def _dead(self) -> EngineDeadError:
        assert self._failure is not None
        return EngineDeadError(*self._failure.args)

    # ------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Let the ranks end, and see that they have."""
        if self._failure is None:
            self._number += 1
            for one in self.ranks:
                with contextlib.suppress(OSError):
                    send(one.channel, Order(self._number, "close"))
            self._failure = EngineDeadError("the engine was closed")
        self._closer()

    def forked(self) -> None:
        """In a forked child: the ranks are the parent's."""
        self._closer.detach()
        os.close(self._lifeline)
        for one in self.ranks:
            one.channel.close()
            one.process.returncode = 0  # not this process's to wait for
        self._failure = EngineDeadError("the ranks belong to the process that this one was forked from")


def _shared_memory(nbytes: int) -> int:
    """A file descriptor of so many zeros, of a file that no folder has."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("draftwise-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, nbytes)
    return memory


def _listen(stream: IO[bytes], said: deque[str], rank: int) -> None:
    """Keep the last lines of what a rank writes, and pass them on."""
    with contextlib.suppress(ValueError, OSError), stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            said.append(text)
            with contextlib.suppress(Exception):  # stderr may be gone at the end of the program
                print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)


def _kill(ranks: Sequence[RankProcess]) -> None:
    for one in ranks:
        with contextlib.suppress(OSError):
            one.process.kill()
    for one in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(_PATIENCE)


def _end_all(ranks: list[RankProcess], lifelines: list[int]) -> None:
    """Nobody holds their lifelines any more, so that ranks end; those that do not are ended."""
    for fd in lifelines:
        with contextlib.suppress(OSError):
            os.close(fd)
    deadline = time.monotonic() + _PATIENCE
    for one in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(max(0.01, deadline - time.monotonic()))
    _kill(ranks)
    for one in ranks:
        one.channel.close()
        if one.reader is not None:
            one.reader.join(1.0)

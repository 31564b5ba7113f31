"""Ranks' processes on this machine: how they are started, heard, and ended."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO

from draftwise.cluster.group import PATIENCE, Holding, RankGroup, RankHandle, end_all
from draftwise.cluster.messages import Start

_LAST_WORDS = 30
"""Lines of a rank's stderr that are kept."""


class RankProcess:
    """A process that is a rank. Whoever has started it holds this."""

    def __init__(
        self, rank: int, module: str, fds: Sequence[int], more: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        """Start it.

        Args:
            module: what it runs as ``python -m``, see `cluster.ranking`.
            fds: file descriptors of its channel and its lifeline, its arguments.
            more: others that it inherits under the same numbers.
            environment: variables that it has besides this process's.
        """
        self.rank = rank
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(*fds, *more),
            env={**os.environ, **paths, **environment},
        )
        assert self.process.stdout is not None
        self._said: deque[str] = deque(maxlen=_LAST_WORDS)
        self._reader = threading.Thread(
            target=_listen,
            args=(self.process.stdout, self._said, rank),
            name=f"draftwise-rank-{rank}",
            daemon=True,
        )
        self._reader.start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def kill(self) -> None:
        """Send it a signal that it cannot refuse."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def said(self) -> list[str]:
        """The last lines of what it wrote; all of them, once it has ended."""
        if self.process.poll() is not None:
            self._reader.join(1.0)
        return list(self._said)

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


class LocalRank(RankHandle):
    """A rank on the host's machine."""

    def __init__(self, process: RankProcess, channel: Connection, memory: mmap.mmap) -> None:
        super().__init__(process.rank, channel)
        self.running = process
        self._memory = memory

    def gone(self) -> bool:
        return self.running.process.poll() is not None

    def end(self) -> str:
        self.running.wait(PATIENCE)
        return self.running.end

    def said(self) -> Sequence[str]:
        return self.running.said()

    def posted(self) -> int:
        return posted(self._memory, self.rank)

    def kill(self) -> None:
        self.running.kill()

    def wait(self, seconds: float) -> bool:
        return self.running.wait(seconds)

    def disown(self) -> None:
        self.running.process.returncode = 0  # not this process's to wait for


class _Lifeline(Holding):
    """The end of a pipe that only this process holds: ranks end when it is closed, however that happens."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def disown(self) -> None:
        self.let_go()


def start_processes(
    module: str, size: int, start: Callable[[int, int], Start], *, seconds: float, memory_bytes: int
) -> RankGroup:
    """Start all ranks of one engine on this machine.

    Args:
        module: what each runs as ``python -m``, with two file descriptors as arguments; see `cluster.ranking`.
        start: from a rank and the shared memory's file descriptor to what it is told first.
        seconds: that an order may take.
        memory_bytes: of the memory that they share.
    """
    memory = _shared_memory(memory_bytes)
    mapped = mmap.mmap(memory, memory_bytes)
    lifeline_read, lifeline = os.pipe()
    holding = _Lifeline(lifeline)
    ranks: list[LocalRank] = []
    try:
        for rank in range(size):
            mine, theirs = socket.socketpair()
            with mine, theirs:
                process = RankProcess(rank, module, (theirs.fileno(), lifeline_read), (memory,), {})
                ranks.append(LocalRank(process, Connection(mine.detach()), mapped))
        group = RankGroup(ranks, holding, seconds=seconds)
        group.tell(lambda rank: start(rank, memory))
        return group
    except BaseException:
        end_all(ranks, holding)
        raise
    finally:
        os.close(lifeline_read)
        os.close(memory)


def posted(memory: mmap.mmap, rank: int) -> int:
    """Exchanges that a rank has begun in the memory that ranks of a machine share (``csrc/ranks.cpp``)."""
    return int.from_bytes(memory[64 * rank : 64 * rank + 8], sys.byteorder)


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

"""Ranks' processes on this machine: how they are started, heard, and ended."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from draftwise.cluster.children import PATIENCE, Child, Lifeline
from draftwise.cluster.group import Holding, RankGroup, RankHandle, end_all
from draftwise.cluster.messages import Start


class LocalRank(RankHandle):
    """A rank on the host's machine."""

    def __init__(self, rank: int, process: Child, channel: Connection, memory: mmap.mmap) -> None:
        super().__init__(rank, channel)
        self.running = process
        self._memory = memory

    def gone(self) -> bool:
        return self.running.has_ended

    def end(self) -> str:
        self.running.wait(PATIENCE)
        return self.running.how

    def said(self) -> Sequence[str]:
        return self.running.said()

    def posted(self) -> int:
        return posted(self._memory, self.rank)

    def kill(self) -> None:
        self.running.kill()

    def wait(self, seconds: float) -> bool:
        return self.running.wait(seconds)

    def disown(self) -> None:
        self.running.disown()


class _Held(Holding):
    """The lifeline of ranks."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline

    def let_go(self) -> None:
        self._lifeline.let_go()

    def disown(self) -> None:
        self._lifeline.let_go()  # the parent has its own copy


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
    lifeline = Lifeline()
    holding = _Held(lifeline)
    ranks: list[LocalRank] = []
    try:
        for rank in range(size):
            mine, theirs = socket.socketpair()
            with mine, theirs:
                fds = (theirs.fileno(), lifeline.children_end)
                process = Child(f"rank {rank}", module, fds, inherited=(memory,))
                ranks.append(LocalRank(rank, process, Connection(mine.detach()), mapped))
        group = RankGroup(ranks, holding, seconds=seconds)
        group.tell(lambda rank: start(rank, memory))
        return group
    except BaseException:
        end_all(ranks, holding)
        raise
    finally:
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

"""The moments at which a process changes under its threads: when the interpreter ends, and when it forks.

**The end.** Python cuts daemon threads off wherever they are: a thread that comes back from native code then meets an
interpreter that is being taken apart. So whatever computes with a model does it inside `computing`, and at the end of
the program, before anything is freed, that door is shut: those inside finish their step, nobody else comes in. Threads
that belong to an engine are told to stop and waited for. Native memory is not freed at all then (`release_with` in
``kernels/cpu/library.py``): the system takes it back. Hence no order of ends, not even one that waits too long, frees
what a call still reads.

This happens in an ``atexit`` callback: the main thread is done, and so are threads that are no daemons, which may use
an engine to their own end.

**Temporary folders.** A command that a signal ends does not unwind (``cli/signals.py``), so what it has put into the
system's folder for temporary files would stay there: `passing_folder` keeps a list.

**A fork.** The child has the memory of all threads and only one of them. Objects with threads or locks register with
`survive_forks` and are told in the child, where they begin anew or say that they are gone.

This module imports nothing of the package.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

PATIENCE = 4.0
"""Seconds that the end of a program waits for steps under way. A step that takes longer is left to itself."""


class ProgramEnding(Exception):
    """The program is ending: nothing is computed any more."""


class Stoppable(Protocol):
    """Something with a thread of its own."""

    def ask_to_stop(self) -> None:
        """Tell the thread to end after its step. Must not wait, and may be called with anything half done."""

    def wait_stopped(self, timeout: float) -> None:
        """Wait for the thread."""


class Forkable(Protocol):
    """Something that a forked child cannot use as it is."""

    def after_fork_in_child(self) -> None:
        """Called in the child, whose one thread is the one that forked. Threads that are gone may hold locks."""


class _Door:
    """Counts running computations, and can refuse new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # taken twice a step: a condition's own way to take it is Python
        self._changed = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}  # thread -> how deep
        self.shut = False

    def enter(self) -> None:
        me = threading.get_ident()
        with self._lock:
            depth = self._inside.get(me, 0)
            if self.shut and not depth:
                raise ProgramEnding("the program is ending")
            self._inside[me] = depth + 1

    def leave(self) -> None:
        me = threading.get_ident()
        with self._lock:
            depth = self._inside[me] - 1
            if depth:
                self._inside[me] = depth
                return
            del self._inside[me]
            if self.shut:
                self._changed.notify_all()

    def others(self) -> bool:
        return any(thread != threading.get_ident() for thread in self._inside)

    def close(self, timeout: float) -> bool:
        """Let no computation begin, and wait for running ones. Returns whether all have ended."""
        with self._changed:
            self.shut = True
            return self._changed.wait_for(lambda: not self.others(), timeout)


_door = _Door()
_threads: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_forkables: weakref.WeakSet[Forkable] = weakref.WeakSet()


class computing:
    """Around every use of a model's memory: the end of the program waits for it.

    Raises ProgramEnding once the program ends.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _door.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _door.leave()


def rest() -> None:
    """For a thread that was turned away by `computing`: a daemon thread waits here to be cut off, so that the end of
    the program is quiet; any other thread goes on."""
    thread = threading.current_thread()
    if thread.daemon and thread is not threading.main_thread():
        while True:
            time.sleep(3600)


def stop_at_exit(thread: Stoppable) -> None:
    """Have this stopped before the interpreter ends. It is not kept alive."""
    _register_end()
    _threads.add(thread)


def survive_forks(forkable: Forkable) -> None:
    """Have this told in forked children. It is not kept alive."""
    _register_end()
    _forkables.add(forkable)


@functools.cache
def _register_end() -> None:
    """With the first engine: callbacks run in the reverse order, and what was registered before may free memory."""
    atexit.register(_end)


def _end() -> None:
    deadline = time.monotonic() + PATIENCE
    threads = list(_threads)
    try:
        for thread in threads:
            thread.ask_to_stop()
        _door.close(deadline - time.monotonic())
        for thread in threads:
            thread.wait_stopped(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:  # impatience: the threads are left to themselves
        _door.shut = True


_folders: set[str] = set()


@contextmanager
def passing_folder(prefix: str) -> Iterator[str]:
    """A new temporary folder, which is gone afterwards; also if a signal ends the command meanwhile."""
    folder = tempfile.mkdtemp(prefix=prefix)
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


def remove_folders() -> None:
    """Remove the folders of `passing_folder` now: nothing unwinds any more."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)


def _forked() -> None:
    global _door
    _folders.clear()  # the parent's
    shut, _door = _door.shut, _Door()
    _door.shut = shut
    for forkable in list(_forkables):
        forkable.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

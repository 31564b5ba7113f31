"""Compilation of grammars from strangers: in threads of its own, few at a time, and given up after a while.

A grammar library cannot be interrupted. What it does is bounded by its own limits and by the size of the source; what
takes too long all the same is left to itself, in a thread whose place nobody else gets before it has ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from draftwise import lifetime
from draftwise.errors import LimitError, RequestError

T = TypeVar("T")

SMALL = 8192
"""Characters of a grammar that is compiled beside others and not behind large ones."""
_PLACES = {"small": 2, "large": 1}
_LEAST_STACK = 16 << 20
_STACK_PER_CHAR = 1024
"""Bytes of stack. The library follows references by recursion: chains of rules or ``$ref`` take up to 320 bytes for
each character of the source, and where the stack ends, the process does. Only what is used is ever in memory."""
_NICENESS = 5
"""A compilation gets a quarter of a core that the engine wants, too."""

_stack_size = threading.Lock()
"""`threading.stack_size` is one for the whole process."""


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T], leave: Callable[[], None]) -> None:
        self._work = work
        self._leave = leave
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with lifetime.computing():
                if hasattr(os, "setpriority"):  # Linux: of this thread alone
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
                self.result = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._leave()
            self.ended.set()


class Compiler:
    """Used by several threads. ``seconds``: how long a compilation may take, and how long one waits for a place."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._places = {kind: threading.Semaphore(count) for kind, count in _PLACES.items()}

    def run(self, work: Callable[[], T], size: int) -> T:
        """The result of ``work``, which compiles a source of ``size`` characters. It should come to its end without
        the interpreter's lock, for the most part. Its exceptions are raised here.

        Raises:
            LimitError: it took longer than ``seconds``.
            RequestError: others took all places for as long, or there is not enough memory for its stack.
        """
        places = self._places["small" if size <= SMALL else "large"]
        if not places.acquire(timeout=self._seconds):
            raise RequestError("structured_outputs: other grammars are being compiled; try again later")
        job = _Job(work, places.release)
        try:
            _start(job, _LEAST_STACK + _STACK_PER_CHAR * size)
        except BaseException as error:
            places.release()
            if isinstance(error, RuntimeError | ValueError | MemoryError):  # no memory for the stack
                raise RequestError(
                    f"structured_outputs: {size} characters are more than this server compiles"
                ) from None
            raise
        if not job.ended.wait(self._seconds):
            limit = f"{self._seconds:g} s were not enough to compile it"
            raise LimitError("structured_outputs", limit, "max_grammar_seconds", self._seconds)
        if job.error is not None:
            raise job.error
        assert job.result is not None
        return job.result


def _start(job: _Job[T], stack: int) -> None:
    thread = threading.Thread(target=job.run, name="draftwise-compile", daemon=True)
    with _stack_size:
        before = threading.stack_size(stack & ~0xFFFF)
        try:
            thread.start()
        finally:
            threading.stack_size(before)

"""How many threads torch uses for what one thread computes.

`torch.set_num_threads` says it for the calling thread and, with that, for every thread that has not used torch yet: one
that began during a step would compute on one core for as long as it lives. OpenMP and MKL, which torch asks, have a
number for each thread. Their functions are found in torch's library, or where that leads to.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

_LIBRARY = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
_MOST = 257
"""Numbers below it are made once, as C's: a call takes half the time."""


class ThreadNumbers:
    """Sets the number of torch's threads. ``own``: for the calling thread alone."""

    def __init__(self) -> None:
        self.own = False
        self._openmp: Callable[[ctypes.c_int], None] | None = None
        self._mkl: Callable[[ctypes.c_int], int] | None = None
        self._numbers = [ctypes.c_int(n) for n in range(_MOST)]
        try:
            # Not CDLL: letting other threads run takes longer than the call.
            library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))
            self._openmp = library.omp_set_num_threads
        except (OSError, AttributeError):  # another system, or torch has threads of another kind
            return
        self._mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
        before = torch.get_num_threads()
        tried = 1 if before > 1 else 2
        mkl = self.set(tried)
        self.own = torch.get_num_threads() == tried
        self.set(before, mkl)
        if not self.own:
            self._openmp = None

    def set(self, number: int, mkl: int | None = None) -> int:
        """Let torch use ``number`` threads, and MKL ``mkl`` (0: as many as OpenMP says; None: ``number``), once it has
        been asked for its number in this thread. Returns what MKL had."""
        if self._openmp is None:
            torch.set_num_threads(number)
            return 0
        numbers = self._numbers
        self._openmp(numbers[number] if number < _MOST else ctypes.c_int(number))
        if self._mkl is None:
            return 0
        if mkl is None:
            mkl = number
        return self._mkl(numbers[mkl] if mkl < _MOST else ctypes.c_int(mkl))

    def kept(self, number: int) -> AbstractContextManager[None]:
        """Inside, torch uses ``number`` threads for what this thread computes, if it can be set for it alone."""
        return self._kept(number) if self.own else nullcontext()

    @contextmanager
    def _kept(self, number: int) -> Iterator[None]:
        before = torch.get_num_threads()
        mkl = self.set(number)
        try:
            yield
        finally:
            self.set(before, mkl)


@functools.cache
def thread_numbers() -> ThreadNumbers:
    """Of this process."""
    return ThreadNumbers()

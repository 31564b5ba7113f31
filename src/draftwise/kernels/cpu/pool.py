"""A pool of native threads; `kernels.select.shared_pool` makes one for all engines that use as many."""

from __future__ import annotations

import ctypes

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, release_with

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


class ThreadPool:
    """Threads that kernels share. The calling thread is one of them; the others sleep when there is nothing to do.

    Args:
        library: The native library.
        threads: At least 1, the caller included.
    """

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        require(threads >= 1, "a thread")
        create = library.function("dw_pool_create", ctypes.c_void_p, [ctypes.c_int])
        destroy = library.function("dw_pool_destroy", None, [ctypes.c_void_p])
        self._parallel_for = library.function(
            "dw_parallel_for", None, [ctypes.c_void_p, ctypes.c_int, TASK, ctypes.c_void_p]
        )
        self.threads = threads
        self.pointer: int = create(threads)  # a dw::Pool*, valid while this object lives
        self._close = release_with(self, destroy, self.pointer)

    def parallel_for(self, tasks: int, run: ctypes._CFunctionType) -> None:
        """``run(None, task, thread)`` for each task; ``run`` is a `TASK`. For tests: Python tasks run one at a time."""
        self._parallel_for(self.pointer, tasks, run, None)

    def close(self) -> None:
        """End the threads. Nothing may use the pool afterwards."""
        self._close()

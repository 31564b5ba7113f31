"""Memory for caches. Weights get theirs from the native library (``csrc/memory.h``), which caches do not need."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes. A page of 4 KiB holds four tokens of a small model's layer: processors then look up where pages lie nearly as
often as they read."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [*shape], on a CPU under Linux on large pages where the system has some.

    There the system hands out a page of zeros when it is first written to: a start need not wait for all of a cache,
    and who never fills it does not pay for it. What is more than half of the free memory is written at once, so that a
    lack shows at the start.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or nbytes < LARGE_PAGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # and unmapped with it
    wish_large_pages(tensor.data_ptr(), nbytes)
    if nbytes > _free_memory() // 2:
        tensor.zero_()
    return tensor.view(dtype).view(tuple(shape))


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def wish_large_pages(begin: int, size: int) -> None:
    """Ask for large pages for what lies wholly in ``size`` bytes from address ``begin``, before they are written to. A
    refusal costs speed only."""
    first = -(-begin // LARGE_PAGE) * LARGE_PAGE
    last = (begin + size) // LARGE_PAGE * LARGE_PAGE
    advise = _madvise()
    if advise is not None and first < last:
        advise(first, last - first, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function

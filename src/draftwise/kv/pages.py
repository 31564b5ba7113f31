"""Memory for caches. Weights get theirs from the native library (``csrc/memory.h``), which caches do not need."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes. A page of 4 KiB holds four tokens of a small model's layer: processors then look up where pages lie nearly as
often as they read."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [*shape], on a CPU under Linux on large pages where the system has some."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu":
        wish_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor.zero_()


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

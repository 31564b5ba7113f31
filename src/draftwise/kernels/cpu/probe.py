"""Measures this machine's peaks: read bandwidth and arithmetic, with loops that do nothing else."""

from __future__ import annotations

import ctypes
import time

from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool

ARITHMETIC = {"float32": 0, "bfloat16": 1, "int8": 2}


class Probe:
    """Measures with the threads of a pool, on the instruction set in use."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._read = library.function(
            "dw_probe_read", ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        )
        self._arithmetic = library.function(
            "dw_probe_arithmetic", ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
        )
        self._data = library.function("dw_linear_data", ctypes.c_void_p, [ctypes.c_void_p])

    def read_weights(self, weights: list[NativeLinear]) -> float:
        """Bytes per second of reading these packed weights, one after the other."""
        start = time.perf_counter()
        for weight in weights:
            self._read(self._pool.pointer, self._data(weight.pointer), weight.bytes)
        return sum(weight.bytes for weight in weights) / (time.perf_counter() - start)

    def arithmetic(self, kind: str, rounds: int = 300_000) -> float:
        """Operations per second (a product with a sum is two) on all threads; ``kind`` from `ARITHMETIC`."""
        start = time.perf_counter()
        operations: int = self._arithmetic(self._pool.pointer, ARITHMETIC[kind], rounds)
        return operations / (time.perf_counter() - start)

"""Ranks on CPUs: sums and rows go through memory that those of one machine have mapped, and through sockets between
machines (``csrc/ranks.h``, ``csrc/links.h``)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.additions import Additions, AdditionSite
from draftwise.kernels.cpu.adapters import NativeAdditions
from draftwise.kernels.cpu.attention import DTYPES, address
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.quantized import QuantizedOps
from draftwise.kernels.cpu.recording import recording_of
from draftwise.kernels.cpu.tape import Symbol
from draftwise.kernels.ranks import Part, Ranks, padded_bytes, vocabulary_step
from draftwise.kernels.split import SplitOps

_PTR, _INT, _I64, _F64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double

PIECE = 1 << 20
"""Bytes that a rank gives in one exchange; more go in several."""


def shared_bytes(size: int) -> int:
    """Bytes of the memory that ``size`` ranks share: a counter for each, one more, and two slots for each."""
    return (size + 1) * 64 + 2 * size * PIECE


class SharedRanks(Ranks):
    """Ranks that have mapped the same memory, which was zeroed before anybody began, or hold sockets to each other."""

    def __init__(
        self,
        library: NativeLibrary,
        memory: mmap.mmap,
        part: Part,
        seconds: float,
        sockets: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            memory: of `shared_bytes`, the same for all ranks of a machine.
            seconds: that a rank waits for another before it raises OSError.
            sockets: by rank, file descriptors of connected stream sockets to those on other machines, -1 for the
                others; they stay open as long as this is used. None: all are on this machine.
        """
        super().__init__(part)
        require(len(memory) >= shared_bytes(part.size), "memory for all ranks")
        require(sockets is None or len(sockets) == part.size, "a socket, or -1, for each rank")
        create = library.function("dw_ranks_create", _PTR, [_PTR, _I64, _I64, _I64, _F64, _PTR])
        free = library.function("dw_ranks_free", None, [_PTR])
        self._sum = library.function("dw_ranks_sum", None, [_PTR, _INT, _PTR, _I64])
        self._gather = library.function("dw_ranks_gather", None, [_PTR, _PTR, _I64, _I64, _PTR, _I64])
        self._share = library.function("dw_ranks_share", None, [_PTR, _PTR, _I64, _PTR])
        self._memory = np.frombuffer(memory, np.uint8)  # keeps it mapped
        links = None if sockets is None else np.array(sockets, np.int32)
        at = None if links is None else address(links)
        self.pointer: int = create(address(self._memory), part.size, part.rank, PIECE, seconds, at)
        release_with(self, free, self.pointer)

    def sum(self, x: Tensor) -> Tensor:
        require(x.is_contiguous() and x.dtype in DTYPES and x.device.type == "cpu", "dense rows of floats")
        self._sum(self.pointer, DTYPES[x.dtype], x.data_ptr(), x.numel())
        return x

    def gather(self, x: Tensor, total: int, out: Tensor | None = None) -> Tensor:
        step, rows = vocabulary_step(total, self.part.size), x.shape[0]
        own = max(0, min(step, total - self.part.rank * step))
        require(x.dtype is torch.float32 and x.shape == (rows, own), "this rank's columns, float32")
        x = x.contiguous()
        result = x.new_empty((rows, total)) if out is None else out
        require(
            result.shape == (rows, total) and result.is_contiguous() and result.dtype is torch.float32,
            "dense rows of all columns",
        )
        self._gather(self.pointer, x.data_ptr(), step, total, result.data_ptr(), rows)
        return result

    def share(self, data: bytes) -> list[bytes]:
        size = self.part.size
        own, sizes = np.array([len(data)], np.int64), np.empty(size, np.int64)
        self._share(self.pointer, address(own), 8, address(sizes))
        most = int(sizes.max())
        mine, found = padded_bytes(data, most), np.empty((size, most), np.uint8)
        self._share(self.pointer, address(mine), most, address(found))
        return [found[r, : sizes[r]].tobytes() for r in range(size)]


class SplitNativeOps(SplitOps, NativeOps):
    """`NativeOps` of one rank of several."""

    def pack_additions(self, sites: Sequence[AdditionSite]) -> Additions | None:
        return NativeAdditions(self.library, sites, self._dtype, self.pack_exact, self.ranks)

    def sum_ranks(self, x: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).sum_ranks(x, self.ranks)
        return super().sum_ranks(x)

    def gather_ranks(self, x: Tensor, total: int, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).gather_ranks(x, total, self.ranks)
        return super().gather_ranks(x, total, out)

    def part_rows(self, token_ids: Tensor, table: Tensor, first: int) -> Tensor:
        if isinstance(token_ids, Symbol):
            return recording_of(token_ids).gather_part(token_ids, table, first)
        return super().part_rows(token_ids, table, first)


class SplitQuantizedOps(SplitNativeOps, QuantizedOps):
    """`QuantizedOps` of one rank of several."""

"""The rows of a ragged batch in one native call (``csrc/columns.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from operator import add

import numpy as np
import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, native_library
from draftwise.types import IntArray

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


_FEW = 512


class RowPacker:
    """Makes tensors of what is known of R requests side by side; see `models.inputs.pack_rows`.

    ``reuses``: the tensors of up to 512 rows are those of the last call that had as many, overwritten. Making them is
    what takes longest: behind a pass, which leaves the caches full of weights, 30 to 70 us.
    """

    def __init__(self, library: NativeLibrary, *, reuses: bool = False) -> None:
        self._few: dict[int, tuple[tuple[Tensor, Tensor, Tensor], int]] | None = {} if reuses else None
        self._pack: Callable[..., None] = library.function(
            "dw_pack_rows", None, [_I64, _I64, _I64, _PTR, _PTR, _I64, _PTR, _PTR]
        )

    def pack(
        self,
        tokens: Sequence[int],
        starts: Sequence[int],
        first: Sequence[int],
        widths: Sequence[int],
        places: Sequence[int],
        blocks_np: IntArray,
        block_size: int,
        offset: int,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], IntArray, IntArray]:
        """Tokens, positions and slots, int64 [T] each; block tables int32 [R, widest]; starts int32 [R + 1].

        Args:
            tokens: [T].
            starts: [R + 1] first row of each request, and T.
            first: [R] key of each request's first row.
            widths: [R] blocks of each request.
            places: [R] where they begin in ``blocks_np``.
            blocks_np: [n] block ids.
            block_size: tokens of a block.
            offset: of positions from keys.
        """
        count, width = len(first), max(widths)
        require(
            len(starts) == count + 1
            and len(widths) == count
            and len(places) == count
            and starts[-1] == len(tokens),
            "columns of the same length",
        )
        require(
            min(places) >= 0
            and max(map(add, places, widths)) <= len(blocks_np)
            and blocks_np.dtype == np.int32
            and blocks_np.flags.c_contiguous,
            "block ids in int32, side by side",
        )
        columns = array("i", [*starts, *first, *widths, *places, *tokens])
        rows, rows_at = self._rows(len(tokens))
        tables: IntArray = np.empty((count, width), np.int32)
        self._pack(
            count,
            block_size,
            offset,
            columns.buffer_info()[0],
            address(blocks_np),
            width,
            rows_at,
            address(tables),
        )
        starts_np: IntArray = np.frombuffer(columns, np.int32, count + 1)
        return rows, tables, starts_np

    def _rows(self, count: int) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """Three tensors [count], one behind the other, and where they begin."""
        few = self._few if count <= _FEW else None
        found = None if few is None else few.get(count)
        if found is None:
            memory = torch.empty((3, count), dtype=torch.int64)
            token_ids, positions, slots = memory.unbind()
            found = (token_ids, positions, slots), memory.data_ptr()
            if few is not None:
                few[count] = found
        return found


def own_packer(device: torch.device) -> RowPacker | None:
    """One that reuses tensors, for whoever is done with a batch before it makes the next one: passes on a CPU. None for
    other devices, and where the native library was not built."""
    library = _library() if device.type == "cpu" else None
    return None if library is None else RowPacker(library, reuses=True)


@functools.cache
def row_packer() -> RowPacker | None:
    """One that does not, for everybody."""
    library = _library()
    return None if library is None else RowPacker(library)


def _library() -> NativeLibrary | None:
    try:
        return native_library()
    except ConfigError:  # of other sources: whoever wants kernels of it says so
        return None

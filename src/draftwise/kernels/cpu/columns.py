"""The rows of a ragged batch in one native call (``csrc/columns.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from operator import add

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import refuse, require
from draftwise.kernels.cpu.library import NativeLibrary, native_library
from draftwise.types import IntArray

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


_FEW = 512
_INT64 = np.dtype(np.int64)


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
        self._pack_spans: Callable[..., None] = library.function(
            "dw_pack_spans", None, [_I64, _I64, _I64, _PTR, _I64, _I64, _PTR, _PTR, _PTR, _PTR]
        )
        self._place_trees: Callable[..., None] = library.function(
            "dw_place_trees", None, [_I64, _PTR, _PTR, _I64, _PTR, _PTR]
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
        rows, rows_at = self.room(len(tokens))
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

    def pack_spans(
        self,
        first: Sequence[int],
        stop: Sequence[int],
        widths: Sequence[int],
        tables_at: Sequence[int],
        tokens_at: Sequence[int],
        block_size: int,
        offset: int,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], IntArray, IntArray, IntArray, int]:
        """`pack` of known tokens, which are said to lie somewhere in memory: what it returns, keys of the requests'
        first rows int32 [R], and the address of the starts. Behind them stand these keys, and then the tables.

        Args:
            first, stop: [R] key of each request's first row, and the key behind its last.
            widths: [R] blocks of each request.
            tables_at: [R] where its block ids (int32) lie.
            tokens_at: [R] where its tokens (int32) lie; that of key 0 first.
            block_size, offset: as in `pack`.
        """
        count, width, total = len(first), max(widths), sum(stop) - sum(first)
        if not len(stop) == len(widths) == len(tables_at) == len(tokens_at) == count:
            refuse("columns of the same length")
        if total < 0 or 0 in tables_at or 0 in tokens_at:
            refuse("tokens and tables that lie somewhere")
        columns = array("q", [*first, *stop, *widths, *tables_at, *tokens_at])
        rows, rows_at = self.room(total)
        numbers: IntArray = np.empty(2 * count + 1 + count * width, np.int32)
        at = address(numbers)
        self._pack_spans(
            count,
            block_size,
            offset,
            columns.buffer_info()[0],
            width,
            total,
            rows_at,
            at + 4 * (2 * count + 1),
            at,
            at + 4 * (count + 1),
        )
        tables: IntArray = numbers[2 * count + 1 :].reshape(count, width)
        return rows, tables, numbers[: count + 1], numbers[count + 1 : 2 * count + 1], at

    def place_trees(
        self,
        roots: Sequence[int],
        trees: Sequence[Sequence[int]],
        positions: Tensor,
        ancestors_np: npt.NDArray[np.uint64],
    ) -> None:
        """Write where the rows of trees look: positions of nodes, and ancestors of roots and nodes.

        Args:
            roots: row of each root, whose position is there.
            trees: parents of the nodes below each, which are the rows behind it.
            positions: [T] int64.
            ancestors_np: [T].
        """
        total = len(ancestors_np)
        require(
            positions.dtype is torch.int64 and positions.shape == (total,) and positions.is_contiguous(),
            "a position for each row, in int64",
        )
        columns = array("q", [*roots, *map(len, trees)])
        parents = array("i", [parent for tree in trees for parent in tree])
        self._place_trees(
            len(trees),
            columns.buffer_info()[0],
            parents.buffer_info()[0],
            total,
            positions.data_ptr(),
            address(ancestors_np),
        )

    def room(self, count: int) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """Three tensors int64 [count], one behind the other, and where they begin."""
        few = self._few if count <= _FEW else None
        found = None if few is None else few.get(count)
        if found is None:
            memory = torch.empty((3, count), dtype=torch.int64)
            token_ids, positions, slots = memory.unbind()
            found = (token_ids, positions, slots), memory.data_ptr()
            if few is not None:
                few[count] = found
        return found


class RowCopies:
    """Copies rows of tensors to places in another, whose numbers lie side by side."""

    def __init__(self, library: NativeLibrary, target: Tensor) -> None:
        """``target`` [N, ...]"""
        require(target.is_contiguous() and target.device.type == "cpu", "a contiguous tensor on the CPU")
        self._copy: Callable[..., None] = library.function(
            "dw_copy_rows", None, [_PTR, _I64, _I64, _PTR, _I64, _I64, _I64, _I64, _PTR, _PTR]
        )
        self._target = target
        self._places = target.data_ptr(), target.shape[0], target.stride(0) * target.element_size()

    def copy(self, source: Tensor, rows_np: npt.NDArray[np.int64], places_np: npt.NDArray[np.int64]) -> None:
        """Row rows_np[i] of ``source`` [n, F] becomes the first F numbers at places_np[i], one after the other."""
        source = source.contiguous()
        rows, width = source.shape
        size = source.element_size()
        if (
            source.dtype is not self._target.dtype
            or width * size > self._places[2]
            or rows_np.shape != places_np.shape
            or not rows_np.dtype == places_np.dtype == _INT64
            or not (rows_np.flags.c_contiguous and places_np.flags.c_contiguous)
        ):
            refuse("rows of one type, and an int64 place for each")
        self._copy(
            *self._places,
            source.data_ptr(),
            rows,
            width * size,
            width * size,
            len(rows_np),
            address(rows_np),
            address(places_np),
        )


def row_copies(target: Tensor) -> RowCopies | None:
    """For tensors on a CPU; None for other devices, and where the native library was not built."""
    library = _library() if target.device.type == "cpu" and target.is_contiguous() else None
    return None if library is None else RowCopies(library, target)


def own_packer(device: torch.device) -> RowPacker | None:
    """One that reuses tensors, for whoever is done with a batch before it makes the next one: passes on a CPU. None for
    other devices, and where the native library was not built."""
    library = _library() if device.type == "cpu" else None
    return None if library is None else RowPacker(library, reuses=True)


@functools.cache
def row_packer() -> RowPacker | None:
    """One that does not, for all callers."""
    library = _library()
    return None if library is None else RowPacker(library)


def _library() -> NativeLibrary | None:
    try:
        return native_library()
    except ConfigError:  # built of other sources: users of its kernels report that
        return None

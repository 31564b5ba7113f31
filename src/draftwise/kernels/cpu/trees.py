"""Draft trees in one native call: the structures of ``csrc/tree.h``, filled from `TreeDraws`."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from draftwise.attention.base import MAX_TREE_ROWS
from draftwise.kernels.cpu.attention import address
from draftwise.types import DraftedTree, IntArray, TreeDraws, TreeShape, new_record

_PTR, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


WISH = struct.Struct("=QQQqIiiiiff4x")
"""``dw::TreeWish``."""
_CONTEXT = 24
"""Where its ``context`` stands, an int64."""


class TreeOutput(ctypes.Structure):
    """``dw::TreeOutput``."""

    _fields_ = (
        ("vocab", _I64),
        ("wishes", ctypes.c_char_p),
        ("tokens", _PTR),
        ("parents", _PTR),
        ("counts", _PTR),
        ("target_ids", _PTR),
        ("key_offset", _I64),
        ("feature_bytes", _I64),
        ("room", _I64),
        ("feature_in", _I32),
        ("feature_out", _I32),
    )


_WORD = (1 << 64) - 1


@functools.lru_cache(maxsize=64)
def _c_shape(shape: TreeShape) -> tuple[IntArray, IntArray, int, int]:
    """Parents and ranks as C has them, and where they lie."""
    parents_np, ranks_np = np.array(shape.parents, np.int32), np.array(shape.ranks, np.int32)
    return parents_np, ranks_np, address(parents_np), address(ranks_np)


@dataclass(slots=True)
class NativeTrees:
    """The output of a call, and everything it points to."""

    wishes: Sequence[TreeDraws]
    output: TreeOutput
    tokens_np: IntArray  # [R, MAX_TREE_ROWS]
    parents_np: IntArray  # [R, MAX_TREE_ROWS]
    counts_np: IntArray  # [R]
    kept: list[object]

    @classmethod
    def make(
        cls, wishes: Sequence[TreeDraws], contexts_np: npt.NDArray[np.integer[Any]], vocab: int
    ) -> NativeTrees:
        """``contexts_np`` [R]: keys before each tree's first node. ``vocab``: width of the logits."""
        count = len(wishes)
        kept: list[object] = []
        alike = count > 1 and wishes.count(wishes[0]) == count
        different = wishes[:1] if alike else wishes
        packed: list[bytes] = []
        room = 0
        last: TreeShape | None = None
        parents_at = ranks_at = nodes = 0
        for scale, noise_scale, seed, sample, shape, top_k, depth, kept_nodes in different:
            seed &= _WORD
            if shape is None:
                packed.append(
                    WISH.pack(0, 0, seed, 0, sample, 0, top_k, depth, kept_nodes, scale, noise_scale)
                )
                room += top_k
                continue
            if shape is not last:  # requests of one drafter mostly share it
                *arrays, parents_at, ranks_at = _c_shape(shape)
                kept += arrays
                last, nodes = shape, len(shape.parents)
            packed.append(
                WISH.pack(parents_at, ranks_at, seed, 0, sample, nodes, 0, 0, 0, scale, noise_scale)
            )
            room += nodes
        if alike:
            packed, room = packed * count, room * count
        all_bytes = bytearray().join(packed)
        own_contexts_np = np.ndarray((count,), np.int64, all_bytes, _CONTEXT, (WISH.size,))
        own_contexts_np[:] = contexts_np
        tokens_np = np.empty((count, MAX_TREE_ROWS), np.int32)
        parents_np = np.empty((count, MAX_TREE_ROWS), np.int32)
        counts_np = np.zeros(count, np.int32)
        output = TreeOutput(
            vocab, bytes(all_bytes), address(tokens_np), address(parents_np), address(counts_np)
        )
        output.room = room
        output.feature_in = output.feature_out = -1
        return cls(wishes, output, tokens_np, parents_np, counts_np, kept)

    def result(self) -> DraftedForest:
        """One tree per request."""
        shapes = [wish.shape for wish in self.wishes]
        return DraftedForest(self.tokens_np, self.parents_np, self.counts_np, shapes)


class DraftedForest(Sequence[DraftedTree]):
    """Trees of R requests side by side: ``tokens_np``, ``parents_np`` int32 [R, most], ``counts_np`` int32 [R]: nodes
    of each."""

    __slots__ = ("_shapes", "counts_np", "parents_np", "tokens_np")

    def __init__(
        self,
        tokens_np: IntArray,
        parents_np: IntArray,
        counts_np: IntArray,
        shapes: Sequence[TreeShape | None],
    ) -> None:
        """``shapes`` [R]: what the static ones were asked to be."""
        self.tokens_np = tokens_np
        self.parents_np = parents_np
        self.counts_np = counts_np
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._shapes)

    @overload
    def __getitem__(self, place: int) -> DraftedTree: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[DraftedTree]: ...
    def __getitem__(self, place: int | slice) -> DraftedTree | Sequence[DraftedTree]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        shape, size = self._shapes[place], int(self.counts_np[place])
        if shape is not None and size == len(shape.parents):
            above = shape.parents  # all of its nodes, in their order
        else:
            above = tuple(self.parents_np[place, :size].tolist())
        return new_record(DraftedTree, (tuple(self.tokens_np[place, :size].tolist()), above))

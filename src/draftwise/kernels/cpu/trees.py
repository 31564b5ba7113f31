"""Draft trees in one native call: the structures of ``csrc/tree.h``, filled from `TreeDraws`."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwise.attention.base import MAX_TREE_ROWS
from draftwise.kernels.cpu.attention import address
from draftwise.types import DraftedTree, IntArray, TreeDraws, TreeShape, new_record

_PTR, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


WISH = struct.Struct("=QQQqIiiiiff4x")
"""``dw::TreeWish``."""


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
    def make(cls, wishes: Sequence[TreeDraws], contexts: Sequence[int], vocab: int) -> NativeTrees:
        """``contexts``: keys before each tree's first node. ``vocab``: width of the logits."""
        count = len(wishes)
        kept: list[object] = []
        packed: list[bytes] = []
        room = 0
        last: TreeShape | None = None
        parents_at = ranks_at = nodes = 0
        for (scale, noise_scale, seed, sample, shape, top_k, depth, kept_nodes), context in zip(
            wishes, contexts, strict=True
        ):
            seed &= _WORD
            if shape is None:
                packed.append(
                    WISH.pack(0, 0, seed, context, sample, 0, top_k, depth, kept_nodes, scale, noise_scale)
                )
                room += top_k
                continue
            if shape is not last:  # requests of one drafter mostly share it
                *arrays, parents_at, ranks_at = _c_shape(shape)
                kept += arrays
                last, nodes = shape, len(shape.parents)
            packed.append(
                WISH.pack(parents_at, ranks_at, seed, context, sample, nodes, 0, 0, 0, scale, noise_scale)
            )
            room += nodes
        tokens_np = np.empty((count, MAX_TREE_ROWS), np.int32)
        parents_np = np.empty((count, MAX_TREE_ROWS), np.int32)
        counts_np = np.zeros(count, np.int32)
        output = TreeOutput(
            vocab, b"".join(packed), address(tokens_np), address(parents_np), address(counts_np)
        )
        output.room = room
        output.feature_in = output.feature_out = -1
        return cls(wishes, output, tokens_np, parents_np, counts_np, kept)

    def result(self) -> list[DraftedTree]:
        """One tree per request."""
        counts: list[int] = self.counts_np.tolist()
        widest = max(counts)
        parents: list[list[int]] | None = None
        out = []
        for r, (wish, own, size) in enumerate(
            zip(self.wishes, self.tokens_np[:, :widest].tolist(), counts, strict=True)
        ):
            shape = wish.shape
            if shape is not None and size == len(shape.parents):
                above = shape.parents  # all of its nodes, in their order
            else:
                if parents is None:
                    parents = self.parents_np[:, :widest].tolist()
                above = tuple(parents[r][:size])
            out.append(new_record(DraftedTree, (tuple(own[:size]), above)))
        return out

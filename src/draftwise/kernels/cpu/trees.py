"""Draft trees in one native call: the structures of ``csrc/tree.h``, filled from `TreeDraws`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwise.attention.base import MAX_TREE_ROWS
from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import require
from draftwise.types import DraftedTree, IntArray, TreeDraws

_PTR, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class TreeWish(ctypes.Structure):
    """``dw::TreeWish``."""

    _fields_ = (
        ("shape_parents", _PTR),
        ("shape_ranks", _PTR),
        ("noise", _PTR),
        ("context", _I64),
        ("shape_nodes", _I32),
        ("top_k", _I32),
        ("depth", _I32),
        ("nodes", _I32),
        ("scale", _F32),
        ("noise_scale", _F32),
    )


class TreeOutput(ctypes.Structure):
    """``dw::TreeOutput``."""

    _fields_ = (
        ("vocab", _I64),
        ("wishes", _PTR),
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


@dataclass(slots=True)
class NativeTrees:
    """The output of a call, and everything it points to."""

    output: TreeOutput
    tokens_np: IntArray  # [R, MAX_TREE_ROWS]
    parents_np: IntArray  # [R, MAX_TREE_ROWS]
    counts_np: IntArray  # [R]
    kept: list[object]

    @classmethod
    def make(cls, wishes: Sequence[TreeDraws], contexts: Sequence[int], vocab: int) -> NativeTrees:
        """``contexts``: keys before each tree's first node. ``vocab``: width of the logits."""
        count = len(wishes)
        array = (TreeWish * count)()
        kept: list[object] = [array]
        room = 0
        for out, wish, context in zip(array, wishes, contexts, strict=True):
            out.context, out.scale, out.noise_scale = context, wish.scale, wish.noise_scale
            if wish.noise is not None:
                require(
                    wish.noise.dtype is torch.float32
                    and wish.noise.is_contiguous()
                    and wish.noise.shape[1] == vocab,
                    "float32 noise for each token",
                )
                out.noise = wish.noise.data_ptr()
                kept.append(wish.noise)
            if wish.shape is not None:
                parents_np = np.array(wish.shape.parents, np.int32)
                ranks_np = np.array(wish.shape.ranks, np.int32)
                out.shape_nodes = len(parents_np)
                out.shape_parents, out.shape_ranks = address(parents_np), address(ranks_np)
                kept += [parents_np, ranks_np]
                room += len(parents_np)
            else:
                out.top_k, out.depth, out.nodes = wish.top_k, wish.depth, wish.nodes
                room += wish.top_k
        tokens_np = np.empty((count, MAX_TREE_ROWS), np.int32)
        parents_np = np.empty((count, MAX_TREE_ROWS), np.int32)
        counts_np = np.zeros(count, np.int32)
        output = TreeOutput(
            vocab, ctypes.addressof(array), address(tokens_np), address(parents_np), address(counts_np)
        )
        output.room = room
        output.feature_in = output.feature_out = -1
        return cls(output, tokens_np, parents_np, counts_np, kept)

    def result(self) -> list[DraftedTree]:
        """One tree per request."""
        out = []
        for tokens_np, parents_np, count in zip(
            self.tokens_np, self.parents_np, self.counts_np.tolist(), strict=True
        ):
            out.append(DraftedTree(tuple(tokens_np[:count].tolist()), tuple(parents_np[:count].tolist())))
        return out

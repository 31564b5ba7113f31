"""Draws of chains on the native library (``csrc/draws.cpp``), and their keys as it reads them."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.names import DRAFT, SHARED
from draftwise.types import ChainDraws

_I64, _I32, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p

_CHAIN_KEY = struct.Struct("=QIiiffid")
"""``dw::ChainKey`` of ``csrc/sample.h``."""
_WORD = (1 << 64) - 1
STREAMS = {"shared": SHARED, "draft": DRAFT}


def pack_keys(draws: ChainDraws) -> bytes:
    """The keys of the requests, one after the other."""
    return b"".join([_CHAIN_KEY.pack(key[0] & _WORD, *key[1:]) for key in draws.keys])


class DrawKernels:
    """The C function of ``csrc/draws.cpp`` with a pool of threads."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._draw = library.function(
            "dw_draw_chains",
            None,
            [_PTR, _PTR, _I64, _I64, _I64, ctypes.c_char_p, _I32, _PTR, _PTR, _PTR],
        )

    def chains(
        self, logits: Tensor, draws: ChainDraws, target_ids: Tensor | None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """See `Ops.draw_chains`."""
        steps, requests, vocab = logits.shape
        require(logits.dtype is torch.float32 and logits.is_contiguous(), "dense float32 logits")
        require(len(draws.keys) == requests, "a key per request")
        require(
            target_ids is None or (target_ids.dtype is torch.int64 and target_ids.shape == (vocab,)),
            "an int64 id for each that can be drawn",
        )
        tokens = np.empty((requests, steps), np.int64)
        q = logits.new_empty((requests, steps, vocab)) if draws.stream == "draft" else None
        self._draw(
            self._pool.pointer,
            logits.data_ptr(),
            steps,
            requests,
            vocab,
            pack_keys(draws),
            STREAMS[draws.stream],
            None if target_ids is None else target_ids.data_ptr(),
            tokens.ctypes.data,
            None if q is None else q.data_ptr(),
        )
        return tokens, q

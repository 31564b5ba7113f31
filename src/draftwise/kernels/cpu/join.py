"""Hidden states side by side through a layer, in one native call (``csrc/join.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import refuse
from draftwise.kernels.cpu.handles import NativeNorm
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool

_PTR, _I64, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class JoinKernel:
    """See `Ops.join_layers`."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._run = library.function("dw_join", None, [_PTR, _PTR, _PTR, _I64, _I64, _I64, _PTR, _F32, _PTR])

    def run(self, parts: Sequence[Tensor], weight: NativeLinear, norm: NativeNorm | None) -> Tensor:
        """``parts`` [n, H] each, of the layer's type -> [n, outputs]."""
        shape, dtype = parts[0].shape, weight.dtype
        rows, width = shape
        for part in parts:
            if part.shape != shape or part.dtype is not dtype or not part.is_contiguous():
                refuse("rows of one size side by side")
        if norm is not None and norm.weight.numel() != weight.outputs:
            refuse("a norm as wide as the layer's results")
        out = torch.empty((rows, weight.outputs), dtype=dtype)
        self._run(
            self._pool.pointer,
            weight.pointer,
            (_PTR * len(parts))(*[part.data_ptr() for part in parts]),
            len(parts),
            width,
            rows,
            None if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            out.data_ptr(),
        )
        return out

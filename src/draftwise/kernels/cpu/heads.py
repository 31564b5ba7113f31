"""A linear layer for each head on the native library (``csrc/heads.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.handles import Heads

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


class NativeHeads(Heads):
    """``pointer`` is a ``dw::Heads*``, valid while this object lives; it keeps its layers."""

    __slots__ = ("__weakref__", "count", "dtype", "inputs", "layers", "outputs", "pointer")

    def __init__(self, pointer: int, layers: Sequence[NativeLinear]) -> None:
        self.pointer = pointer
        self.layers = tuple(layers)
        self.count = len(layers)
        self.inputs, self.outputs, self.dtype = layers[0].inputs, layers[0].outputs, layers[0].dtype

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


class HeadsKernels:
    """The C functions of ``csrc/heads.h`` with a pool of threads."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._create = library.function("dw_heads_create", _PTR, [_PTR, _I64])
        self._free = library.function("dw_heads_free", None, [_PTR])
        self._run = library.function("dw_heads_run", None, [_PTR, _PTR, _PTR, _I64, _PTR, _I64, _I64])

    def pack(self, layers: Sequence[NativeLinear]) -> NativeHeads:
        """One layer per head, all of one size.

        Raises:
            ValueError: they are not.
        """
        require(len(layers) > 0, "heads")
        pointers = (_PTR * len(layers))(*(layer.pointer for layer in layers))
        pointer = self._create(pointers, len(layers))
        made = NativeHeads(pointer, layers)
        release_with(made, self._free, pointer)
        return made

    def run(self, x: Tensor, weight: NativeHeads, out: Tensor | None = None) -> Tensor:
        """See `Ops.heads`."""
        rows, wide = x.shape[0], weight.count * weight.outputs
        require(
            x.dtype is weight.dtype and x.shape == (rows, weight.count * weight.inputs), "rows of all heads"
        )
        x = x.contiguous()
        result = torch.empty((rows, wide), dtype=x.dtype) if out is None else out
        require(
            result.shape == (rows, wide) and result.dtype is x.dtype and result.is_contiguous(),
            "a result of all heads",
        )
        self._run(self._pool.pointer, weight.pointer, x.data_ptr(), x.shape[1], result.data_ptr(), wide, rows)
        return result

"""Medusa heads on the native library (``csrc/medusa.cpp``): all layers of all heads in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.records import check_record

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64


class MedusaRecord(ctypes.Structure):
    """``dw::MedusaLayers``."""

    _fields_ = (
        ("first", _PTR),
        ("later", _PTR),
        ("outputs", _PTR),
        ("heads", _I64),
        ("layers", _I64),
        ("num_outputs", _I64),
    )


class NativeMedusa:
    """The layers of some heads. ``record`` is valid while this object lives; it keeps its layers."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ThreadPool,
        first: NativeLinear,
        later: Sequence[NativeLinear],
        outputs: Sequence[NativeLinear],
    ) -> None:
        """``first`` [heads * H, H]: the first residual layer of all heads; ``later``: those behind it, head by head;
        ``outputs`` [Vd, H]: of each head, or one of all.

        Raises:
            ValueError: they do not fit each other.
        """
        check_record(library, "MedusaLayers", MedusaRecord)
        self._run = library.function("dw_medusa_logits", None, [_PTR, _PTR, _PTR, _I64, _I64, _PTR])
        self._pool = pool
        self._layers = (first, tuple(later), tuple(outputs))
        self.inputs, self.dtype, self.vocab_size = first.inputs, first.dtype, outputs[0].outputs
        self.num_heads = first.outputs // first.inputs
        require(len(later) % self.num_heads == 0, "as many residual layers of each head")
        self._later = (_PTR * max(len(later), 1))(*[layer.pointer for layer in later])
        self._outputs = (_PTR * len(outputs))(*[layer.pointer for layer in outputs])
        self.record = MedusaRecord(
            first.pointer,
            ctypes.addressof(self._later),
            ctypes.addressof(self._outputs),
            self.num_heads,
            1 + len(later) // self.num_heads,
            len(outputs),
        )

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """``hidden`` [R, H] -> [count, R, Vd] float32, of the first ``count`` heads."""
        require(
            hidden.dtype is self.dtype and hidden.shape[1] == self.inputs, "hidden states of the heads' size"
        )
        hidden = hidden.contiguous()
        rows = hidden.shape[0]
        out = torch.empty((count, rows, self.vocab_size), dtype=torch.float32)
        self._run(
            self._pool.pointer, ctypes.byref(self.record), hidden.data_ptr(), rows, count, out.data_ptr()
        )
        return out

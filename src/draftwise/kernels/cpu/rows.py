"""Norms, rotations and other work row by row on the native library (``csrc/ops.h``)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.kernels.base import FUNCTIONS, HeadShape
from draftwise.kernels.cpu.attention import DTYPES, KV_DTYPES, check_rotated, is_latent, kv_parts
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.handles import NativeNorm, RopeCall, norms_of, result_of
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.handles import LayerNorm, Norm

_PTR, _INT, _I64, _F32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class RowKernels:
    """The C functions of ``csrc/ops.h`` with a pool of threads, for a model of one dtype.

    Methods take and return what those of `Ops` with the same names do. They raise ValueError for
    tensors that do not fit.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool, dtype: torch.dtype) -> None:
        self._pool = pool
        self._dtype = dtype
        self._code = DTYPES[dtype]
        rows = [_PTR, _PTR, _F32, _PTR, _I64, _I64]
        self._rms_norm = library.function("dw_rms_norm", None, [_PTR, _INT, *rows])
        self._add_rms_norm = library.function(
            "dw_add_rms_norm", None, [_PTR, _INT, _PTR, _PTR, _PTR, _F32, _PTR, _I64, _I64]
        )
        self._silu_mul = library.function("dw_silu_mul", None, [_PTR, _INT, _PTR, _PTR, _I64, _I64])
        self._rope_write = library.function("dw_rope_write", None, [_PTR, _INT, ctypes.POINTER(RopeCall)])
        self._scale_rows = library.function("dw_scale_rows", None, [_PTR, _INT, _PTR, _F32, _I64, _I64])
        self._unary = library.function("dw_unary_rows", None, [_PTR, _INT, _INT, _PTR, _PTR, _I64, _I64])
        self._mul = library.function("dw_mul_rows", None, [_PTR, _INT, _PTR, _PTR, _PTR, _I64, _I64])
        self._layer_norm = library.function(
            "dw_layer_norm_rows", None, [_PTR, _INT, _PTR, _PTR, _PTR, _F32, _PTR, _I64, _I64]
        )
        self._softcap_rows = library.function("dw_softcap_rows", None, [_PTR, _PTR, _F32, _I64, _I64])
        self._gather = library.function("dw_gather_rows", None, [_PTR, _I64, _PTR, _PTR, _I64, _I64])

    def gather(self, table: Tensor, index: Tensor, out: Tensor | None) -> Tensor:
        """Rows ``index`` [T] int64 of ``table`` [N, ...], as they are: [T, ...]."""
        require(table.is_contiguous() and index.dtype is torch.int64, "a contiguous table and int64 ids")
        count = index.shape[0]
        result = result_of(out, (count, *table.shape[1:]), table.dtype)
        row_bytes = table.stride(0) * table.element_size()
        ids = index.contiguous()
        self._gather(table.data_ptr(), table.shape[0], ids.data_ptr(), result.data_ptr(), count, row_bytes)
        return result

    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, NativeNorm)
        require(
            x.dtype is self._dtype and norm.weight.numel() == x.shape[-1],
            "rows of the model's type, as wide as the norm",
        )
        x = x.contiguous()
        result = result_of(out, x.shape, x.dtype)
        width = x.shape[-1]
        rows = x.numel() // width
        self._rms_norm(
            self._pool.pointer,
            self._code,
            x.data_ptr(),
            norm.weight.data_ptr(),
            norm.eps,
            result.data_ptr(),
            rows,
            width,
        )
        return result

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, NativeNorm)
        require(
            x.dtype is residual.dtype is self._dtype
            and residual.is_contiguous()
            and residual.shape == x.shape,
            "rows and a residual of one shape, of the model's type",
        )
        require(x.ndim == 2 and norm.weight.numel() == x.shape[1], "rows as wide as the norm")
        x = x.contiguous()
        result = result_of(out, x.shape, x.dtype)
        self._add_rms_norm(
            self._pool.pointer,
            self._code,
            x.data_ptr(),
            residual.data_ptr(),
            norm.weight.data_ptr(),
            norm.eps,
            result.data_ptr(),
            *x.shape,
        )
        return result

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, LayerNorm)
        require(x.dtype is self._dtype and x.ndim == 2, "rows of the model's type")
        require(norm.weight.numel() == x.shape[-1], "rows as wide as the norm")
        x = x.contiguous()
        out = torch.empty_like(x)
        bias = None if norm.bias is None else norm.bias.data_ptr()
        self._layer_norm(
            self._pool.pointer,
            self._code,
            x.data_ptr(),
            norm.weight.data_ptr(),
            bias,
            norm.eps,
            out.data_ptr(),
            *x.shape,
        )
        return out

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        require(gate_up.dtype is self._dtype and gate_up.ndim == 2, "rows of the model's type")
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = result_of(out, (rows, size), gate_up.dtype)
        self._silu_mul(self._pool.pointer, self._code, gate_up.data_ptr(), result.data_ptr(), rows, size)
        return result

    def scale(self, x: Tensor, factor: float) -> Tensor:
        require(x.dtype in (self._dtype, torch.float32), "rows of the model's type, or float32")
        require(x.is_contiguous() and x.ndim == 2, "rows side by side")
        self._scale_rows(self._pool.pointer, DTYPES[x.dtype], x.data_ptr(), factor, *x.shape)
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        require(x.dtype is torch.float32 and x.is_contiguous() and x.ndim == 2, "rows of float32")
        self._softcap_rows(self._pool.pointer, x.data_ptr(), cap, *x.shape)
        return x

    def unary(self, x: Tensor, function: str) -> Tensor:
        require(
            x.dtype in (self._dtype, torch.float32) and x.ndim == 2, "rows of the model's type, or float32"
        )
        x = x.contiguous()
        out = torch.empty_like(x)
        code = list(FUNCTIONS).index(function)
        self._unary(self._pool.pointer, DTYPES[x.dtype], code, x.data_ptr(), out.data_ptr(), *x.shape)
        return out

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        require(
            x.dtype is y.dtype is self._dtype and x.shape == y.shape and x.ndim == 2,
            "rows of one shape and type",
        )
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        self._mul(self._pool.pointer, self._code, x.data_ptr(), y.data_ptr(), out.data_ptr(), *x.shape)
        return out

    def qkv_rope_write(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope_rows: Tensor,
        kv: tuple[Tensor, ...],
        slots: Tensor,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        entries, scales = kv_parts(kv)
        q_weight, k_weight, eps = norms_of(q_norm, k_norm)
        num_q, num_kv, dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        rows, width = qkv.shape
        require(qkv.dtype is self._dtype and qkv.is_contiguous(), "rows of the model's type, side by side")
        check_rotated(dim)
        require(width == (num_q + entries.shape[1]) * dim, "rows and a cache of the same heads")
        latent = is_latent(entries, num_kv, dim)
        require(
            rope_rows.dtype is torch.float32
            and rope_rows.is_contiguous()
            and rope_rows.numel() == rows * dim,
            "a float32 rotation for each row",
        )
        require(slots.dtype is torch.int64 and slots.shape == (rows,), "an int64 slot for each row")
        for weight in (q_weight, k_weight):
            require(weight is None or weight.numel() == dim, "norms as wide as a head")
        slots = slots.contiguous()
        call = RopeCall(
            qkv.data_ptr(),
            rope_rows.data_ptr(),
            slots.data_ptr(),
            entries.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            eps,
            qkv.shape[0],
            num_q,
            num_kv,
            dim,
            KV_DTYPES[entries.dtype],
            entries.shape[0],
            latent,
        )
        self._rope_write(self._pool.pointer, self._code, call)
        queries = qkv.view(-1, num_q + entries.shape[1], dim).narrow(1, 0, num_q)
        return queries if out is None else out.copy_(queries)

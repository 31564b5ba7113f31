"""`Ops` on the native library: every row computes in one fixed order, whatever else is in the batch.

Each operation runs at once on tensors, or, given `Symbol`s, is recorded into the program they belong to (see
`draftwise.kernels.cpu.recording`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.base import FUNCTIONS, Experts, Heads, HeadShape, LayerNorm, Linear, Norm, Ops, Rope
from draftwise.kernels.cpu.attention import DTYPES, KV_DTYPES, NativeAttention, is_latent, kv_parts
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.experts import ExpertsKernels, NativeExperts
from draftwise.kernels.cpu.handles import NativeNorm, NativeRope, RopeCall, norm_parts, result_of
from draftwise.kernels.cpu.heads import HeadsKernels, NativeHeads
from draftwise.kernels.cpu.join import JoinKernel
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import DoubledLinear, LinearKernels, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.recording import recording_of
from draftwise.kernels.cpu.tape import Symbol
from draftwise.kernels.routing import Activation, Routing
from draftwise.quantization.weights import QuantizedWeight
from draftwise.types import AttentionBatch

_PTR, _INT, _I64, _F32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class NativeOps(Ops):
    """Native kernels for float32 and bfloat16 models.

    Differences from plain torch, all towards more precision: norms round once (not before the weight as well),
    rotations are float32, logits are not rounded to the model's dtype.
    """

    def __init__(self, library: NativeLibrary, pool: ThreadPool, dtype: torch.dtype) -> None:
        require(dtype in DTYPES, "float32 or bfloat16")
        self.library = library
        self.pool = pool
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._device = torch.device("cpu")
        self._linear = LinearKernels(library, pool)
        self._attention = NativeAttention(library, pool)
        self._experts = ExpertsKernels(library, pool)
        self._heads = HeadsKernels(library, pool)
        self._join = JoinKernel(library, pool)
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

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    # ------------------------------------------------------------------------------------ weights, at load

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._linear.pack(weight, bias)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._linear.pack(weight, bias, paired=True)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, dynamic: bool, paired: bool = False
    ) -> Linear:
        if weight.levels is not None:  # rows stay as they are: there is no product of such codes with bytes
            dynamic = False
        if not weight.is_codes or (self._dtype is torch.float32 and not dynamic):
            return super().pack_quantized(weight, bias, dynamic=dynamic, paired=paired)
        if weight.levels is not None and not weight.is_exact_in_halves:
            return super().pack_quantized(weight, bias, dynamic=dynamic, paired=paired)
        if weight.is_wide:
            inner = self._linear.pack_quantized(
                weight.doubled(), bias, dynamic=dynamic, dtype=self._dtype, paired=paired
            )
            return DoubledLinear(inner)
        return self._linear.pack_quantized(weight, bias, dynamic=dynamic, dtype=self._dtype, paired=paired)

    def release_freed(self) -> None:
        self._linear.release()

    def pack_experts(
        self,
        layers: Sequence[tuple[Linear, Linear]],
        routing: Routing,
        correction: Tensor | None = None,
    ) -> Experts:
        return self._experts.pack(layers, routing, correction)

    def pack_norm(self, weight: Tensor, eps: float) -> Norm:
        return NativeNorm(weight.float().contiguous(), eps)

    def pack_rope(self, inv_freq: Tensor, scaling: float | Tensor, num_positions: int) -> Rope:
        half = inv_freq.shape[0]
        table = torch.empty((num_positions, 2, half), dtype=torch.float32)
        for start in range(0, num_positions, 4096):
            end = min(start + 4096, num_positions)
            angles = torch.arange(start, end, dtype=torch.float32)[:, None] * inv_freq
            table[start:end, 0] = angles.cos() * scaling
            table[start:end, 1] = angles.sin() * scaling
        return NativeRope(table)

    # ---------------------------------------------------------------------------------------- row by row

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(token_ids, Symbol):
            return recording_of(token_ids).gather(token_ids, table)
        return self._rows_of(table, token_ids, out)

    def _rows_of(self, table: Tensor, index: Tensor, out: Tensor | None) -> Tensor:
        require(table.is_contiguous() and index.dtype is torch.int64, "a contiguous table and int64 ids")
        count = index.shape[0]
        result = result_of(out, (count, *table.shape[1:]), table.dtype)
        row_bytes = table.stride(0) * table.element_size()
        ids = index.contiguous()
        self._gather(table.data_ptr(), table.shape[0], ids.data_ptr(), result.data_ptr(), count, row_bytes)
        return result

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        if isinstance(weight, DoubledLinear):
            return self.linear(self.concat(x, x), weight.inner, out)
        assert isinstance(weight, NativeLinear)
        if isinstance(x, Symbol):
            return recording_of(x).linear(x, weight)
        return self._linear.run(x, weight, out)

    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, NativeNorm)
        if isinstance(x, Symbol):
            return recording_of(x).rms_norm(x, norm.weight, norm.eps)
        require(
            x.dtype is self._dtype and norm.weight.numel() == x.shape[-1],
            "rows of the model's type, as wide as the norm",
        )
        x = x.contiguous()
        result = result_of(out, x.shape, x.dtype)
        width = x.shape[-1]
        rows = x.numel() // width
        self._rms_norm(
            self.pool.pointer,
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
        if isinstance(x, Symbol):
            return recording_of(x).add_rms_norm(x, residual, norm.weight, norm.eps)
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
            self.pool.pointer,
            self._code,
            x.data_ptr(),
            residual.data_ptr(),
            norm.weight.data_ptr(),
            norm.eps,
            result.data_ptr(),
            *x.shape,
        )
        return result

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(gate_up, Symbol):
            return recording_of(gate_up).silu_mul(gate_up)
        require(gate_up.dtype is self._dtype and gate_up.ndim == 2, "rows of the model's type")
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = result_of(out, (rows, size), gate_up.dtype)
        self._silu_mul(self.pool.pointer, self._code, gate_up.data_ptr(), result.data_ptr(), rows, size)
        return result

    def pack_heads(self, weight: Tensor) -> Heads:
        return self._heads.pack([self._linear.pack(one) for one in weight])

    def heads(self, x: Tensor, weight: Heads, out: Tensor | None = None) -> Tensor:
        assert isinstance(weight, NativeHeads)
        if isinstance(x, Symbol):
            return recording_of(x).heads(x, weight)
        return self._heads.run(x, weight, out)

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).columns(x, start, count)
        return super().columns(x, start, count)

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        if isinstance(gate_up, Symbol):
            return recording_of(gate_up).gated(gate_up, activation)
        require(gate_up.dtype is self._dtype, "rows of the model's type")
        return self._experts.gated(gate_up, activation, out)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).scale(x, factor)
        require(x.dtype in (self._dtype, torch.float32), "rows of the model's type, or float32")
        require(x.is_contiguous() and x.ndim == 2, "rows side by side")
        self._scale_rows(self.pool.pointer, DTYPES[x.dtype], x.data_ptr(), factor, *x.shape)
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).softcap(x, cap)
        require(x.dtype is torch.float32 and x.is_contiguous() and x.ndim == 2, "rows of float32")
        self._softcap_rows(self.pool.pointer, x.data_ptr(), cap, *x.shape)
        return x

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, LayerNorm)
        if isinstance(x, Symbol):
            return recording_of(x).layer_norm(x, norm.weight, norm.bias, norm.eps)
        require(x.dtype is self._dtype and x.ndim == 2, "rows of the model's type")
        require(norm.weight.numel() == x.shape[-1], "rows as wide as the norm")
        x = x.contiguous()
        out = torch.empty_like(x)
        bias = None if norm.bias is None else norm.bias.data_ptr()
        self._layer_norm(
            self.pool.pointer,
            self._code,
            x.data_ptr(),
            norm.weight.data_ptr(),
            bias,
            norm.eps,
            out.data_ptr(),
            *x.shape,
        )
        return out

    def unary(self, x: Tensor, function: str) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).unary(x, function)
        require(
            x.dtype in (self._dtype, torch.float32) and x.ndim == 2, "rows of the model's type, or float32"
        )
        x = x.contiguous()
        out = torch.empty_like(x)
        code = list(FUNCTIONS).index(function)
        self._unary(self.pool.pointer, DTYPES[x.dtype], code, x.data_ptr(), out.data_ptr(), *x.shape)
        return out

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).mul(x, y)
        require(
            x.dtype is y.dtype is self._dtype and x.shape == y.shape and x.ndim == 2,
            "rows of one shape and type",
        )
        x, y = x.contiguous(), y.contiguous()
        out = torch.empty_like(x)
        self._mul(self.pool.pointer, self._code, x.data_ptr(), y.data_ptr(), out.data_ptr(), *x.shape)
        return out

    def experts(self, x: Tensor, scores: Tensor, experts: Experts, out: Tensor | None = None) -> Tensor:
        assert isinstance(experts, NativeExperts)
        if isinstance(x, Symbol):
            return recording_of(x).experts(x, scores, experts)
        return self._experts.run(x, *self._experts.route(scores, experts), experts, out)

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, out: Tensor | None = None
    ) -> Tensor:
        assert isinstance(experts, NativeExperts)
        return self._experts.run(x, chosen, weights, experts, out)

    def copy(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).copy(x)
        return super().copy(x, out)

    def concat(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).concat(x, y)
        return super().concat(x, y, out)

    def join_layers(self, parts: Sequence[Tensor], weight: Linear, norm: Norm | None = None) -> Tensor:
        if isinstance(weight, NativeLinear) and (norm is None or isinstance(norm, NativeNorm)):
            return self._join.run(parts, weight, norm)
        return super().join_layers(parts, weight, norm)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).add(x, residual)
        return super().add(x, residual)

    def clear_first(self, x: Tensor, positions: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).clear_first(x, positions)
        return super().clear_first(x, positions)

    # ---------------------------------------------------------------------------------------- attention

    def rope_rows(self, rope: Rope, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """``positions`` [T] int64 -> [T, 2, D / 2] float32: cosines, sines."""
        assert isinstance(rope, NativeRope)
        if isinstance(positions, Symbol):
            return recording_of(positions).gather(positions, rope.table)
        return self._rows_of(rope.table, positions, out)

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
        q_weight, q_eps = norm_parts(q_norm)
        k_weight, k_eps = norm_parts(k_norm)
        eps = q_eps if q_norm is not None else k_eps
        require(q_norm is None or k_norm is None or q_eps == k_eps, "one epsilon for both norms")
        if isinstance(qkv, Symbol):
            return recording_of(qkv).qkv_rope_write(qkv, heads, rope_rows, kv, slots, q_weight, k_weight, eps)
        num_q, num_kv, dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        rows, width = qkv.shape
        require(qkv.dtype is self._dtype and qkv.is_contiguous(), "rows of the model's type, side by side")
        require(
            dim % 2 == 0 and dim <= 1024 and width == (num_q + entries.shape[1]) * dim,
            "heads of an even size up to 1024",
        )
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
        self._rope_write(self.pool.pointer, self._code, call)
        queries = qkv.view(-1, num_q + entries.shape[1], dim).narrow(1, 0, num_q)
        return queries if out is None else out.copy_(queries)

    def attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, ...],
        batch: AttentionBatch,
        heads: HeadShape,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        if isinstance(q, Symbol):
            return recording_of(q).attention(q, kv, heads, scale, window, softcap, sinks, whole)
        kv_heads = heads.num_kv_heads
        return self._attention.run(
            q,
            kv,
            batch,
            num_kv_heads=kv_heads,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
            whole=whole,
        )

    # --------------------------------------------------------------------------------------------- logits

    def logits(self, hidden: Tensor, head: Linear, out: Tensor | None = None) -> Tensor:
        assert isinstance(head, NativeLinear)
        if isinstance(hidden, Symbol):
            return recording_of(hidden).linear(hidden, head, dtype=torch.float32)
        return self._linear.run(hidden, head, out, dtype=torch.float32)

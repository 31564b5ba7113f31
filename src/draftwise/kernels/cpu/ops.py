"""`Ops` on the native library: every row computes in one fixed order, whatever else is in the batch.

Each operation runs at once on tensors, or, given `Symbol`s, is recorded into the program they belong to (see
`draftwise.kernels.cpu.recording`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.additions import Additions, AdditionSite
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.cpu.adapters import NativeAdditions
from draftwise.kernels.cpu.attention import DTYPES, MOST_HEAD_DIM, NativeAttention
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.draws import DrawKernels
from draftwise.kernels.cpu.experts import ExpertsKernels, NativeExperts
from draftwise.kernels.cpu.handles import NativeNorm, NativeRope, norms_of
from draftwise.kernels.cpu.heads import HeadsKernels, NativeHeads
from draftwise.kernels.cpu.join import JoinKernel
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.kernels.cpu.linear import DoubledLinear, LinearKernels, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.recording import recording_of
from draftwise.kernels.cpu.rows import RowKernels
from draftwise.kernels.cpu.tape import Symbol
from draftwise.kernels.handles import Experts, Heads, LayerNorm, Linear, Norm, Rope
from draftwise.kernels.routing import Activation, Routing
from draftwise.quantization.weights import NF4, QuantizedWeight
from draftwise.types import AttentionBatch, ChainDraws

_PTR, _INT, _I64, _F32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class NativeOps(Ops):
    """Native kernels for float32 and bfloat16 models.

    Differences from plain torch, all towards more precision: norms round once (not before the weight as well),
    rotations are float32, logits are not rounded to the model's dtype.
    """

    most_head_dim = MOST_HEAD_DIM
    draws_chains = True

    def __init__(self, library: NativeLibrary, pool: ThreadPool, dtype: torch.dtype) -> None:
        require(dtype in DTYPES, "float32 or bfloat16")
        self.library = library
        self.pool = pool
        self._dtype = dtype
        self._device = torch.device("cpu")
        self._linear = LinearKernels(library, pool)
        self._attention = NativeAttention(library, pool)
        self._experts = ExpertsKernels(library, pool)
        self._heads = HeadsKernels(library, pool)
        self._join = JoinKernel(library, pool)
        self._draws = DrawKernels(library, pool)
        self._rows = RowKernels(library, pool, dtype)

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
        if weight.levels == NF4:  # rows stay as they are: there is no product of such codes with bytes
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
        return self._rows.gather(table, token_ids, out)

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
        return self._rows.rms_norm(x, norm, out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, NativeNorm)
        if isinstance(x, Symbol):
            return recording_of(x).add_rms_norm(x, residual, norm.weight, norm.eps)
        return self._rows.add_rms_norm(x, residual, norm, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(gate_up, Symbol):
            return recording_of(gate_up).silu_mul(gate_up)
        return self._rows.silu_mul(gate_up, out)

    def pack_heads(self, weight: Tensor) -> Heads:
        return self._heads.pack([self._linear.pack(one) for one in weight])

    def heads(self, x: Tensor, weight: Heads, out: Tensor | None = None) -> Tensor:
        assert isinstance(weight, NativeHeads)
        if isinstance(x, Symbol):
            return recording_of(x).heads(x, weight)
        return self._heads.run(x, weight, out)

    def draw_chains(
        self, logits: Tensor, draws: ChainDraws, target_ids: Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        return self._draws.chains(logits, draws, target_ids)

    def pack_additions(self, sites: Sequence[AdditionSite]) -> Additions | None:
        return NativeAdditions(self.library, sites, self._dtype, self.pack_exact)

    def add_low_rank(self, x: Tensor, out: Tensor, additions: Additions, site: int) -> None:
        assert isinstance(x, Symbol) and isinstance(additions, NativeAdditions)
        recording_of(x).add_low_rank(x, out, additions, site)

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
        return self._rows.scale(x, factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).softcap(x, cap)
        return self._rows.softcap(x, cap)

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        assert isinstance(norm, LayerNorm)
        if isinstance(x, Symbol):
            return recording_of(x).layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self._rows.layer_norm(x, norm)

    def unary(self, x: Tensor, function: str) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).unary(x, function)
        return self._rows.unary(x, function)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(x, Symbol):
            return recording_of(x).mul(x, y)
        return self._rows.mul(x, y)

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
        return self._rows.gather(rope.table, positions, out)

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
        if isinstance(qkv, Symbol):
            q_weight, k_weight, eps = norms_of(q_norm, k_norm)
            return recording_of(qkv).qkv_rope_write(qkv, heads, rope_rows, kv, slots, q_weight, k_weight, eps)
        return self._rows.qkv_rope_write(qkv, heads, rope_rows, kv, slots, q_norm, k_norm, out)

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

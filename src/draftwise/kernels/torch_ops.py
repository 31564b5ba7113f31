"""`Ops` in plain torch: the reference of every kernel, and the default on any device.

A small model's step is bound by the number of torch calls (3-20 us each), not by arithmetic, so each operation here is
written in the fewest calls that give the right numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.attention.base import AttentionBackend
from draftwise.attention.torch_grouped import TorchGroupedAttention
from draftwise.kernels import onednn
from draftwise.kernels.attending import AttendingOps
from draftwise.kernels.base import HeadShape
from draftwise.kernels.handles import Linear, Norm, Rope
from draftwise.kv.storage import write_entries

_TIED_PACKED = 1 << 22  # elements up to which a tied output layer is packed beside the embedding table


class TorchLinear(Linear):
    """Either ``packed`` (oneDNN's layout) or ``weight_t`` [in, out] (a transposed view); ``bias`` [out] or None.
    ``shared``: the view is of a table that stays in use elsewhere."""

    __slots__ = ("bias", "packed", "shared", "weight_t")

    def __init__(
        self, weight_t: Tensor | None, packed: Tensor | None, bias: Tensor | None, shared: bool = False
    ) -> None:
        self.weight_t = weight_t
        self.packed = packed
        self.bias = bias
        self.shared = shared

    @property
    def num_bytes(self) -> int:
        held = (None if self.shared else self.weight_t, self.packed, self.bias)
        return sum(x.numel() * x.dtype.itemsize for x in held if x is not None)


class TorchNorm(Norm):
    """``scaled`` [1, H] float32 = weight * sqrt(H), ``root`` [1, 1] float32 = sqrt(H * eps)."""

    __slots__ = ("root", "scaled")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.scaled = (weight.float() * math.sqrt(size)).view(1, size)
        # a matrix, not a scalar: torch would not count a scalar's dtype when promoting
        self.root = torch.full((1, 1), math.sqrt(size * eps), dtype=torch.float32, device=weight.device)


class TorchRope(Rope):
    """``table`` [positions, 2, D]: cosines, and sines with the first half negated."""

    __slots__ = ("table",)

    def __init__(self, table: Tensor) -> None:
        self.table = table


class TorchOps(AttendingOps):
    """Plain torch on one device and dtype, with a choice of attention backend."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, attention: AttentionBackend | None = None
    ) -> None:
        super().__init__(dtype, device, attention or TorchGroupedAttention())

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed = onednn.pack(weight)
        return TorchLinear(weight.t() if packed is None else None, packed, bias)

    def pack_tied_head(self, table: Tensor) -> Linear:
        if table.numel() <= _TIED_PACKED:
            return self.pack_linear(table)
        return TorchLinear(table.t(), None, None, shared=True)

    def pack_norm(self, weight: Tensor, eps: float) -> Norm:
        return TorchNorm(weight, eps)

    def pack_rope(self, inv_freq: Tensor, scaling: float | Tensor, num_positions: int) -> Rope:
        half = inv_freq.shape[0]
        table = torch.empty((num_positions, 2, 2 * half), dtype=self._dtype, device=self._device)
        # in pieces: a long table in float32 would double the peak memory of loading a small model
        for start in range(0, num_positions, 4096):
            end = min(start + 4096, num_positions)
            positions = torch.arange(start, end, dtype=torch.float32, device=self._device)
            angles = positions[:, None] * inv_freq.to(self._device)  # [piece, D / 2]
            cos, sin = angles.cos() * scaling, angles.sin() * scaling
            table[start:end, 0, :half] = cos
            table[start:end, 0, half:] = cos
            table[start:end, 1, :half] = -sin
            table[start:end, 1, half:] = sin
        return TorchRope(table)

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return table.index_select(0, token_ids)
        return torch.index_select(table, 0, token_ids, out=out)

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        assert isinstance(weight, TorchLinear)
        dense, packed = weight.weight_t, weight.packed
        if packed is not None:
            if x.shape[0] == 0:  # oneDNN knows no empty product
                return x.new_empty((0, packed.shape[0])) if out is None else out
            result = onednn.linear(x, packed, weight.bias)
            return result if out is None else out.copy_(result)
        assert dense is not None
        if weight.bias is None:
            return torch.mm(x, dense) if out is None else torch.mm(x, dense, out=out)
        if out is None:
            return torch.addmm(weight.bias, x, dense)
        return torch.addmm(weight.bias, x, dense, out=out)

    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, TorchNorm)
        # x / sqrt(mean(x^2) + eps) = x * sqrt(H) / hypot(|x|, sqrt(H * eps)): four calls instead of six
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.hypot(length, norm.root)
        if x.dtype is torch.float32:
            return torch.div(x, scale, out=out).mul_(norm.scaled)
        wide = torch.div(x, scale).mul_(norm.scaled)  # float32 by promotion
        return wide.to(x.dtype) if out is None else out.copy_(wide)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        return self.rms_norm(residual.add_(x), norm, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        size = gate_up.shape[1] // 2
        gate, up = gate_up.narrow(1, 0, size), gate_up.narrow(1, size, size)
        if out is None:
            return F.silu(gate).mul_(up)
        return torch.mul(F.silu(gate, inplace=True), up, out=out)

    def rope_rows(self, rope: Rope, positions: Tensor, out: Tensor | None = None) -> Tensor:
        assert isinstance(rope, TorchRope)
        if out is None:
            return rope.table.index_select(0, positions)
        return torch.index_select(rope.table, 0, positions, out=out)

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
        num_q, num_kv, dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
        entries_heads = kv[0].shape[1]  # of latent attention as many as keys, else twice
        packed = qkv.view(-1, num_q + entries_heads, dim)
        if q_norm is not None:
            q = packed.narrow(1, 0, num_q)
            q.copy_(self.rms_norm(q, q_norm))
        if k_norm is not None:
            k = packed.narrow(1, num_q, num_kv)
            k.copy_(self.rms_norm(k, k_norm))
        rotated = packed.narrow(1, 0, num_q + num_kv)
        swapped = rotated.roll(dim // 2, -1)
        rotated.mul_(rope_rows.narrow(1, 0, 1)).addcmul_(swapped, rope_rows.narrow(1, 1, 1))
        # k and v lie side by side in the packed row as they do in the cache: one copy writes both
        entries = packed.narrow(1, num_q, entries_heads)
        write_entries(kv, slots, entries)
        queries = packed.narrow(1, 0, num_q)
        return queries if out is None else out.copy_(queries)

    def logits(self, hidden: Tensor, head: Linear, out: Tensor | None = None) -> Tensor:
        if self._dtype is torch.float32:
            return self.linear(hidden, head, out)
        narrow = self.linear(hidden, head)
        return narrow.float() if out is None else out.copy_(narrow)

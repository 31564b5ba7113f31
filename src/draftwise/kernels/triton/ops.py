"""`Ops` of Triton kernels."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwise.attention.base import AttentionBackend
from draftwise.attention.torch_grouped import TorchGroupedAttention
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.additions import Additions
from draftwise.kernels.attending import AttendingOps
from draftwise.kernels.base import HeadShape
from draftwise.kernels.handles import Heads, Linear, Norm, Rope
from draftwise.kernels.stacked import StackedAdditions
from draftwise.kernels.triton import in_torch, rows
from draftwise.kernels.triton.attention import TritonAttention
from draftwise.kernels.triton.availability import equal_bits_shown
from draftwise.kernels.triton.linear import LinearTiling, TritonLinear, can_pack, linear, pack_quantized
from draftwise.kernels.triton.low_rank import add_low_rank
from draftwise.kernels.triton.prompts import PROMPT_ROWS
from draftwise.kernels.triton.tiling import Tiling
from draftwise.quantization.scheme import Scheme
from draftwise.quantization.weights import QuantizedWeight, quantize

logger = logging.getLogger("draftwise")


@dataclass(slots=True, eq=False)
class TritonNorm(Norm):
    """``weight`` [H] float32, dense."""

    weight: Tensor
    eps: float


@dataclass(slots=True, eq=False)
class TritonRope(Rope):
    """``table`` [positions, 2, D / 2] float32: cosines, sines."""

    table: Tensor


@functools.cache
def _say_rows_stay() -> None:
    """Once per process."""
    logger.warning(
        "quantization: rows are not rounded where the checkpoint's codes have a scale per group: on a GPU there are "
        "products of rounded rows with a scale per output alone"
    )


class TritonOps(AttendingOps):
    """On a CUDA device, or on the CPU in Triton's interpreter.

    ``batch_invariant``: no result depends on what else is in a batch. Else products of floats are torch's (cuBLAS),
    those of fp8 too where the device has them, and long chunks of prompts go through its flash attention; everything
    else is as it is.

    ``scheme``: what linear layers are rounded to as they are packed; the output layer has eight bits in all of them.

    ``replaced``: kernels, of `kernels.replaced.FAMILIES`, that are not right on this machine: torch does their work.
    Without that of products, weights are kept as floats; without that of attention, passes cannot be captured.

    Raises:
        ConfigError: int4 weights with rounded rows, for which there is no kernel; or ``batch_invariant`` without the
            kernel of products.
    """

    wide_experts = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend | None = None,
        tiling: LinearTiling | None = None,
        *,
        batch_invariant: bool = True,
        scheme: Scheme | None = None,
        replaced: frozenset[str] = frozenset(),
    ) -> None:
        if scheme is not None and scheme.bits == 4 and scheme.dynamic:
            raise ConfigError(f"quantization: {scheme.name} is for CPUs; on a GPU use int4, int8 or fp8")
        if batch_invariant and replaced & {"linear", "attention"}:
            raise ConfigError(
                "batch_invariant: Triton's kernels of products or attention are not right on this machine (see "
                "draftwise env --check-kernels), and plain torch's round differently for different numbers of rows"
            )
        if "attention" in replaced:
            attention = TorchGroupedAttention()
        prompt_rows = None if batch_invariant or "prompts" in replaced else PROMPT_ROWS
        if attention is None:
            attention = TritonAttention(Tiling() if batch_invariant else None, prompt_rows=prompt_rows)
        super().__init__(dtype, device, attention)
        self._replaced = replaced
        self._products = "linear" not in replaced
        self._norm = in_torch.rms_norm if "norm" in replaced else rows.rms_norm
        self._gate = in_torch.silu_mul if "gated" in replaced else rows.silu_mul
        self._gather = in_torch.gather_rows if "gather" in replaced else rows.gather_rows
        self._rotate = in_torch.rope_write if "rotation" in replaced else rows.rope_write
        self._tiling = tiling or LinearTiling()
        self._batch_invariant = batch_invariant
        self._scheme = scheme

    @property
    def same_bits(self) -> bool:
        return self._batch_invariant and not self._replaced and equal_bits_shown(self._device)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._pack(weight, bias, self._scheme)

    def pack_head(self, weight: Tensor) -> Linear:
        return self._pack(weight, None, self._scheme and replace(self._scheme, bits=8, group=None))

    def pack_router(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._pack(weight, bias, None)

    def pack_heads(self, weight: Tensor) -> Heads:
        raise ModelLoadError("latent attention has no Triton kernels: set DRAFTWISE_KERNELS=torch")

    def _pack(self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None) -> Linear:
        if scheme is None:
            return TritonLinear(weight.contiguous(), bias, self._tiling, invariant=self._batch_invariant)
        return self.pack_quantized(quantize(weight, scheme), bias, dynamic=scheme.dynamic)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, dynamic: bool, paired: bool = False
    ) -> Linear:
        if not self._products or not can_pack(weight):  # the products are those of floats
            return self._pack(weight.dequantize(self._dtype).to(self._device), bias, None)
        # weights that have this form already, or were rounded to it before and come back from disk
        asked = self._scheme is not None and self._scheme.dynamic
        if asked and weight.group is not None:
            _say_rows_stay()
        dynamic = (dynamic or asked) and weight.group is None
        invariant = self._batch_invariant
        return pack_quantized(weight, bias, self._tiling, self._device, dynamic=dynamic, invariant=invariant)

    def pack_exact(self, weight: Tensor) -> Linear:
        return self._pack(weight, None, None)

    def pack_tied_head(self, table: Tensor) -> Linear:
        if self._scheme is not None:
            return self.pack_head(table)
        return TritonLinear(table, None, self._tiling, shared=True, invariant=self._batch_invariant)

    def pack_norm(self, weight: Tensor, eps: float) -> Norm:
        return TritonNorm(weight.float().contiguous(), eps)

    def pack_rope(self, inv_freq: Tensor, scaling: float | Tensor, num_positions: int) -> Rope:
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._device)
        angles = positions[:, None] * inv_freq.to(self._device)  # [positions, D / 2]
        return TritonRope(torch.stack((angles.cos() * scaling, angles.sin() * scaling), dim=1))

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        return self._gather(table, token_ids, out)

    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        assert isinstance(weight, TritonLinear)
        return linear(x, weight, out)

    def add_low_rank(self, x: Tensor, out: Tensor, additions: Additions, site: int) -> None:
        assert isinstance(additions, StackedAdditions)
        if "low_rank" in self._replaced:
            additions.add(x, out, site)
        else:
            add_low_rank(x, out, additions, site)

    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, TritonNorm)
        return self._norm(x, norm.weight, norm.eps, out=out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        assert isinstance(norm, TritonNorm)
        return self._norm(x, norm.weight, norm.eps, residual, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        return self._gate(gate_up, out)

    def rope_rows(self, rope: Rope, positions: Tensor, out: Tensor | None = None) -> Tensor:
        assert isinstance(rope, TritonRope)
        return self._gather(rope.table, positions, out)

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
        return self._rotate(qkv, heads, rope_rows, kv, slots, _parts(q_norm), _parts(k_norm), out)

    def logits(self, hidden: Tensor, head: Linear, out: Tensor | None = None) -> Tensor:
        assert isinstance(head, TritonLinear)
        return linear(hidden, head, out, torch.float32)


def _parts(norm: Norm | None) -> tuple[Tensor, float] | None:
    if norm is None:
        return None
    assert isinstance(norm, TritonNorm)
    return norm.weight, norm.eps

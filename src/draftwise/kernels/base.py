"""The vocabulary of operations a model is written in.

Model files contain calls of `Ops` and nothing else that touches tensors, so that native kernels, Triton,
quantised weights, tensor parallelism and the recording of a step can stand behind the same model.

Conventions: T rows of a ragged batch; every operation that returns a tensor takes ``out=``, a dense buffer for the
result, and returns it; inputs are not changed unless the operation says so. Weights go in as *handles* made once at
load by ``pack_*``, in whatever layout the kernels want.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.additions import Additions, AdditionSite
from draftwise.kernels.handles import Experts, Heads, LayerNorm, Linear, Norm, Rope
from draftwise.kernels.routing import Activation, Routing
from draftwise.quantization.weights import QuantizedWeight, ReadRows
from draftwise.types import AttentionBatch, ChainDraws

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""The functions of `Ops.unary`."""
_READ = 4 << 20
"""Numbers of a weight that are read at a time."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one attention layer. A packed q/k/v row is ``[Hq * D | Hkv * D | Hkv * D]``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Ops(ABC):
    """Operations on one device and dtype. Norms, softmax and logits are float32 inside whatever the dtype."""

    most_head_dim: int | None = None
    """The widest heads that `qkv_rope_write` takes; None: any."""
    wide_experts = False
    """Whether experts of a mixture may be of the forms that kernels of whole zeros hold as two layers
    (`QuantizedWeight.is_wide`)."""
    draws_chains = False
    """Whether `draw_chains` may be called."""

    # ------------------------------------------------------------------------------------ weights, at load

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """``weight`` [out, in], ``bias`` [out] -> handle. The caller gives the tensors up (they may be reused)."""

    def pack_quantized(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, dynamic: bool, paired: bool = False
    ) -> Linear:
        """A layer whose checkpoint has it quantised. Kernels that cannot compute with codes take it as floats.

        Args:
            weight: codes and scales of [out, in].
            bias: [out].
            dynamic: rows are to be quantised to int8 too.
            paired: `pack_gate_up` rather than `pack_linear`.
        """
        del dynamic
        values = weight.dequantize(self.dtype).to(self.device)
        del weight
        return self.pack_gate_up(values, bias) if paired else self.pack_linear(values, bias)

    def pack_read(
        self, read: ReadRows, shape: tuple[int, int], bias: Tensor | None = None, *, paired: bool = False
    ) -> Linear:
        """`pack_linear`, or ``paired`` `pack_gate_up`, of a weight [out, in] that is read while it is packed: kernels
        that round it never have it as floats.

        Args:
            read: rows of it; asked in order, more than once by some kernels.
        """
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        step = max(1, _READ // max(1, shape[1]))
        for start in range(0, shape[0], step):
            end = min(start + step, shape[0])
            weight[start:end] = read(start, end)
        return self.pack_gate_up(weight, bias) if paired else self.pack_linear(weight, bias)

    def release_freed(self) -> None:
        """Give the system back what handles took that are gone: some kernels keep it a while for those packed next."""
        return

    def pack_head(self, weight: Tensor) -> Linear:
        """The output layer [V, H]. As `pack_linear`, except that kernels that quantise may keep it more exactly."""
        return self.pack_linear(weight)

    def pack_tied_head(self, table: Tensor) -> Linear:
        """The embedding table [V, H] as output layer; unlike `pack_linear` the table stays in use elsewhere, so
        an implementation may prefer to share its memory."""
        return self.pack_linear(table)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `pack_linear`, for a product that only `silu_mul` reads; ``weight`` [2 * I, in], gate first."""
        return self.pack_linear(weight, bias)

    def pack_router(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `pack_linear`, for the small layer whose results choose experts: never rounded. `logits` computes it."""
        return self.pack_linear(weight, bias)

    def pack_experts(
        self,
        layers: Sequence[tuple[Linear, Linear]],
        routing: Routing,
        correction: Tensor | None = None,
    ) -> Experts:
        """A mixture of experts.

        Args:
            layers: of each expert, the shared one last: gate and up, packed by `pack_gate_up` (or, quantised,
                paired), and down, packed by `pack_linear`. Experts may differ in their inner size.
            routing: how rows choose.
            correction: [E], added to what experts are chosen by.
        """
        raise NotImplementedError(f"{type(self).__name__} has no experts")

    def pack_exact(self, weight: Tensor) -> Linear:
        """As `pack_linear`, of weights that are not rounded whatever the others are: low-rank parts of adapters."""
        return self.pack_linear(weight)

    def pack_additions(self, sites: Sequence[AdditionSite]) -> Additions | None:
        """Room for the adapters of a model, for passes that are recorded; None: nothing is added in those."""
        return None

    def add_low_rank(self, x: Tensor, out: Tensor, additions: Additions, site: int) -> None:
        """Record that ``out`` [T, outputs], what layer number ``site`` makes of ``x`` [T, inputs], gets what each row's
        adapter adds (`StepInput.adapters`)."""
        raise NotImplementedError(f"{type(self).__name__} records no additions")

    def pack_heads(self, weight: Tensor) -> Heads:
        """``weight`` [heads, out, in]: a linear layer for each head, never rounded."""
        raise NotImplementedError(f"{type(self).__name__} has no layers by head")

    @abstractmethod
    def pack_norm(self, weight: Tensor, eps: float) -> Norm:
        """``weight`` [H] -> handle."""

    def pack_layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """``weight`` [H], ``bias`` [H] -> handle for `layer_norm`."""
        return LayerNorm(weight.float(), None if bias is None else bias.float(), eps)

    @abstractmethod
    def pack_rope(self, inv_freq: Tensor, scaling: float | Tensor, num_positions: int) -> Rope:
        """``inv_freq`` [D / 2] float32, factor on cos and sin (or [D / 2]), positions 0..num_positions-1 -> handle."""

    # ---------------------------------------------------------------------------------------- row by row

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
        """``token_ids`` [T] int64, ``table`` [V, H] -> [T, H]."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Linear, out: Tensor | None = None) -> Tensor:
        """``x`` [T, in] -> [T, out]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        """``x`` [T, H] -> x / sqrt(mean(x ** 2) + eps) * weight, [T, H] (Zhang & Sennrich 2019)."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
        """``residual`` [T, H] += ``x`` [T, H] in place; returns the norm of the sum, [T, H]."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """``gate_up`` [T, 2 * I] = gate | up -> silu(gate) * up, [T, I]. May use ``gate_up`` as scratch."""

    def gated(self, gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
        """`silu_mul` with another activation: ``gate_up`` [T, 2 * I] = gate | up -> [T, I]."""
        raise NotImplementedError(f"{type(self).__name__} has no activation but silu")

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``x`` [T, H], rows of the model's type or logits, *= ``factor`` in place; returns ``x``."""
        return x.mul_(factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """``x`` [T, V] float32 = cap * tanh(x / cap) in place; returns ``x``."""
        return x.div_(cap).tanh_().mul_(cap)

    def experts(self, x: Tensor, scores: Tensor, experts: Experts, out: Tensor | None = None) -> Tensor:
        """Rows through the experts that their scores choose.

        Args:
            x: [T, H].
            scores: [T, routing.num_scores] float32, from `logits` of the router.

        Returns:
            [T, H], the weighted sum of what the chosen experts make of each row, added up in the router's order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no experts")

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts, out: Tensor | None = None
    ) -> Tensor:
        """`experts`, chosen by somebody else: ``chosen`` [T, num_chosen] int64, ``weights`` likewise, float32."""
        raise NotImplementedError(f"{type(self).__name__} has no experts")

    def heads(self, x: Tensor, weight: Heads, out: Tensor | None = None) -> Tensor:
        """``x`` [T, heads * in], each head times its own layer -> [T, heads * out]."""
        raise NotImplementedError(f"{type(self).__name__} has no layers by head")

    def draw_chains(
        self, logits: Tensor, draws: ChainDraws, target_ids: Tensor | None = None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """Draw a chain for each request from logits that are all there, all in one call. Not recorded.

        Args:
            logits: [steps, R, Vd] float32, dense: step by step those of all requests.
            draws: How, with a key per request.
            target_ids: [Vd] int64, the token that each drawn id stands for; None: itself.

        Returns:
            Tokens [R, steps] int64, and with stream "draft" what they were drawn from, [R, steps, Vd] float32.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no chains")

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        """``x`` [T, W] -> a copy of columns ``start .. start + count - 1``, [T, count]."""
        return x.narrow(1, start, count).contiguous()

    def copy(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of ``x`` [T, H] that later in-place operations do not change."""
        return x.clone() if out is None else out.copy_(x)

    def concat(self, x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` [T, A], ``y`` [T, B] -> their rows side by side, [T, A + B]."""
        return torch.cat((x, y), dim=-1, out=out)

    def join_layers(self, parts: Sequence[Tensor], weight: Linear, norm: Norm | None = None) -> Tensor:
        """``parts`` [T, H] each, side by side through a layer, then through a norm if one is given: [T, out]. Not
        recorded: it is for what stands between passes."""
        joined = self.linear(torch.cat(list(parts), dim=-1), weight)
        return joined if norm is None else self.rms_norm(joined, norm)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` [T, H] += ``x`` [T, H] in place; returns ``residual``."""
        return residual.add_(x)

    def layer_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """``x`` [T, H] -> (x - mean) / sqrt(variance + eps) * weight + bias, [T, H] (Ba, Kiros & Hinton 2016)."""
        assert isinstance(norm, LayerNorm)
        found = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.eps)
        return found.to(x.dtype)

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """``x`` [T, H] * ``y`` [T, H], number by number, rounded once."""
        return x * y

    def unary(self, x: Tensor, function: str) -> Tensor:
        """A function of `FUNCTIONS` of every number of ``x`` [T, H], computed in float32 and rounded once."""
        return FUNCTIONS[function](x.float()).to(x.dtype)

    def clear_first(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows of ``x`` [T, H] whose position is 0 become 0, in place; returns ``x``. ``positions`` [T] int64.

        MTP layers have no token before the first row's, and were trained with zeros for its embedding.
        """
        return x.masked_fill_((positions == 0)[:, None], 0.0)

    # ---------------------------------------------------------------------------------------- attention

    @abstractmethod
    def rope_rows(self, rope: Rope, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotations of the rows of a pass, read once and used by all layers.

        ``positions`` [T] int64 -> cosines ``[:, 0]`` and sines ``[:, 1]`` in whatever form `qkv_rope_write` of the same
        Ops takes. Plain torch: [T, 2, D] of the model's dtype, the first half of the sines negated, so that rotating is
        ``x * cos + swap_halves(x) * sin``; native kernels: [T, 2, D / 2] float32.
        """

    @abstractmethod
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
        """Split packed q/k/v, normalise q and k per head if norms are given, rotate both, write K/V to the cache.

        Args:
            qkv: [T, (Hq + 2 * Hkv) * D]; used as scratch.
            rope_rows: [T, 2, ...] from `rope_rows`.
            kv: one layer of a `KVStorage` with layout `KVLayerSpec.dense`, ``(kv [slots, 2 * Hkv, D],)``, or, of a
                cache of codes (int8, fp8), these in that shape and scales [slots, 2 * Hkv] float32. What is written is
                rounded to it. An entry of ``Hkv`` heads and not of twice as many is latent attention's: keys are their
                own values, and ``qkv`` is [T, (Hq + Hkv) * D].
            slots: [T] int64, where each row's K/V goes; distinct.
            q_norm, k_norm: over D, before the rotation.

        Returns:
            Rotated queries [T, Hq, D]; possibly a strided view of ``qkv`` unless ``out`` is given.
        """

    @abstractmethod
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
        """``q`` [T, Hq, D] over the cache -> [T, Hq * D]; masks, window, soft cap and sinks as in `attention.base`.
        Entries of ``Hkv`` heads are keys that are their own values. ``whole``: every row of a request that is no tree
        sees all of its rows, see `attention.base`."""

    @property
    def capturable(self) -> bool:
        """Whether a pass over a batch that has `AttentionBatch.static` reads nothing of the host."""
        return False

    # --------------------------------------------------------------------------------------------- logits

    @abstractmethod
    def logits(self, hidden: Tensor, head: Linear, out: Tensor | None = None) -> Tensor:
        """``hidden`` [M, H] -> [M, V] float32."""

    @property
    def same_bits(self) -> bool:
        """Whether a row's bits depend on that row alone, whatever the number of rows. Kernels that record a pass say
        it of the recording; see `DecoderModel.same_bits`."""
        return False

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where weights and activations live."""

"""Layers of decoders: what a checkpoint names them, their weights as they are loaded and packed, and how a pass goes
through one: pre-norm, rotary attention with grouped heads, and an MLP or experts, each with a norm behind it in some
families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.handles import Linear, Norm, Rope
from draftwise.kernels.split import summed
from draftwise.kv.storage import KVLayerSpec
from draftwise.models.config import ModelConfig
from draftwise.models.cuts import BY_INPUTS, Run, Split, by_outputs
from draftwise.models.gates import gated_orders
from draftwise.models.mlp import (
    EXPERT_NAMES,
    DenseWeights,
    ExpertNames,
    LoadedLinear,
    Mlp,
    SparseWeights,
    declare_linear,
    load_linear,
)
from draftwise.models.rope import RopeConfig
from draftwise.models.weights import WeightPlan
from draftwise.names import KERNELS_VARIABLE
from draftwise.types import AttentionBatch


@dataclass(frozen=True, slots=True)
class DenseNames:
    """Names of a checkpoint's tensors; ``{i}`` is the layer. Biases replace ``.weight`` by ``.bias``."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    input_norm: str = "model.layers.{i}.input_layernorm.weight"
    q: str = "model.layers.{i}.self_attn.q_proj.weight"
    k: str = "model.layers.{i}.self_attn.k_proj.weight"
    v: str = "model.layers.{i}.self_attn.v_proj.weight"
    o: str = "model.layers.{i}.self_attn.o_proj.weight"
    q_norm: str = "model.layers.{i}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{i}.self_attn.k_norm.weight"
    post_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    gate: str = "model.layers.{i}.mlp.gate_proj.weight"
    up: str = "model.layers.{i}.mlp.up_proj.weight"
    down: str = "model.layers.{i}.mlp.down_proj.weight"
    experts: ExpertNames = EXPERT_NAMES
    qkv: str | None = None  # one tensor in place of q, k and v
    gate_up: str | None = None  # likewise, gate first
    after_attention: str | None = None  # norms of what attention and the MLP give, before it is added
    after_mlp: str | None = None
    sinks: str = "model.layers.{i}.self_attn.sinks"


class Projections(Protocol):
    """Projections in front of attention or behind it that are more than one linear layer."""

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        """``x`` [T, inputs] -> [T, outputs]."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes kept for it."""
        ...


@dataclass(frozen=True, slots=True)
class SplitQkv:
    """Projections of a layer whose queries and keys are normalised over all heads at once.

    On several ranks, each computes the queries and keys of all heads, since the norm needs them, and goes on with its
    own: sums of squares need not travel, and have the bits of one process. Heads of Hq and Hkv below are those of a
    rank; of Aq and Akv, those of all.
    """

    q: Linear  # [Aq * D, H]
    k: Linear  # [Akv * D, H]
    v: Linear  # [Hkv * D, H]
    q_norm: Norm  # [Aq * D]
    k_norm: Norm  # [Akv * D]
    own_q: tuple[int, int] | None = None  # first column and number of the rank's; None: all are
    own_k: tuple[int, int] | None = None

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        """``x`` [T, H] -> [T, (Hq + 2 * Hkv) * D]."""
        q = ops.rms_norm(ops.linear(x, self.q), self.q_norm)
        k = ops.rms_norm(ops.linear(x, self.k), self.k_norm)
        if self.own_q is not None:
            q = ops.columns(q, *self.own_q)
        if self.own_k is not None:
            k = ops.columns(k, *self.own_k)
        return ops.concat(ops.concat(q, k), ops.linear(x, self.v))

    @property
    def num_bytes(self) -> int:
        return self.q.num_bytes + self.k.num_bytes + self.v.num_bytes


@dataclass(frozen=True, slots=True)
class SplitKv:
    """Projections of a layer of which keys and values are also computed alone, of other rows than queries are."""

    q: Linear  # [Hq * D, H]
    kv: Linear  # [2 * Hkv * D, H]

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        """``x`` [T, H] -> [T, (Hq + 2 * Hkv) * D]."""
        return ops.concat(ops.linear(x, self.q), ops.linear(x, self.kv))

    @property
    def num_bytes(self) -> int:
        return self.q.num_bytes + self.kv.num_bytes


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One layer's packed weights."""

    input_norm: Norm | None  # None: its input is normalised otherwise, or not at all
    qkv: Linear | Projections  # [(Hq + 2 * Hkv) * D, H]
    q_norm: Norm | None  # [D]
    k_norm: Norm | None  # [D]
    o: Linear | Projections  # [H, Hq * D]
    post_norm: Norm
    mlp: Mlp
    window: int | None
    sinks: Tensor | None = None  # [Hq] float32
    after_attention: Norm | None = None  # of what attention gives, before it is added
    after_mlp: Norm | None = None
    whole: bool = False  # rows see those behind them, too (`Ops.attention`)
    gate: Linear | None = None  # [Hq * D, H], of `models.gates`


class LayerWeights:
    """One layer's parameters as loaded; gone once packed."""

    def __init__(
        self,
        config: ModelConfig,
        names: DenseNames,
        plan: WeightPlan,
        i: int,
        *,
        input_norm: bool = True,
        qkv_inputs: int | None = None,
        split_kv: bool = False,
        sparse: type[SparseWeights] = SparseWeights,
    ) -> None:
        """``input_norm``: whether it has one of its own; ``qkv_inputs``: columns of the q, k and v projections if they
        read more than the hidden size (layers of draft heads); ``split_kv``: keys and values are a layer apart
        (`SplitKv`); ``sparse``: how experts are kept."""
        hidden, dim = config.hidden_size, config.head_dim
        rows_q, rows_kv = config.num_heads * dim, config.num_kv_heads * dim
        rows_in = 2 * rows_q if config.attn_gate else rows_q  # of the q projection, as it is stored

        def name(pattern: str) -> str:
            return pattern.format(i=i)

        def linear(parts: Sequence[tuple[str, int]], columns: int, bias: bool, split: Split) -> LoadedLinear:
            named = [(name(pattern), rows) for pattern, rows in parts]
            return declare_linear(plan, named, columns, bias, split)

        self.input_norm = plan.tensor(name(names.input_norm), (hidden,)) if input_norm else None
        columns, parts = qkv_inputs or hidden, [(names.q, rows_in), (names.k, rows_kv), (names.v, rows_kv)]
        kv = Run(rows_kv, config.kv_copies)
        split = Split(((Run(rows_in),), (kv,), (kv,)))
        if names.qkv is not None:
            parts, split = [(names.qkv, rows_q + 2 * rows_kv)], Split(((Run(rows_q), kv, kv),))
        order = config.rope.order(dim)
        self._dims = None if order is None else torch.tensor(order)
        self._order = orders_of(order, rows_q, rows_kv)[2]
        self._gate_order: Tensor | None = None
        if config.attn_gate:
            assert names.qkv is None and not split_kv and not config.wide_qk_norm, "no family has both"
            self._order, self._gate_order = gated_orders(order, config.num_heads, config.num_kv_heads, dim)
        self._offset = config.norm_offset
        self.wide_norm = config.wide_qk_norm
        assert not (self.wide_norm and order is not None), "no family has both"
        self._own_q: tuple[int, int] | None = None
        self._own_k: tuple[int, int] | None = None
        self._split_kv = split_kv
        if split_kv:
            assert order is None and not self.wide_norm, "no drafter has these"
            self.q = linear(parts[:1], columns, config.qkv_bias, by_outputs(rows_q))
            self.kv = linear(parts[1:], columns, config.qkv_bias, Split(((kv,), (kv,))))
        elif self.wide_norm:
            # Example: 8 heads and 4 K/V heads of 16 numbers on 2 ranks: rank 1 has columns 64-127 of 128 queries and
            # 32-63 of 64 keys; with 1 K/V head, both have columns 0-15.
            part = config.part
            all_q, all_k = rows_q * part.size, rows_kv * part.size // config.kv_copies
            if part.size > 1:
                self._own_q = (part.rank * rows_q, rows_q)
                self._own_k = (part.rank // config.kv_copies * rows_kv, rows_kv)
            self.q = linear([(names.q, all_q)], columns, config.qkv_bias, Split())
            self.k = linear([(names.k, all_k)], columns, config.qkv_bias, Split())
            self.v = linear(parts[2:], columns, config.qkv_bias, Split(((kv,),)))
        else:
            self.qkv = linear(parts, columns, config.qkv_bias, split)
        normed = config.qk_norm or self.wide_norm
        sizes = (all_q, all_k) if self.wide_norm else (dim, dim)
        self.q_norm = plan.tensor(name(names.q_norm), sizes[:1]) if normed else None
        self.k_norm = plan.tensor(name(names.k_norm), sizes[1:]) if normed else None
        self.o = linear([(names.o, hidden)], rows_q, config.o_bias, BY_INPUTS)
        own = by_outputs(config.num_heads)
        self.sinks = plan.packed([(name(names.sinks), config.num_heads)], None, own) if config.sinks else None
        self.post_norm = plan.tensor(name(names.post_norm), (hidden,))
        self.after_attention, self.after_mlp = (
            None if pattern is None else plan.tensor(name(pattern), (hidden,))
            for pattern in (names.after_attention, names.after_mlp)
        )
        self.mlp = self.declared_mlp(config, names, plan, i, sparse)

    @staticmethod
    def declared_mlp(
        config: ModelConfig, names: DenseNames, plan: WeightPlan, i: int, sparse: type[SparseWeights]
    ) -> DenseWeights | SparseWeights:
        """A layer's MLP or experts."""
        hidden, inner = config.hidden_size, config.intermediate_size
        if config.experts is not None and config.experts.layers[i]:
            return sparse(config.experts, names.experts, plan, i, hidden)
        halves = [(names.gate.format(i=i), inner), (names.up.format(i=i), inner)]
        split = by_outputs(inner, inner)
        if names.gate_up is not None:
            halves, split = [(names.gate_up.format(i=i), 2 * inner)], Split(((Run(inner), Run(inner)),))
        gate_up = declare_linear(plan, halves, hidden, config.mlp_bias, split)
        down = declare_linear(plan, [(names.down.format(i=i), hidden)], inner, config.mlp_bias, BY_INPUTS)
        return DenseWeights(gate_up, down, config.activation)

    def pack(self, ops: Ops, plan: WeightPlan, eps: float, window: int | None) -> DenseLayer:
        def norm(name: str, dims: Tensor | None = None) -> Norm | None:
            weight = self.__dict__.pop(name)
            if weight is None:
                return None
            plan.fill(weight)
            if dims is not None:
                weight = weight[dims.to(weight.device)]
            return ops.pack_norm(weight.float() + self._offset if self._offset else weight, eps)

        def linear(name: str, order: Tensor | None = None) -> Linear:
            # popped: a kernel that repacks then frees the source before the next one is packed
            weight, bias = self.__dict__.pop(name)
            return load_linear(ops, plan, weight, bias, order=order)

        gate: Linear | None = None
        if self._gate_order is not None:
            weight, bias = self.qkv
            assert isinstance(weight, Tensor), "no draft layer is quantised in its checkpoint"
            gate = load_linear(ops, plan, weight, bias, order=self._gate_order)
            del weight, bias

        post_norm, q_norm, k_norm = norm("post_norm"), norm("q_norm", self._dims), norm("k_norm", self._dims)
        assert post_norm is not None
        qkv: Linear | SplitQkv | SplitKv
        if self._split_kv:
            qkv = SplitKv(linear("q"), linear("kv"))
        elif self.wide_norm:
            assert q_norm is not None and k_norm is not None
            qkv = SplitQkv(linear("q"), linear("k"), linear("v"), q_norm, k_norm, self._own_q, self._own_k)
            q_norm = k_norm = None
        else:
            qkv = linear("qkv", self._order)
        if self.sinks is not None:
            plan.fill(self.sinks)
        return DenseLayer(
            input_norm=norm("input_norm"),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            o=summed(plan.part, linear("o")),
            post_norm=post_norm,
            mlp=self.mlp.pack(ops, plan),
            window=window,
            sinks=None if self.sinks is None else self.sinks.float(),
            after_attention=norm("after_attention"),
            after_mlp=norm("after_mlp"),
            gate=gate,
        )


def layer_spec(config: ModelConfig) -> KVLayerSpec:
    """The storage of a layer per token."""
    if config.latent is not None:
        return KVLayerSpec((("latent", (1, config.head_dim)),))
    return KVLayerSpec.dense(config.num_kv_heads, config.head_dim)


def packed_rope(ops: Ops, rope: RopeConfig, head_dim: int, length: int) -> Rope:
    """Rotations of ``length`` positions. Where not all dimensions of a head are rotated, the others are by nothing, see
    `RopeConfig.order`. Raises ModelLoadError if there is no memory for so many, or the kernels take no such heads."""
    most = ops.most_head_dim
    if most is not None and head_dim > most:
        raise ModelLoadError(
            f"heads have {head_dim} values, and native kernels take at most {most}: set {KERNELS_VARIABLE}=torch"
        )
    try:
        return _packed_rope(ops, rope, head_dim, length)
    except (RuntimeError, MemoryError) as error:
        raise ModelLoadError(
            f"there is no memory for the rotations of {length} positions: give a lower max_model_len ({error})"
        ) from error


def _packed_rope(ops: Ops, rope: RopeConfig, head_dim: int, length: int) -> Rope:
    inv_freq, missing = rope.inv_freq(), (head_dim - rope.head_dim) // 2
    if missing == 0:
        return ops.pack_rope(inv_freq, rope.attention_factor, length)
    scaling = torch.cat((torch.full_like(inv_freq, rope.attention_factor), inv_freq.new_ones(missing)))
    padded = torch.cat((inv_freq, inv_freq.new_zeros(missing)))
    return ops.pack_rope(padded, scaling.to(ops.device), length)


def orders_of(
    dims: Sequence[int] | None, rows_q: int, rows_kv: int
) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """Which row of the q projection, of the k projection, and of q, k and v stacked stands where: the dimensions of
    each head of q and k in the order ``dims`` [D], values as they were. None: as the checkpoint has them.

    Example: D = 2, dims (1, 0), one head each: rows 1, 0; rows 1, 0; rows 1, 0, 3, 2, 4, 5.
    """
    if dims is None:
        return None, None, None

    def heads(rows: int) -> Tensor:
        return (torch.arange(rows // len(dims))[:, None] * len(dims) + torch.tensor(dims)[None]).flatten()

    values = torch.arange(rows_kv) + rows_q + rows_kv
    return heads(rows_q), heads(rows_kv), torch.cat((heads(rows_q + rows_kv), values))


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Data that all layers of one pass share."""

    ops: Ops
    heads: HeadShape
    scale: float  # of attention scores
    rope: Tensor  # rotations of the rows
    slots: Tensor  # [T] int64
    attention: AttentionBatch
    softcap: float | None = None  # of attention scores
    local_rope: Tensor | None = None  # rotations in layers with a window, if they are others

    def run(self, layer: DenseLayer, entries: tuple[Tensor, ...], hidden: Tensor, residual: Tensor) -> Tensor:
        """Attention and MLP of one layer.

        Args:
            entries: the layer's part of the storage.
            hidden: [T, inputs of q, k, v] what the layer reads, normalised already.
            residual: [T, H]; attention's output is added in place.

        Returns:
            The MLP's output [T, H], still to be added to ``residual``.
        """
        ops = self.ops
        packed = layer.qkv
        qkv = ops.linear(hidden, packed) if isinstance(packed, Linear) else packed.run(ops, hidden)
        apart, heads, place = self.attention.apart, self.heads, None
        if apart is not None:
            place = apart.queries(qkv.shape[0], heads.num_heads, heads.head_dim, qkv.dtype)
        rope = self.rope if layer.window is None or self.local_rope is None else self.local_rope
        q = ops.qkv_rope_write(qkv, heads, rope, entries, self.slots, layer.q_norm, layer.k_norm, out=place)
        attended = ops.attention(
            q,
            entries,
            self.attention,
            self.heads,
            self.scale,
            layer.window,
            self.softcap,
            layer.sinks,
            whole=layer.whole,
        )
        if layer.gate is not None:
            attended = ops.mul(attended, ops.unary(ops.linear(hidden, layer.gate), "sigmoid"))
        behind = layer.o
        added = ops.linear(attended, behind) if isinstance(behind, Linear) else behind.run(ops, attended)
        if layer.after_attention is not None:
            added = ops.rms_norm(added, layer.after_attention)
        hidden = ops.add_rms_norm(added, residual, layer.post_norm)
        added = layer.mlp.run(ops, hidden)
        return added if layer.after_mlp is None else ops.rms_norm(added, layer.after_mlp)

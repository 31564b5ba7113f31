"""The decoder that most families share: pre-norm, rotary attention with grouped heads, gated MLP or experts.

A family is a subclass that overrides `parse` and, if its tensors are named otherwise, `names`. The forward contains
calls of `Ops` only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draftwise.kernels.base import HeadShape, Linear, Norm, Ops
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import DecoderModel, SharedWeights
from draftwise.models.config import ModelConfig, RawConfig, dense_config
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
from draftwise.models.weights import WeightPlan
from draftwise.types import AttentionBatch, StepInput, TargetOutput


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


@dataclass(frozen=True, slots=True)
class SplitQkv:
    """Projections of a layer whose queries and keys are normalised over all heads at once."""

    q: Linear  # [Hq * D, H]
    k: Linear  # [Hkv * D, H]
    v: Linear
    q_norm: Norm  # [Hq * D]
    k_norm: Norm  # [Hkv * D]

    def run(self, ops: Ops, hidden: Tensor) -> Tensor:
        """``hidden`` [T, H] -> [T, (Hq + 2 * Hkv) * D]."""
        q = ops.rms_norm(ops.linear(hidden, self.q), self.q_norm)
        k = ops.rms_norm(ops.linear(hidden, self.k), self.k_norm)
        return ops.concat(ops.concat(q, k), ops.linear(hidden, self.v))

    @property
    def num_bytes(self) -> int:
        return self.q.num_bytes + self.k.num_bytes + self.v.num_bytes


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """One layer's packed weights."""

    input_norm: Norm | None  # None: its input is normalised otherwise, or not at all
    qkv: Linear | SplitQkv  # [(Hq + 2 * Hkv) * D, H]
    q_norm: Norm | None  # [D]
    k_norm: Norm | None  # [D]
    o: Linear  # [H, Hq * D]
    post_norm: Norm
    mlp: Mlp
    window: int | None


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
    ) -> None:
        """``input_norm``: whether it has one of its own; ``qkv_inputs``: columns of the q, k and v projections if they
        read more than the hidden size (layers of draft heads)."""
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        rows_q, rows_kv = config.num_heads * dim, config.num_kv_heads * dim

        def name(pattern: str) -> str:
            return pattern.format(i=i)

        def linear(parts: Sequence[tuple[str, int]], columns: int, bias: bool) -> LoadedLinear:
            return declare_linear(plan, [(name(pattern), rows) for pattern, rows in parts], columns, bias)

        self.input_norm = plan.tensor(name(names.input_norm), (hidden,)) if input_norm else None
        columns, parts = qkv_inputs or hidden, [(names.q, rows_q), (names.k, rows_kv), (names.v, rows_kv)]
        self.wide_norm = config.wide_qk_norm
        if self.wide_norm:
            self.q, self.k, self.v = (linear([part], columns, config.qkv_bias) for part in parts)
        else:
            self.qkv = linear(parts, columns, config.qkv_bias)
        normed = config.qk_norm or self.wide_norm
        sizes = (rows_q, rows_kv) if self.wide_norm else (dim, dim)
        self.q_norm = plan.tensor(name(names.q_norm), sizes[:1]) if normed else None
        self.k_norm = plan.tensor(name(names.k_norm), sizes[1:]) if normed else None
        self.o = linear([(names.o, hidden)], rows_q, config.o_bias)
        self.post_norm = plan.tensor(name(names.post_norm), (hidden,))
        self.mlp: DenseWeights | SparseWeights
        if config.experts is not None and config.experts.layers[i]:
            self.mlp = SparseWeights(config.experts, names.experts, plan, i, hidden)
        else:
            gate_up = linear([(names.gate, inner), (names.up, inner)], hidden, config.mlp_bias)
            down = linear([(names.down, hidden)], inner, config.mlp_bias)
            self.mlp = DenseWeights(gate_up, down, config.activation)
        # buffers that old checkpoints carry and everybody recomputes
        plan.ignored.add(f"model.layers.{i}.self_attn.rotary_emb.inv_freq")

    def pack(self, ops: Ops, plan: WeightPlan, eps: float, window: int | None) -> DenseLayer:
        def norm(name: str) -> Norm | None:
            weight = self.__dict__.pop(name)
            if weight is None:
                return None
            plan.fill(weight)
            return ops.pack_norm(weight, eps)

        def linear(name: str) -> Linear:
            # popped: a kernel that repacks then frees the source before the next one is packed
            weight, bias = self.__dict__.pop(name)
            return load_linear(ops, plan, weight, bias)

        post_norm, q_norm, k_norm = norm("post_norm"), norm("q_norm"), norm("k_norm")
        assert post_norm is not None
        qkv: Linear | SplitQkv
        if self.wide_norm:
            assert q_norm is not None and k_norm is not None
            qkv = SplitQkv(linear("q"), linear("k"), linear("v"), q_norm, k_norm)
            q_norm = k_norm = None
        else:
            qkv = linear("qkv")
        return DenseLayer(
            input_norm=norm("input_norm"),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            o=linear("o"),
            post_norm=post_norm,
            mlp=self.mlp.pack(ops, plan),
            window=window,
        )


@dataclass(frozen=True, slots=True)
class LayerPass:
    """What all layers of one pass share."""

    ops: Ops
    heads: HeadShape
    scale: float  # of attention scores
    rope: Tensor  # rotations of the rows
    slots: Tensor  # [T] int64
    attention: AttentionBatch
    softcap: float | None = None  # of attention scores

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
        qkv = packed.run(ops, hidden) if isinstance(packed, SplitQkv) else ops.linear(hidden, packed)
        apart, heads, place = self.attention.apart, self.heads, None
        if apart is not None:
            place = apart.queries(qkv.shape[0], heads.num_heads, heads.head_dim, qkv.dtype)
        q = ops.qkv_rope_write(
            qkv, heads, self.rope, entries, self.slots, layer.q_norm, layer.k_norm, out=place
        )
        attended = ops.attention(
            q, entries, self.attention, self.heads, self.scale, layer.window, self.softcap
        )
        hidden = ops.add_rms_norm(ops.linear(attended, layer.o), residual, layer.post_norm)
        return layer.mlp.run(ops, hidden)


class DenseDecoder(DecoderModel):
    """Base of the dense families; also usable as it is for a Llama-like checkpoint."""

    names = DenseNames()

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        return dense_config(raw, architecture=architecture, max_model_len=max_model_len)

    def __init__(self, config: ModelConfig, ops: Ops, plan: WeightPlan) -> None:
        self.config = config
        self.dtype = ops.dtype
        self.device = ops.device
        self.same_bits = ops.same_bits
        self.capturable = config.experts is None  # rows are grouped by expert on the host
        self._ops = ops
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._scale = config.head_dim**-0.5
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = plan.tensor(self.names.embedding, (vocab, hidden))
        self._loaded: list[LayerWeights | None] = [
            LayerWeights(config, self.names, plan, i) for i in range(config.num_layers)
        ]
        self._loaded_norm = plan.tensor(self.names.final_norm, (hidden,))
        self._loaded_head: Tensor | None
        if config.tied:
            self._loaded_head = None
            plan.ignored.add(self.names.head)  # some writers store it twice
        else:
            self._loaded_head = plan.tensor(self.names.head, (vocab, hidden))
        self._plan = plan
        plan.streams = True

    def finish(self) -> None:
        config, ops, plan = self.config, self._ops, self._plan
        plan.fill(self._embedding)
        layers = []
        for i, window in enumerate(config.sliding_window):
            weights = self._loaded[i]
            assert weights is not None
            layers.append(weights.pack(ops, plan, config.norm_eps, window))
            self._loaded[i] = None
        del self._loaded
        self._layers = tuple(layers)
        plan.fill(self._loaded_norm)
        self._final_norm = ops.pack_norm(self._loaded_norm, config.norm_eps)
        if self._loaded_head is None:
            self._head = ops.pack_tied_head(self._embedding)
        else:
            plan.fill(self._loaded_head)
            self._head = ops.pack_head(self._loaded_head)
        del self._loaded_norm, self._loaded_head, self._plan
        products = [w for x in self._layers for w in (x.qkv, x.o, x.mlp)]
        self._weight_bytes = sum(product.num_bytes for product in (*products, self._head))
        self._weight_bytes += self._embedding.numel() * self._embedding.element_size()
        # norms, of which kernels keep float32
        norms = (2 * config.num_layers + 1) * config.hidden_size
        norms += 2 * config.num_layers * config.head_dim * config.qk_norm
        self._weight_bytes += 4 * norms
        self._rope = ops.pack_rope(config.rope.inv_freq(), config.rope.attention_factor, config.max_model_len)

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        spec = KVLayerSpec.dense(self.config.num_kv_heads, self.config.head_dim)
        return (spec,) * self.config.num_layers

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        ops = self._ops
        captured: dict[int, Tensor] = {}
        rope = ops.rope_rows(self._rope, batch.positions)
        softcap = self.config.attn_softcap
        layers = LayerPass(ops, self._heads, self._scale, rope, batch.slots, batch.attention, softcap)
        residual = ops.embedding(batch.token_ids, self._embedding)
        if 0 in capture:
            captured[0] = ops.copy(residual)
        first = self._layers[0].input_norm
        assert first is not None
        hidden = ops.rms_norm(residual, first)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            product = layers.run(layer, kv.layer(i), hidden, residual)
            norm = self._layers[i + 1].input_norm if i < last else self._final_norm
            assert norm is not None
            # the residual now is what enters layer i + 1
            hidden = ops.add_rms_norm(product, residual, norm)
            if i + 1 in capture:
                captured[i + 1] = ops.copy(residual)
        return TargetOutput(hidden, captured)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.logits(hidden, self._head)

    def shared_weights(self) -> SharedWeights:
        return SharedWeights(self._embedding, self._head, self._ops)

    def first_layers(self, count: int) -> DecoderModel:
        assert 1 <= count <= len(self._layers), "the caller knows the number of layers"
        part = copy.copy(self)
        part._layers = self._layers[:count]
        part.config = replace(
            self.config, num_layers=count, sliding_window=self.config.sliding_window[:count]
        )
        return part

    def weight_bytes(self) -> int:
        return self._weight_bytes

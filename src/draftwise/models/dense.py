"""The decoder that most families share: an embedding, layers (`models.layers`), a norm and an output layer.

A family is a subclass that overrides `parse` and, if its tensors are named otherwise, `names`. The forward contains
calls of `Ops` only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.handles import Linear, Rope
from draftwise.kernels.split import known_table, packed_head, packed_tied_head
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import (
    DecoderModel,
    LinearSite,
    LogitsTail,
    SharedWeights,
    SitePart,
    finish_logits,
)
from draftwise.models.config import ModelConfig, RawConfig, dense_config
from draftwise.models.layers import (
    DenseNames,
    LayerPass,
    LayerWeights,
    SplitQkv,
    layer_spec,
    orders_of,
    packed_rope,
)
from draftwise.models.mlp import DenseMlp, SparseWeights
from draftwise.models.rope import RopeConfig
from draftwise.models.weights import WeightPlan, release_freed_memory
from draftwise.types import StepInput, TargetOutput


class DenseDecoder(DecoderModel):
    """Base of the dense families; also usable as it is for a Llama-like checkpoint."""

    names = DenseNames()
    sparse: type[SparseWeights] = SparseWeights
    """How the checkpoint keeps experts."""
    weights: type[LayerWeights] = LayerWeights
    """The parts of a layer."""

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
        self._scale = config.attn_scale or config.head_dim**-0.5
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = plan.table(self.names.embedding, vocab, hidden)
        self._loaded: list[LayerWeights | None] = [
            self.weights(config, self.names, plan, i, sparse=self.sparse) for i in range(config.num_layers)
        ]
        self._loaded_norm = plan.tensor(self.names.final_norm, (hidden,))
        self._loaded_head: Tensor | None
        if config.tied:
            self._loaded_head = None
            plan.ignored.add(self.names.head)  # some writers store it twice
        else:
            self._loaded_head = plan.table(self.names.head, vocab, hidden)
        self._plan = plan
        plan.streams = True

    def finish(self) -> None:
        config, ops, plan = self.config, self._ops, self._plan
        plan.fill(self._embedding)
        known_table(plan.part, ops, self._embedding, config.vocab_size)
        # the largest matrix first, while little else is packed: it is in memory twice for a moment
        if self._loaded_head is None:
            self._head = packed_tied_head(plan.part, ops, self._embedding, config.vocab_size)
        else:
            plan.fill(self._loaded_head)
            head, self._loaded_head = self._loaded_head, None
            self._head = packed_head(plan.part, ops, head, config.vocab_size)
            del head
        release_freed_memory()
        layers = []
        for i, window in enumerate(config.sliding_window):
            weights = self._loaded[i]
            assert weights is not None
            layers.append(weights.pack(ops, plan, config.norm_eps, window))
            self._loaded[i] = None
        del self._loaded
        self._layers = tuple(layers)
        plan.fill(self._loaded_norm)
        norm = self._loaded_norm
        if config.norm_offset:
            norm = norm.float() + config.norm_offset
        self._final_norm = ops.pack_norm(norm, config.norm_eps)
        self._cuts = dict(plan.cuts)
        del self._loaded_norm, self._loaded_head, self._plan
        products = [w for x in self._layers for w in (x.qkv, x.o, x.mlp)]
        self._weight_bytes = sum(product.num_bytes for product in (*products, self._head))
        self._weight_bytes += self._embedding.numel() * self._embedding.element_size()
        # norms, of which kernels keep float32
        in_layer = 2 + (self.names.after_attention is not None) + (self.names.after_mlp is not None)
        norms = (in_layer * config.num_layers + 1) * config.hidden_size
        norms += 2 * config.num_layers * config.head_dim * config.qk_norm
        self._weight_bytes += 4 * norms
        self._rope = self._packed_rope(config.rope)
        self._local_rope = None if config.local_rope is None else self._packed_rope(config.local_rope)

    def _packed_rope(self, rope: RopeConfig) -> Rope:
        return packed_rope(self._ops, rope, self.config.head_dim, self.config.max_model_len)

    @classmethod
    def experts_one_by_one(cls) -> bool:
        return cls.sparse is SparseWeights

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return (layer_spec(self.config),) * self.config.num_layers

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        ops = self._ops
        captured: dict[int, Tensor] = {}
        rope = ops.rope_rows(self._rope, batch.positions)
        local = None if self._local_rope is None else ops.rope_rows(self._local_rope, batch.positions)
        softcap = self.config.attn_softcap
        layers = LayerPass(ops, self._heads, self._scale, rope, batch.slots, batch.attention, softcap, local)
        residual = ops.embedding(batch.token_ids, self._embedding)
        if self.config.embedding_scale is not None:
            residual = ops.scale(residual, self.config.embedding_scale)
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
        return finish_logits(self._ops, self._ops.logits(hidden, self._head), self._tail)

    @property
    def _tail(self) -> LogitsTail:
        cap = self.config.logit_softcap
        return () if cap is None else (("softcap", cap),)

    def linear_sites(self) -> tuple[LinearSite, ...]:
        """No experts, no latent attention."""
        config, names = self.config, self.names
        dim, hidden, inner = config.head_dim, config.hidden_size, config.intermediate_size
        rows_q, rows_kv = config.num_heads * dim, config.num_kv_heads * dim
        dims = config.rope.order(dim)
        q_order, k_order, qkv_order = orders_of(dims, rows_q, rows_kv)
        sites = []
        for i, layer in enumerate(self._layers):

            def part(name: str, outputs: int, rows: Tensor | None = None, i: int = i) -> SitePart:
                stored = name.format(i=i)
                cut = self._cuts.get(stored)
                if cut is None and config.part.size > 1:
                    raise NotImplementedError(
                        f"{stored} is divided among ranks as it is packed in the checkpoint"
                    )
                return SitePart(stored.removesuffix(".weight"), outputs, rows, cut)

            def site(weight: Linear, inputs: int, *parts: SitePart) -> None:
                sites.append(LinearSite(weight, inputs, parts))

            if isinstance(layer.qkv, SplitQkv):
                # Every rank has these whole (`SplitQkv`).
                ranks = config.part.size
                for name, weight, rows in (
                    (names.q, layer.qkv.q, rows_q * ranks),
                    (names.k, layer.qkv.k, rows_kv * ranks // config.kv_copies),
                ):
                    site(weight, hidden, SitePart(name.format(i=i).removesuffix(".weight"), rows))
                site(layer.qkv.v, hidden, part(names.v, rows_kv))
            elif isinstance(layer.qkv, Linear):
                parts = [
                    part(names.q, rows_q, q_order),
                    part(names.k, rows_kv, k_order),
                    part(names.v, rows_kv),
                ]
                if names.qkv is not None:
                    parts = [part(names.qkv, rows_q + 2 * rows_kv, qkv_order)]
                site(layer.qkv, hidden, *parts)
            if isinstance(layer.o, Linear):
                site(layer.o, rows_q, part(names.o, hidden))
            if isinstance(layer.mlp, DenseMlp):
                halves = [part(names.gate, inner), part(names.up, inner)]
                if names.gate_up is not None:
                    halves = [part(names.gate_up, 2 * inner)]
                site(layer.mlp.gate_up, hidden, *halves)
                site(layer.mlp.down, inner, part(names.down, hidden))
        return tuple(sites)

    def operations(self) -> Ops:
        return self._ops

    def with_operations(self, ops: Ops) -> DecoderModel:
        other = copy.copy(self)
        other._ops = ops
        return other

    def shared_weights(self) -> SharedWeights:
        return SharedWeights(self._embedding, self._head, self._ops, self._tail)

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

"""EAGLE-3 heads (Li et al. 2025, arXiv:2503.01840): one decoder layer over token and feature side by side.

::

    target's hidden states entering some layers -> fc -> feature g          (combine; once per token the target reads)

    token -> embedding -> input_layernorm --+
                                            +-- [2H] -> attention, MLP -> norm -> lm_head   (draft vocabulary)
    feature g --------> hidden_norm --------+       |            |
        +------------ residual ---------------------+            +--> the next row's feature

The layer's output before the last norm is the feature of the next row, in place of a g that only the target could give.

What published heads vary: ``norm_before_residual`` (the residual starts at the normalised feature), ``norm_before_fc``
(one norm over all target layers' states side by side), ``fc_norm`` (one for each of them), ``norm_output`` (3.1: the
output after the last norm is fed back), several layers (only the first reads the token), and whether embedding, output
layer and draft vocabulary are the head's own.

Heads for DeepSeek and Kimi have latent attention (`models.latent`), over token and feature side by side, too.

P-EAGLE heads (arXiv:2602.01469) have the same layers and draft all tokens in one pass: a row whose token or
feature is not known yet reads a mask token, and what ``fc`` makes of the learned ``mask_hidden``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.linear import NativeLinear
from draftwise.kernels.cpu.rounds import FeatureJoin
from draftwise.kernels.handles import Linear, Norm
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import finish_logits
from draftwise.models.config import ModelConfig
from draftwise.models.heads.base import HeadOutput, TargetLink, logits_tail, pick_rows
from draftwise.models.heads.layered import LayeredHead
from draftwise.models.latent import LatentWeights
from draftwise.models.layers import DenseLayer, DenseNames, LayerPass, LayerWeights, layer_spec, packed_rope
from draftwise.models.mlp import load_linear
from draftwise.models.weights import QuantizedLinear, WeightPlan
from draftwise.types import StepInput, TargetOutput

HEAD_NAMES = DenseNames(
    input_norm="layers.{i}.input_layernorm.weight",
    q="layers.{i}.self_attn.q_proj.weight",
    k="layers.{i}.self_attn.k_proj.weight",
    v="layers.{i}.self_attn.v_proj.weight",
    o="layers.{i}.self_attn.o_proj.weight",
    q_norm="layers.{i}.self_attn.q_norm.weight",
    k_norm="layers.{i}.self_attn.k_norm.weight",
    post_norm="layers.{i}.post_attention_layernorm.weight",
    gate="layers.{i}.mlp.gate_proj.weight",
    up="layers.{i}.mlp.up_proj.weight",
    down="layers.{i}.mlp.down_proj.weight",
)
"""Names of a head's tensors in the plan. Published EAGLE-3 heads say ``midlayer.`` for ``layers.0.``."""


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Which layers' entering hidden states an EAGLE-3 head reads when its config does not say.

    Example: of 32 layers those entering 2, 16 and 29.
    """
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """Settings of a head's config.json and tensors beyond its layers' shape."""

    feature_layers: tuple[int, ...] | None
    """Target layers read, ascending whatever the order in a config: published engines collect them as the target's pass
    comes by. None: the hidden states after the target's final norm, without fc."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = True
    draft_vocab_size: int | None = None  # None: the target's
    logit_scale: float = 1.0
    mask_token: int | None = None
    """P-EAGLE: the token of rows that stand for drafts; the head has a ``mask_hidden``."""


class Eagle3Head(LayeredHead):
    """See the module's text. ``config`` describes the head's own layers; its vocabulary size is not looked at."""

    what = "the head"

    def __init__(
        self,
        config: ModelConfig,
        options: Eagle3Options,
        link: TargetLink,
        ops: Ops,
        plan: WeightPlan,
        target_ids: Tensor | None = None,
        mask_shape: tuple[int, ...] = (),
    ) -> None:
        """Declare the parameters.

        Args:
            target_ids: int64 [Vd], the target's id of each draft token; None: the draft vocabulary is the target's.
            mask_shape: of the stored ``mask_hidden``, looked at with ``options.mask_token``. What is wanted are as many
                hidden states of the target side by side as layers are read, as [n], [1, n] or [1, 1, n].

        Raises:
            ModelLoadError: the head does not fit the target; the field is named.
        """
        self.options = options
        _check_layers(options, link)
        super().__init__(
            config,
            link,
            ops,
            plan,
            feature_layers=options.feature_layers,
            own_embedding=options.own_embedding,
            own_head=options.own_head,
            draft_vocab_size=options.draft_vocab_size,
            target_ids=target_ids,
        )
        hidden = config.hidden_size
        weights = LayerWeights if config.latent is None else LatentWeights
        self._loaded: list[LayerWeights | None] = [
            weights(config, HEAD_NAMES, plan, i, qkv_inputs=None if i else 2 * hidden)
            for i in range(config.num_layers)
        ]
        self._loaded_hidden_norm = plan.tensor("layers.0.hidden_norm.weight", (hidden,))
        for i in range(1, config.num_layers):
            plan.ignored.add(f"layers.{i}.hidden_norm.weight")  # some writers have one in every layer
        self._loaded_norm = plan.tensor("norm.weight", (hidden,))
        self._declare_fc(plan)
        plan.ignored.add("mask_hidden")
        self._loaded_mask = None if options.mask_token is None else self._declare_mask(plan, mask_shape)
        self._weight_bytes = plan.num_bytes
        self._plan = plan
        plan.streams = True

    def _declare_fc(self, plan: WeightPlan) -> None:
        options = self.options
        self._loaded_fc: Tensor | QuantizedLinear | None = None
        self._loaded_fc_bias: Tensor | None = None
        self._loaded_input_norm: Tensor | None = None
        self._loaded_fc_norms: list[Tensor] = []
        if options.feature_layers is None:
            return
        size, count = self._link.hidden_size, len(options.feature_layers)
        self._loaded_fc = plan.linear([("fc.weight", self.feature_size)], size * count)
        if options.fc_bias:
            self._loaded_fc_bias = plan.tensor("fc.bias", (self.feature_size,))
        if options.norm_before_fc:
            self._loaded_input_norm = plan.tensor("input_norm.weight", (size * count,))
        if options.fc_norm:
            self._loaded_fc_norms = [plan.tensor(f"fc_norm.{i}.weight", (size,)) for i in range(count)]

    def _declare_mask(self, plan: WeightPlan, shape: tuple[int, ...]) -> Tensor:
        token, vocab = self.options.mask_token, self._link.vocab_size
        if token is None or not 0 <= token < vocab:
            raise ModelLoadError(f"mask token {token} is not in the vocabulary of {vocab} tokens")
        width = self._link.hidden_size * len(self.options.feature_layers or (0,))
        if not shape or math.prod(shape) != width or shape[-1] != width:  # any number of ones before it
            shape = (1, width)
        self.mask_token = token
        return plan.tensor("mask_hidden", shape)

    def finish(self) -> None:
        config, ops, plan = self.config, self._ops, self._plan

        def norm(weight: Tensor) -> Norm:
            plan.fill(weight)
            return ops.pack_norm(weight, config.norm_eps)

        self._finish_ends(plan)
        layers: list[DenseLayer] = []
        for i, window in enumerate(config.sliding_window):
            weights = self._loaded[i]
            assert weights is not None
            layers.append(weights.pack(ops, plan, config.norm_eps, window))
            self._loaded[i] = None
        self._layers = tuple(layers)
        self._hidden_norm = norm(self._loaded_hidden_norm)
        self._norm = norm(self._loaded_norm)
        self._tail = logits_tail(
            self._link, own_head=self.options.own_head, logit_scale=self.options.logit_scale
        )
        self._fc: Linear | None = None
        if self._loaded_fc is not None:
            self._fc = load_linear(ops, plan, self._loaded_fc, self._loaded_fc_bias)
        self._input_norm = None if self._loaded_input_norm is None else norm(self._loaded_input_norm)
        self._fc_norms = [norm(weight) for weight in self._loaded_fc_norms]
        self._rope = packed_rope(ops, config.rope, config.head_dim, self.max_model_len)
        if self._loaded_mask is not None:
            plan.fill(self._loaded_mask)
            mask = self._loaded_mask.reshape(1, -1)
            with torch.inference_mode():
                self.mask_feature = self._join(
                    list(mask.chunk(len(self.options.feature_layers or (0,)), dim=-1))
                )
        del self._loaded_mask
        del self._loaded, self._loaded_hidden_norm, self._loaded_norm, self._plan
        del self._loaded_fc, self._loaded_fc_bias, self._loaded_input_norm, self._loaded_fc_norms

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return (layer_spec(self.config),) * self.config.num_layers

    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        if self.feature_layers is None:
            return pick_rows(output.hidden, rows)
        return self._join([pick_rows(output.captured[layer], rows) for layer in self.feature_layers])

    def feature_join(self) -> FeatureJoin | None:
        if self.feature_layers is None:
            return FeatureJoin()
        if self._input_norm is not None or self._fc_norms or not isinstance(self._fc, NativeLinear):
            return None
        return FeatureJoin(self.feature_layers, self._fc)

    def _join(self, parts: list[Tensor]) -> Tensor:
        """Features [n, F] of some rows, of the target's hidden states [n, Ht] that enter each of ``feature_layers``."""
        ops = self._ops
        if self.feature_layers is None:
            return parts[0]
        if self._input_norm is not None:
            joined = ops.rms_norm(torch.cat(parts, dim=-1), self._input_norm)
            parts = list(joined.chunk(len(parts), dim=-1))
        if self._fc_norms:
            parts = [ops.rms_norm(part, norm) for part, norm in zip(parts, self._fc_norms, strict=True)]
        assert self._fc is not None
        return ops.join_layers([part.contiguous() for part in parts], self._fc)

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        ops = self._ops
        rope = ops.rope_rows(self._rope, batch.positions)
        scale = self.config.attn_scale or self.config.head_dim**-0.5
        layers = LayerPass(ops, self._heads, scale, rope, batch.slots, batch.attention)
        first = self._layers[0].input_norm
        assert first is not None
        embedded = ops.rms_norm(ops.embedding(batch.token_ids, self._embedding), first)
        normed = ops.rms_norm(features, self._hidden_norm)
        residual = normed if self.options.norm_before_residual else ops.copy(features)
        hidden = ops.concat(embedded, normed)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            product = layers.run(layer, kv.layer(i), hidden, residual)
            norm = self._layers[i + 1].input_norm if i < last else self._norm
            assert norm is not None
            hidden = ops.add_rms_norm(product, residual, norm)
        return HeadOutput(hidden, ops.copy(hidden) if self.options.norm_output else residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self._ops, self._ops.logits(hidden, self._head), self._tail)

    def weight_bytes(self) -> int:
        return self._weight_bytes


def _check_layers(options: Eagle3Options, link: TargetLink) -> None:
    layers: Sequence[int] = options.feature_layers or ()
    if any(layer < 0 or layer > link.num_layers for layer in layers):
        raise ModelLoadError(
            f"eagle_aux_hidden_state_layer_ids {list(layers)} are not among the target's layers 0 to "
            f"{link.num_layers}: the head is for another target"
        )
    if options.feature_layers is not None and not layers:
        raise ModelLoadError("eagle_aux_hidden_state_layer_ids is empty")
    if tuple(sorted(set(layers))) != tuple(layers):
        raise ModelLoadError(f"eagle_aux_hidden_state_layer_ids {list(layers)} must rise")

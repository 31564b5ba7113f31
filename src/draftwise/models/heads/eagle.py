"""EAGLE heads (Li et al. 2024, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858, drafts trees with the same heads).

::

    token -> embedding --+
                         +-- [2H] -> fc -> decoder layer without its first norm --+--> the target's lm_head
    target's hidden -----+                                                        |
    state (final norm)                                                            +--> the next row's feature

The head imitates the target's last hidden state, so the target's own output layer reads it, and there is no last norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.cpu.rounds import FeatureJoin
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import finish_logits
from draftwise.models.config import ModelConfig
from draftwise.models.heads.base import HeadModel, HeadOutput, TargetLink, logits_tail, pick_rows
from draftwise.models.heads.eagle3 import HEAD_NAMES
from draftwise.models.layers import DenseLayer, LayerPass, LayerWeights, packed_rope
from draftwise.models.mlp import load_linear
from draftwise.models.weights import WeightPlan
from draftwise.types import StepInput, TargetOutput


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """Settings from a head's tensors beyond its layers' shape."""

    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    logit_scale: float = 1.0


class EagleHead(HeadModel):
    """See the module's text. ``config`` describes the head's own layers."""

    def __init__(
        self,
        config: ModelConfig,
        options: EagleOptions,
        link: TargetLink,
        ops: Ops,
        plan: WeightPlan,
    ) -> None:
        """Declare the parameters. Raises ModelLoadError if the head is for another target; the field is named."""
        if config.hidden_size != link.hidden_size:
            raise ModelLoadError(
                f"hidden_size {config.hidden_size} is not the target's {link.hidden_size}: the head is for another one"
            )
        self.config = config
        self.options = options
        self.dtype = ops.dtype
        self.device = ops.device
        self.capturable = ops.capturable
        hidden = config.hidden_size
        self.feature_size = hidden
        self.draft_vocab_size = link.vocab_size
        self.max_model_len = link.max_model_len
        self._ops = ops
        self._link = link
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._embedding = link.embedding
        if options.own_embedding:
            self._embedding = plan.tensor("embed_tokens.weight", (link.vocab_size, hidden))
        self._loaded_fc = plan.linear([("fc.weight", hidden)], 2 * hidden)
        self._loaded_bias = plan.tensor("fc.bias", (hidden,)) if options.fc_bias else None
        self._loaded: list[LayerWeights | None] = [
            LayerWeights(config, HEAD_NAMES, plan, i, input_norm=i > 0) for i in range(config.num_layers)
        ]
        plan.ignored.add("layers.0.input_layernorm.weight")
        self._loaded_head = (
            plan.tensor("lm_head.weight", (link.vocab_size, hidden)) if options.own_head else None
        )
        self._weight_bytes = plan.num_bytes
        self._plan = plan
        plan.streams = True

    def finish(self) -> None:
        config, ops, plan = self.config, self._ops, self._plan
        if self.options.own_embedding:
            plan.fill(self._embedding)
        self._fc = load_linear(ops, plan, self._loaded_fc, self._loaded_bias)
        layers: list[DenseLayer] = []
        for i, window in enumerate(config.sliding_window):
            weights = self._loaded[i]
            assert weights is not None
            layers.append(weights.pack(ops, plan, config.norm_eps, window))
            self._loaded[i] = None
        self._layers = tuple(layers)
        self._head = self._link.head
        self._tail = logits_tail(
            self._link, own_head=self.options.own_head, logit_scale=self.options.logit_scale
        )
        if self._loaded_head is not None:
            plan.fill(self._loaded_head)
            self._head = ops.pack_head(self._loaded_head)
        self._rope = packed_rope(ops, config.rope, config.head_dim, self.max_model_len)
        del self._loaded, self._loaded_fc, self._loaded_bias, self._loaded_head, self._plan

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        spec = KVLayerSpec.dense(self.config.num_kv_heads, self.config.head_dim)
        return (spec,) * self.config.num_layers

    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        return pick_rows(output.hidden, rows)

    def feature_join(self) -> FeatureJoin:
        return FeatureJoin()

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        ops = self._ops
        rope = ops.rope_rows(self._rope, batch.positions)
        layers = LayerPass(ops, self._heads, self.config.head_dim**-0.5, rope, batch.slots, batch.attention)
        embedded = ops.embedding(batch.token_ids, self._embedding)
        residual = ops.linear(ops.concat(embedded, features), self._fc)
        last = len(self._layers) - 1
        hidden = residual  # q, k and v read it before attention's output is added to it in place
        for i, layer in enumerate(self._layers):
            product = layers.run(layer, kv.layer(i), hidden, residual)
            if i == last:
                hidden = ops.add(product, residual)
            else:
                norm = self._layers[i + 1].input_norm
                assert norm is not None
                hidden = ops.add_rms_norm(product, residual, norm)
        return HeadOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self._ops, self._ops.logits(hidden, self._head), self._tail)

    def weight_bytes(self) -> int:
        return self._weight_bytes

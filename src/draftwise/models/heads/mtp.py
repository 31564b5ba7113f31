"""Multi-token-prediction layers (DeepSeek-V3, arXiv:2412.19437, section 2.2): decoder layers trained with the target.

::

    token -> embedding -> enorm --+
                                  +-- [2H] -> proj -> decoder layer --+--> norm --> the target's lm_head
    feature -----------> hnorm ---+                                   |      |
                                                                      |      +--> the next row's feature (Qwen, MiMo)
                                                                      +---------> the next row's feature (DeepSeek)

The first feature is the target's hidden state after its final norm. A checkpoint may have several layers: draft d then
uses layer d, and the last one is applied again for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.cpu.rounds import FeatureJoin
from draftwise.kernels.handles import Linear, Norm
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import finish_logits
from draftwise.models.config import ModelConfig
from draftwise.models.heads.base import HeadModel, HeadOutput, TargetLink, logits_tail, pick_rows
from draftwise.models.heads.eagle3 import HEAD_NAMES
from draftwise.models.heads.mtp_names import MtpForm
from draftwise.models.layers import DenseLayer, LayerPass, LayerWeights, layer_spec, packed_rope
from draftwise.models.mlp import ExpertNames, load_linear
from draftwise.models.weights import WeightPlan
from draftwise.types import StepInput, TargetOutput


@dataclass(frozen=True, slots=True)
class _Layer:
    """One MTP layer's packed weights."""

    token_norm: Norm
    feature_norm: Norm
    proj: Linear  # [H, 2H]
    layer: DenseLayer
    norm: Norm


class MtpHead(HeadModel):
    """See the module's text. ``config`` describes the decoder layers, ``num_layers`` of them."""

    def __init__(
        self,
        config: ModelConfig,
        form: MtpForm,
        link: TargetLink,
        ops: Ops,
        plan: WeightPlan,
        *,
        own_embedding: bool = False,
        own_head: bool = False,
        experts: ExpertNames | None = None,
        weights: type[LayerWeights] = LayerWeights,
    ) -> None:
        """Declare the parameters. ``own_embedding``, ``own_head``: whether the first layer brings its own, which all
        layers then use. ``experts``: names of the experts' tensors, if layers have some. ``weights``: what a
        layer is made of.

        Raises:
            ModelLoadError: the layers are for a target of another hidden size.
        """
        if config.hidden_size != link.hidden_size:
            raise ModelLoadError(
                f"hidden_size {config.hidden_size} is not the target's {link.hidden_size}: the MTP layers are for "
                "another target"
            )
        self.config = config
        self.form = form
        self.dtype = ops.dtype
        self.device = ops.device
        self.capturable = ops.capturable and experts is None  # rows are grouped by expert on the host
        hidden = config.hidden_size
        self.feature_size = hidden
        self.num_depths = config.num_layers
        self.draft_vocab_size = link.vocab_size
        self.max_model_len = link.max_model_len
        self._ops = ops
        self._link = link
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._own_embedding = own_embedding
        self._embedding = link.embedding
        if own_embedding:
            self._embedding = plan.tensor("0.embed_tokens.weight", (link.vocab_size, hidden))
        count = 1 if form.shared else config.num_layers
        self._norms = [
            [plan.tensor(f"{i}.{part}.weight", (hidden,)) for part in ("enorm", "hnorm", "norm")]
            for i in range(count)
        ]
        self._projections = [plan.linear([(f"{i}.proj.weight", hidden)], 2 * hidden) for i in range(count)]
        names = HEAD_NAMES if experts is None else replace(HEAD_NAMES, experts=experts)
        self._loaded = [weights(config, names, plan, i) for i in range(config.num_layers)]
        self._loaded_head = plan.tensor("0.lm_head.weight", (link.vocab_size, hidden)) if own_head else None
        self._weight_bytes = plan.num_bytes
        self._plan = plan
        plan.streams = True

    def finish(self) -> None:
        config, ops, plan = self.config, self._ops, self._plan
        if self._own_embedding:
            plan.fill(self._embedding)
        norms = []
        for weights in self._norms:
            for weight in weights:
                plan.fill(weight)
            norms.append(
                [ops.pack_norm(_shifted(weight, config.norm_offset), config.norm_eps) for weight in weights]
            )
        projections = [load_linear(ops, plan, projection) for projection in self._projections]
        layers = []
        for i, loaded in enumerate(self._loaded):
            part = 0 if self.form.shared else i
            token_norm, feature_norm, norm = norms[part]
            packed = loaded.pack(ops, plan, config.norm_eps, None)
            layers.append(_Layer(token_norm, feature_norm, projections[part], packed, norm))
        self._layers = tuple(layers)
        self._head = self._link.head
        self._tail = logits_tail(self._link, own_head=self._loaded_head is not None)
        if self._loaded_head is not None:
            plan.fill(self._loaded_head)
            self._head = ops.pack_head(self._loaded_head)
        self._rope = packed_rope(ops, config.rope, config.head_dim, self.max_model_len)
        del self._norms, self._projections, self._loaded, self._loaded_head, self._plan

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return (layer_spec(self.config),) * self.config.num_layers

    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        return pick_rows(output.hidden, rows)

    def feature_join(self) -> FeatureJoin:
        return FeatureJoin()

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        ops, form, mtp = self._ops, self.form, self._layers[depth]
        rope = ops.rope_rows(self._rope, batch.positions)
        scale = self.config.attn_scale or self.config.head_dim**-0.5
        layers = LayerPass(ops, self._heads, scale, rope, batch.slots, batch.attention)
        embedded = ops.embedding(batch.token_ids, self._embedding)
        if form.zero_first:  # of the row of token 1, which stands at position 0
            embedded = ops.clear_first(embedded, batch.positions)
        token = ops.rms_norm(embedded, mtp.token_norm)
        feature = ops.rms_norm(features, mtp.feature_norm)
        joined = ops.concat(token, feature) if form.token_first else ops.concat(feature, token)
        residual = ops.linear(joined, mtp.proj)
        assert mtp.layer.input_norm is not None
        hidden = ops.rms_norm(residual, mtp.layer.input_norm)
        product = layers.run(mtp.layer, kv.layer(depth), hidden, residual)
        hidden = ops.add_rms_norm(product, residual, mtp.norm)
        return HeadOutput(hidden, hidden if form.normed_feature else residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return finish_logits(self._ops, self._ops.logits(hidden, self._head), self._tail)

    def weight_bytes(self) -> int:
        return self._weight_bytes


def _shifted(weight: Tensor, offset: float) -> Tensor:
    """A norm's weight [H] as it multiplies; families that multiply by 1 + w store w."""
    return weight.float() + offset if offset else weight

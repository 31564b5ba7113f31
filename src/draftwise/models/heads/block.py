"""Block drafters: DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147). A few decoder layers fill in a block of
masks in one pass.

::

    target's hidden states behind some layers -> fc -> hidden_norm -> feature    (combine; once per token)

    feature of token s -> K and V of every layer, at position s                 (forward, depth CONTEXT)

    root, mask, mask, mask -> embedding -> layers -> norm -> output layer       (forward, depth BLOCK)
      |_____ each row sees the features' keys and all rows of the block __|

The rows of a block stand at the positions of root and drafts. Row i says which token comes to its own place (DFlash,
whose root row says nothing), or to the next one (DSpark: ``from_root``). Embedding and output layer are the target's,
or the drafter's own, with a vocabulary of its own perhaps. DSpark, Domino and DFlash2 add what the tokens drafted
before say (`models.heads.corrections`); DFlash2 has convolutions over the rows of a block (`models.heads.block_conv`).

Rows and slots are those of every head (`models.heads.base`): the feature of token s - 1 stands in slot s, rotated at
position s - 1. A block behind n known tokens stands in slots n .. n + K, rotated at positions n - 1 .. n - 1 + K; it is
written over when the next tokens' features come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.handles import Linear, Norm
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.config import ModelConfig
from draftwise.models.heads.base import HeadOutput, TargetLink, pick_rows
from draftwise.models.heads.block_conv import BlockConvs, ConvShape
from draftwise.models.heads.corrections import Correction, DominoHead, PathSelector
from draftwise.models.heads.eagle3 import HEAD_NAMES
from draftwise.models.heads.layered import LayeredHead
from draftwise.models.heads.markov import MarkovHead, MarkovShape
from draftwise.models.layers import DenseLayer, LayerPass, LayerWeights, SplitKv, packed_rope
from draftwise.models.mlp import load_linear
from draftwise.models.weights import QuantizedLinear, WeightPlan
from draftwise.types import StepInput, TargetOutput

CONTEXT: Final = 0
"""The pass that stores features."""
BLOCK: Final = 1
"""The pass over root and masks; its features are not read."""


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Settings of a drafter's config.json and tensors beyond its layers' shape."""

    feature_layers: tuple[int, ...]
    """Target layers whose *entering* hidden states are joined, in this order; number L: what leaves the last one."""
    mask_token: int
    block_size: int  # rows of a block, the root's among them, as it was trained
    from_root: bool = False  # row i says what comes behind it
    causal: tuple[
        bool, ...
    ] = ()  # of each layer: rows of a block do not see those behind them; shorter: they do
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None  # None: the target's
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    markov: MarkovShape | None = None
    domino: tuple[int, int, int] | None = None
    """Domino's correction: width of the GRU, of its projection, number of the first draft that is corrected."""
    selector: tuple[int, int] | None = None
    """DFlash2's path selector: rank, candidates."""
    convs: ConvShape | None = None

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.block_size if self.from_root else self.block_size - 1


class BlockHead(LayeredHead):
    """See the module's text. ``config`` describes the drafter's own layers; its vocabulary size is not looked at."""

    what = "the drafter"

    num_passes = 2

    def __init__(
        self,
        config: ModelConfig,
        options: BlockOptions,
        link: TargetLink,
        ops: Ops,
        plan: WeightPlan,
        target_ids: Tensor | None = None,
    ) -> None:
        """Declare the parameters.

        Args:
            target_ids: int64 [Vd], the target's id of each draft token; None: the draft vocabulary is the target's.

        Raises:
            ModelLoadError: the drafter does not fit the target; the field is named.
        """
        self.options = options
        self.mask_token = options.mask_token
        self.vocab_size = link.vocab_size  # the target's
        _check_options(options, link)
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
        self._context_heads = HeadShape(0, config.num_kv_heads, config.head_dim)
        hidden = config.hidden_size
        self._loaded: list[LayerWeights | None] = [
            LayerWeights(config, HEAD_NAMES, plan, i, split_kv=True) for i in range(config.num_layers)
        ]
        joined = link.hidden_size * len(options.feature_layers)
        self._loaded_fc: Tensor | QuantizedLinear = plan.linear([("fc.weight", hidden)], joined)
        self._loaded_hidden_norm = plan.tensor("hidden_norm.weight", (hidden,))
        self._loaded_norm = plan.tensor("norm.weight", (hidden,))
        self.correction: Correction | None = None
        if options.markov is not None:
            self.correction = MarkovHead(options.markov, link.vocab_size, self.draft_vocab_size, hidden, plan)
        elif options.domino is not None:
            self.correction = DominoHead(
                *options.domino, self._embedding, self.draft_vocab_size, hidden, plan
            )
        elif options.selector is not None:
            if self.target_ids is not None:
                raise ModelLoadError("a path selector with a draft vocabulary is not supported")
            self.correction = PathSelector(*options.selector, link.vocab_size, hidden, plan)
        self._convs: BlockConvs | None = None
        if options.convs is not None:
            self._convs = BlockConvs(options.convs, config.num_layers, hidden, plan)
        self._weight_bytes = plan.num_bytes
        self._plan = plan
        plan.streams = True

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.options.max_drafts

    @property
    def from_root(self) -> bool:
        """Whether the root's row gives the first draft; else the first mask's does."""
        return self.options.from_root

    @property
    def first_row(self) -> int:
        """The row of a block that gives the first draft."""
        return 0 if self.from_root else 1

    def rows_of(self, drafts: int) -> int:
        """Rows of a block for so many drafts: root and masks."""
        return self.first_row + drafts

    def finish(self) -> None:
        config, ops, plan = self.config, self._ops, self._plan

        def norm(weight: Tensor) -> Norm:
            plan.fill(weight)
            return ops.pack_norm(weight, config.norm_eps)

        self._finish_ends(plan)
        layers: list[DenseLayer] = []
        self._kv: list[Linear] = []
        for i, window in enumerate(config.sliding_window):
            weights = self._loaded[i]
            assert weights is not None
            layer = weights.pack(ops, plan, config.norm_eps, window)
            assert isinstance(layer.qkv, SplitKv)
            causal = i < len(self.options.causal) and self.options.causal[i]
            self._kv.append(layer.qkv.kv)
            layer = replace(layer, whole=not causal)
            layers.append(layer if self._convs is None else self._convs.wrap(i, layer, ops, plan))
            self._loaded[i] = None
        self._layers = tuple(layers)
        self._hidden_norm = norm(self._loaded_hidden_norm)
        self._norm = norm(self._loaded_norm)
        self._fc = load_linear(ops, plan, self._loaded_fc)
        if self.correction is not None:
            self.correction.finish(ops, plan)
        # a block at the end of a text reaches further than any token
        reach = self.max_model_len + self.options.block_size
        self._rope = packed_rope(ops, config.rope, config.head_dim, reach)
        del self._loaded, self._loaded_hidden_norm, self._loaded_norm, self._plan
        del self._loaded_fc

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        spec = KVLayerSpec.dense(self.config.num_kv_heads, self.config.head_dim)
        return (spec,) * self.config.num_layers

    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        assert self.feature_layers is not None
        parts = [pick_rows(output.captured[layer], rows) for layer in self.feature_layers]
        return self._ops.join_layers(parts, self._fc, self._hidden_norm)

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = CONTEXT) -> HeadOutput:
        """``depth``: `CONTEXT` stores the features of rows, whose tokens are not read, and answers with what it was
        given; `BLOCK` reads rows of root and masks, and no features."""
        ops = self._ops
        rope = ops.rope_rows(self._rope, batch.positions)
        if depth == CONTEXT:
            for i, (layer, weight) in enumerate(zip(self._layers, self._kv, strict=True)):
                packed = ops.linear(features, weight)
                ops.qkv_rope_write(
                    packed, self._context_heads, rope, kv.layer(i), batch.slots, None, layer.k_norm
                )
            given = ops.copy(features)
            return HeadOutput(given, given)
        if self._convs is not None:
            rows, static, device = len(batch.token_ids), batch.attention.static, batch.token_ids.device
            if static is not None:  # of a captured pass nothing is copied from the host
                starts = torch.arange(0, rows, static.rows, device=device)
            else:
                starts = torch.from_numpy(batch.attention.query_start_np[:-1].astype(np.int64)).to(device)
            self._convs.begin(starts, rows)
        layers = LayerPass(ops, self._heads, self.config.head_dim**-0.5, rope, batch.slots, batch.attention)
        residual = ops.embedding(batch.token_ids, self._embedding)
        if self.options.embedding_scale is not None:
            residual = ops.scale(residual, self.options.embedding_scale)
        first = self._layers[0].input_norm
        assert first is not None
        hidden = ops.rms_norm(residual, first)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            product = layers.run(layer, kv.layer(i), hidden, residual)
            norm = self._layers[i + 1].input_norm if i < last else self._norm
            assert norm is not None
            hidden = ops.add_rms_norm(product, residual, norm)
        return HeadOutput(hidden, hidden)

    def recordable(self) -> bool:
        return self._convs is None

    def logits(self, hidden: Tensor) -> Tensor:
        options, ops = self.options, self._ops
        logits = ops.logits(hidden, self._head)
        if options.logit_scale != 1.0:
            logits = ops.scale(logits, options.logit_scale)
        return logits if options.logit_softcap is None else ops.softcap(logits, options.logit_softcap)

    def weight_bytes(self) -> int:
        return self._weight_bytes


def _check_options(options: BlockOptions, link: TargetLink) -> None:
    layers: Sequence[int] = options.feature_layers
    if not layers or any(layer < 0 or layer > link.num_layers for layer in layers):
        raise ModelLoadError(
            f"the target's layers whose states are read, {[layer - 1 for layer in layers]}, are not among its "
            f"{link.num_layers}: the drafter is for another target"
        )
    if len(set(layers)) != len(layers):
        raise ModelLoadError(f"target_layer_ids {[layer - 1 for layer in layers]} names a layer twice")
    if not 0 <= options.mask_token < link.vocab_size:
        raise ModelLoadError(
            f"mask token {options.mask_token} is not in the vocabulary of {link.vocab_size} tokens"
        )
    if options.block_size < 2:
        raise ModelLoadError(f"block_size {options.block_size} leaves no place for a draft")

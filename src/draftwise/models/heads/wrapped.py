"""The common part of heads that wrap another head and change some of its functions."""

from __future__ import annotations

from torch import Tensor

from draftwise.kernels.cpu.rounds import FeatureJoin
from draftwise.kv.storage import KVLayerSpec
from draftwise.models.heads.base import HeadModel
from draftwise.types import TargetOutput


class WrappedHead(HeadModel):
    """``inner``, finished, with its shape and storage."""

    def __init__(self, inner: HeadModel) -> None:
        self.inner = inner
        self.dtype = inner.dtype
        self.device = inner.device
        self.same_bits = inner.same_bits
        self.capturable = inner.capturable
        self.feature_size = inner.feature_size
        self.feature_layers = inner.feature_layers
        self.num_passes = inner.num_passes
        self.num_depths = inner.num_depths
        self.target_ids = inner.target_ids
        self.draft_vocab_size = inner.draft_vocab_size
        self.mask_token = inner.mask_token
        self.mask_feature = inner.mask_feature
        self.max_model_len = inner.max_model_len

    def finish(self) -> None:
        raise NotImplementedError("the wrapped head is finished before it is wrapped")

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return self.inner.kv_layout()

    def weight_bytes(self) -> int:
        return self.inner.weight_bytes()

    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        return self.inner.combine(output, rows)

    def feature_join(self) -> FeatureJoin | None:
        return self.inner.feature_join()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

"""The common part of models that wrap another model and change some of its functions."""

from __future__ import annotations

from draftwise.kv.states import StateSpec
from draftwise.kv.storage import KVLayerSpec
from draftwise.models.base import DecoderModel
from draftwise.models.config import ModelConfig, RawConfig


class WrappedDecoder(DecoderModel):
    """``inner``, finished, with its configuration and storage."""

    def __init__(self, inner: DecoderModel) -> None:
        self.inner = inner
        self.config = inner.config
        self.dtype = inner.dtype
        self.device = inner.device
        self.same_bits = inner.same_bits
        self.rows_in_order = inner.rows_in_order
        self.capturable = inner.capturable

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        raise NotImplementedError("the wrapped model parses")

    def finish(self) -> None:
        raise NotImplementedError("the wrapped model is finished before it is wrapped")

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return self.inner.kv_layout()

    def state_spec(self) -> StateSpec | None:
        return self.inner.state_spec()

    def weight_bytes(self) -> int:
        return self.inner.weight_bytes()

"""Qwen2 and Qwen2.5: biases on q, k and v; the upper layers may use a sliding window."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config, windows_by_layer
from draftwise.models.dense import DenseDecoder


class Qwen2Model(DenseDecoder):
    """The biases are part of the architecture, no field of ``config.json`` switches them off."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            sliding_window=windows_by_layer(raw, default=4096),
            qkv_bias=True,
        )

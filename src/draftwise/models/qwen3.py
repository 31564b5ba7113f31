"""Qwen3: norms on the queries and keys of each head, head_dim given apart from the hidden size."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config, windows_by_layer
from draftwise.models.dense import DenseDecoder


class Qwen3Model(DenseDecoder):
    """``attention_bias`` puts biases on q, k, v and o alike."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        bias = bool(raw.get("attention_bias", False))
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            sliding_window=windows_by_layer(raw, default=4096),
            head_dim=128,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
        )

"""Llama 2 and 3 (and the many models that use their architecture)."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config
from draftwise.models.dense import DenseDecoder


class LlamaModel(DenseDecoder):
    """``attention_bias`` puts biases on q, k, v and o alike, ``mlp_bias`` on the whole MLP."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        bias = bool(raw.get("attention_bias", False))
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
        )

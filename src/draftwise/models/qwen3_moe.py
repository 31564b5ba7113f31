"""Qwen3 with experts (Qwen3-30B-A3B, Qwen3-Coder): Qwen3's attention, a mixture of experts in most layers."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config, require_int
from draftwise.models.dense import DenseDecoder
from draftwise.models.sparse import qwen_experts


class Qwen3MoeModel(DenseDecoder):
    """A window, where it is used, is every layer's."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        bias = bool(raw.get("attention_bias", False))
        window = None
        if raw.get("use_sliding_window", False) and raw.get("sliding_window", 4096) is not None:
            window = require_int(raw, "sliding_window", 4096)
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            sliding_window=(window,) * require_int(raw, "num_hidden_layers"),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            experts=qwen_experts(raw, experts=128, top_k=8),
        )

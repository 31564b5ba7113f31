"""Qwen1.5 and Qwen2 with experts: Qwen2's attention, a mixture with a shared expert that has a gate of its own."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, OwnCodeLacks, RawConfig, dense_config
from draftwise.models.dense import DenseDecoder
from draftwise.models.sparse import qwen_experts


class Qwen2MoeModel(DenseDecoder):
    """Biases on q, k and v unless ``qkv_bias`` says otherwise. Published models use no window."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        if raw.get("use_sliding_window", False) or set(raw.get("layer_types") or ()) - {"full_attention"}:
            raise OwnCodeLacks("windows (use_sliding_window, layer_types) are not supported for Qwen2-MoE")
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            qkv_bias=bool(raw.get("qkv_bias", True)),
            experts=qwen_experts(raw, experts=60, top_k=4, shared="gated"),
        )

"""Phi-3, Phi-3.5 and Phi-4 (text): Llama with fused projections, some rotated dimensions only, and LongRoPE."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config, layered, require_int
from draftwise.models.dense import DenseDecoder
from draftwise.models.layers import DenseNames
from draftwise.models.rope import parse_rope


class Phi3Model(DenseDecoder):
    """Which factors of LongRoPE are taken is decided by the model length, see `models.rope`."""

    names = DenseNames(
        qkv="model.layers.{i}.self_attn.qkv_proj.weight", gate_up="model.layers.{i}.mlp.gate_up_proj.weight"
    )

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        raw = layered(raw, {"rms_norm_eps": 1e-5})
        layers = require_int(raw, "num_hidden_layers")
        window = require_int(raw, "sliding_window") if raw.get("sliding_window") is not None else None
        dim = require_int(
            raw, "head_dim", require_int(raw, "hidden_size") // require_int(raw, "num_attention_heads")
        )
        positions = require_int(raw, "max_position_embeddings", 4096)
        params = raw.get("rope_parameters") or raw.get("rope_scaling")
        if isinstance(params, dict):  # older names of one thing
            old = params.get("rope_type", params.get("type"))
            params = {**params, "rope_type": "longrope" if old in ("su", "yarn") else old or "default"}
            raw = layered({"rope_parameters": params, "rope_scaling": None}, raw)
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            sliding_window=(window,) * layers,
            rope=parse_rope(raw, dim, positions, max_model_len, partial=True),
        )

"""GLM-4.5 and 4.6: half of a head's dimensions rotated, experts chosen by sigmoids with a correction, a shared expert.

Checkpoints carry MTP layers behind the decoder's; method ``mtp`` drafts with them.
"""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config, layered, require_int
from draftwise.models.dense import DenseDecoder
from draftwise.models.layers import DenseNames
from draftwise.models.mlp import ExpertNames
from draftwise.models.rope import parse_rope
from draftwise.models.sparse import deepseek_experts

_SHARED = "model.layers.{i}.mlp.shared_experts."
SHARED_EXPERTS = ExpertNames(
    shared_gate=_SHARED + "gate_proj.weight",
    shared_up=_SHARED + "up_proj.weight",
    shared_down=_SHARED + "down_proj.weight",
    correction="model.layers.{i}.mlp.gate.e_score_correction_bias",
)
"""As DeepSeek-V3 names them, too."""


class Glm4MoeModel(DenseDecoder):
    """``attention_bias`` puts biases on q, k and v, not on o."""

    names = DenseNames(experts=SHARED_EXPERTS)

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        dim = require_int(
            raw, "head_dim", require_int(raw, "hidden_size") // require_int(raw, "num_attention_heads")
        )
        raw = layered(raw, {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5})
        rope = parse_rope(
            raw, dim, require_int(raw, "max_position_embeddings", 131072), max_model_len, partial=True
        )
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            qkv_bias=bool(raw.get("attention_bias", False)),
            qk_norm=bool(raw.get("use_qk_norm", False)),
            experts=deepseek_experts(raw, experts=128),
            rope=rope,
        )

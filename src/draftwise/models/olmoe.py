"""OLMoE: many small experts; queries and keys are normalised over all heads at once."""

from __future__ import annotations

from draftwise.kernels.routing import Routing
from draftwise.models.config import ModelConfig, OwnCodeLacks, RawConfig, dense_config, layered, require_int
from draftwise.models.dense import DenseDecoder
from draftwise.models.mlp import ExpertsConfig
from draftwise.models.sparse import count_of_experts


class OlmoeModel(DenseDecoder):
    """``clip_qkv`` (limits of queries, keys and values) is left to Transformers' code; no published model has one."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        if raw.get("clip_qkv") is not None:
            raise OwnCodeLacks(
                f"clip_qkv {raw['clip_qkv']!r} (limits of queries, keys and values) is not supported"
            )
        raw = layered(raw, {"rms_norm_eps": 1e-5})
        layers = require_int(raw, "num_hidden_layers")
        count, top_k = count_of_experts(raw, 64)
        bias = bool(raw.get("attention_bias", False))
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            qkv_bias=bias,
            o_bias=bias,
            wide_qk_norm=True,
            experts=ExpertsConfig(
                Routing(count, top_k or min(8, count), normalise=bool(raw.get("norm_topk_prob", False))),
                require_int(raw, "intermediate_size", 2048),
                (True,) * layers,
            ),
        )

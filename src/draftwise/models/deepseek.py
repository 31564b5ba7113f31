"""DeepSeek V2 and V3 (V3.1, R1, Kimi K2): latent attention over its compressed cache, experts chosen in groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.kernels.routing import Routing
from draftwise.models.config import (
    LatentConfig,
    ModelConfig,
    OwnCodeLacks,
    RawConfig,
    dense_config,
    layered,
    require_int,
)
from draftwise.models.dense import DenseDecoder
from draftwise.models.glm4_moe import SHARED_EXPERTS
from draftwise.models.latent import LatentWeights
from draftwise.models.layers import DenseNames
from draftwise.models.mlp import ExpertsConfig
from draftwise.models.rope import parse_rope
from draftwise.models.sparse import deepseek_experts


class DeepseekV3Model(DenseDecoder):
    """See `models.latent`."""

    names = DenseNames(experts=SHARED_EXPERTS)
    weights = LatentWeights

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        defaults: dict[str, Any] = {
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
        }
        experts = deepseek_experts(layered(raw, defaults), experts=256)
        interleaved = bool(raw.get("rope_interleave", True))
        return latent_config(raw, architecture, max_model_len, experts, interleaved=interleaved)


class DeepseekV2Model(DeepseekV3Model):
    """Experts are chosen by softmax, without a correction, and groups by their best one."""

    names = DenseNames(experts=replace(SHARED_EXPERTS, correction=None))

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        layers, dense = require_int(raw, "num_hidden_layers"), raw.get("first_k_dense_replace", 0)
        if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
            raise ModelLoadError(
                f"config.json: first_k_dense_replace must be a number of layers, not {dense!r}"
            )
        if raw.get("norm_topk_prob"):
            raise OwnCodeLacks("norm_topk_prob is not supported for DeepSeek-V2: no published model has it")
        method, groups, top_groups = raw.get("topk_method", "greedy"), 1, 1
        if method == "group_limited_greedy":
            groups, top_groups = require_int(raw, "n_group"), require_int(raw, "topk_group")
        elif method != "greedy":
            raise OwnCodeLacks(f"topk_method {method!r} is not supported for DeepSeek-V2")
        inner = require_int(raw, "moe_intermediate_size", 1407)
        told = {"n_group": groups, "topk_group": top_groups, "moe_intermediate_size": inner}
        common = deepseek_experts(layered({**told, "first_k_dense_replace": dense}, raw), experts=64)
        routing = Routing(
            common.routing.num_experts,
            require_int(raw, "num_experts_per_tok"),
            normalise=False,
            scale=common.routing.scale,
            groups=groups,
            top_groups=top_groups,
            shared="plain",
        )
        shared = inner * require_int(raw, "n_shared_experts", 2)
        experts = ExpertsConfig(routing, inner, tuple(i >= dense for i in range(layers)), shared)
        return latent_config(raw, architecture, max_model_len, experts, interleaved=True)


def latent_config(
    raw: RawConfig,
    architecture: str,
    max_model_len: int | None,
    experts: ExpertsConfig | None,
    *,
    interleaved: bool,
) -> ModelConfig:
    """The part that both have in common."""
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise OwnCodeLacks(f"{name} is not supported for DeepSeek")
    queries = None
    if raw.get("q_lora_rank", 1536) is not None:
        queries = require_int(raw, "q_lora_rank", 1536)
    sizes = LatentConfig(
        queries,
        require_int(raw, "kv_lora_rank", 512),
        require_int(raw, "qk_nope_head_dim", 128),
        require_int(raw, "qk_rope_head_dim", 64),
        require_int(raw, "v_head_dim", 128),
    )
    if sizes.latent % 2 or sizes.rotated % 2:
        raise ModelLoadError(
            f"config.json: kv_lora_rank {sizes.latent} and qk_rope_head_dim {sizes.rotated} must be even"
        )
    positions = require_int(raw, "max_position_embeddings", 4096)
    # head_dim, where a config has one, is that of the rotated part
    rope = parse_rope(raw, sizes.rotated, positions, max_model_len, interleaved=interleaved)
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scale = (sizes.plain + sizes.rotated) ** -0.5
    all_dims = params.get("mscale_all_dim")
    if rope[0].kind != "default" and all_dims and rope[0].factor > 1:
        scale *= (0.1 * float(all_dims) * math.log(rope[0].factor) + 1.0) ** 2
    config = dense_config(
        layered({"head_dim": sizes.latent + sizes.rotated, "num_key_value_heads": 1}, raw),
        architecture=architecture,
        max_model_len=max_model_len,
        experts=experts,
        rope=rope,
    )
    return replace(config, latent=sizes, attn_scale=scale, raw=raw)

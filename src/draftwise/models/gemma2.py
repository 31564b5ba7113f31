"""Gemma 2: soft caps, a window in every other layer, norms in front of and behind attention and MLP."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.routing import Activation
from draftwise.models.config import (
    ModelConfig,
    OwnCodeLacks,
    RawConfig,
    dense_config,
    layered,
    require_int,
    softcap_of,
    windows_of_types,
)
from draftwise.models.dense import DenseDecoder
from draftwise.models.layers import DenseNames
from draftwise.models.rope import RopeConfig
from draftwise.models.weights import WeightPlan

_LAYER = "model.layers.{i}."


class Gemma2Model(DenseDecoder):
    """Norms multiply with 1 + w; embeddings enter times the square root of the hidden size, rounded to the model's
    type as Gemma's own code has it."""

    names = DenseNames(
        post_norm=_LAYER + "pre_feedforward_layernorm.weight",
        after_attention=_LAYER + "post_attention_layernorm.weight",
        after_mlp=_LAYER + "post_feedforward_layernorm.weight",
    )

    def __init__(self, config: ModelConfig, ops: Ops, plan: WeightPlan) -> None:
        scale = float(torch.tensor(config.hidden_size**0.5, dtype=ops.dtype))
        super().__init__(replace(config, embedding_scale=scale), ops, plan)

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        layers = require_int(raw, "num_hidden_layers")
        types = raw.get("layer_types") or [
            "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
        ]
        defaults = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
        return gemma_config(layered(raw, defaults), architecture, max_model_len, types)


def gemma_config(
    raw: RawConfig,
    architecture: str,
    max_model_len: int | None,
    layer_types: object,
    *,
    qk_norm: bool = False,
    rope: tuple[RopeConfig, int] | None = None,
) -> ModelConfig:
    """The common part of Gemma 2 and 3.

    Args:
        layer_types: ``sliding_attention`` or ``full_attention`` for each layer.
        rope: of layers without a window, and the model length; None: one rotation for all, read here.
    """
    kind = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    if kind not in ("gelu_pytorch_tanh", "gelu_tanh"):
        raise OwnCodeLacks(f"activation {kind!r} is not supported for Gemma (only gelu_pytorch_tanh)")
    if raw.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention (tokens that see later ones) is not supported")
    layers, bias = require_int(raw, "num_hidden_layers"), bool(raw.get("attention_bias", False))
    window = require_int(raw, "sliding_window", 4096)
    config = dense_config(
        raw,
        architecture=architecture,
        max_model_len=max_model_len,
        sliding_window=windows_of_types(layer_types, layers, window),
        head_dim=256,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        activation=Activation("gelu_tanh"),
        logit_softcap=softcap_of(raw, "final_logit_softcapping"),
        rope=rope,
    )
    return replace(
        config,
        attn_scale=require_int(raw, "query_pre_attn_scalar", 256) ** -0.5,
        norm_offset=1.0,
        tied=bool(raw.get("tie_word_embeddings", True)),
    )

"""Gemma 3, text: five layers with a window and a rotation of their own for each one without; norms on q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.models.config import ModelConfig, OwnCodeLacks, RawConfig, require_int
from draftwise.models.gemma2 import Gemma2Model, gemma_config
from draftwise.models.rope import parse_rope


class Gemma3TextModel(Gemma2Model):
    """Rotations are spelled in two ways: ``rope_parameters`` by type of layer, or ``rope_theta`` and ``rope_scaling``
    for layers without a window and ``rope_local_base_freq`` for those with one."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        if raw.get("attn_logit_softcapping") is not None:
            raise OwnCodeLacks(
                "attn_logit_softcapping is not supported for Gemma 3: no published model has one"
            )
        layers, every = require_int(raw, "num_hidden_layers"), require_int(raw, "sliding_window_pattern", 6)
        types = raw.get("layer_types") or [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
        dim, positions = (
            require_int(raw, "head_dim", 256),
            require_int(raw, "max_position_embeddings", 131072),
        )
        full, local = _rotations(raw)
        rope, length = parse_rope(full, dim, positions, max_model_len, theta=1e6)
        config = gemma_config(raw, architecture, max_model_len, types, qk_norm=True, rope=(rope, length))
        near, _ = parse_rope(local, dim, length, length)
        return replace(config, local_rope=near)


def _rotations(raw: RawConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings for rotations of layers without and with a window."""
    told = raw.get("rope_parameters")
    if isinstance(told, Mapping) and ("full_attention" in told or "sliding_attention" in told):
        unknown = sorted(told.keys() - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelLoadError(f"config.json: rope_parameters of unknown layers: {', '.join(unknown)}")
        full = {"rope_parameters": told.get("full_attention") or {"rope_theta": 1e6}}
        return full, {"rope_parameters": told.get("sliding_attention") or {"rope_theta": 1e4}}
    return raw, {"rope_theta": raw.get("rope_local_base_freq", 1e4)}

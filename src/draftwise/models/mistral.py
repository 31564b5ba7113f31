"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from draftwise.models.config import ModelConfig, RawConfig, dense_config, require_int
from draftwise.models.dense import DenseDecoder


class MistralModel(DenseDecoder):
    """``sliding_window`` null means full attention; a config without the field means 4096, as it always has."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        window = None
        if raw.get("sliding_window", 4096) is not None:
            window = require_int(raw, "sliding_window", 4096)
        layers = require_int(raw, "num_hidden_layers")
        return dense_config(
            raw, architecture=architecture, max_model_len=max_model_len, sliding_window=(window,) * layers
        )

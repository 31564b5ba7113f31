"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from draftwise.kernels.routing import Routing
from draftwise.models.config import ModelConfig, RawConfig, dense_config, layered, require_int
from draftwise.models.dense import DenseDecoder
from draftwise.models.layers import DenseNames
from draftwise.models.mlp import ExpertNames, ExpertsConfig
from draftwise.models.sparse import count_of_experts

_BLOCK = "model.layers.{i}.block_sparse_moe."


class MixtralModel(DenseDecoder):
    """Weights of the chosen experts always add up to 1."""

    names = DenseNames(
        experts=ExpertNames(
            router=_BLOCK + "gate.weight",
            gate=_BLOCK + "experts.{e}.w1.weight",
            up=_BLOCK + "experts.{e}.w3.weight",
            down=_BLOCK + "experts.{e}.w2.weight",
        )
    )

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        raw = layered(raw, {"rms_norm_eps": 1e-5, "rope_theta": 1e6})
        layers = require_int(raw, "num_hidden_layers")
        count, top_k = count_of_experts(raw, 8)
        window = require_int(raw, "sliding_window") if raw.get("sliding_window") is not None else None
        return dense_config(
            raw,
            architecture=architecture,
            max_model_len=max_model_len,
            sliding_window=(window,) * layers,
            experts=ExpertsConfig(
                Routing(count, top_k or min(2, count)),
                require_int(raw, "intermediate_size", 14336),
                (True,) * layers,
            ),
        )

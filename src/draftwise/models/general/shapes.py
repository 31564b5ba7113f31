"""How a Transformers model is built, found out without its weights: modules and calls of attention on torch's meta
device, where tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kv.states import StateSpec
from draftwise.kv.storage import KVLayerSpec
from draftwise.models.config import RawConfig
from draftwise.models.general.attention import PAGED, register, taking
from draftwise.models.general.config import transformers_config
from draftwise.models.general.finding import find_units
from draftwise.models.general.quiet import alone, quiet

_TOKENS = 4


def empty_model(raw: RawConfig) -> Any:
    """The causal model that a config.json describes, its parameters on the meta device.

    Raises:
        ModelLoadError: Transformers cannot build it.
    """
    import transformers

    register()
    settings = {name: value for name, value in raw.items() if name != "quantization_config"}
    config = transformers_config(settings)
    maker: Any = transformers.AutoModelForCausalLM
    try:
        with alone(), torch.device("meta"):
            return maker.from_config(config, dtype=torch.bfloat16, attn_implementation=PAGED).eval()
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(
            f"Transformers cannot build it: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def call_shapes(model: Any) -> tuple[KVLayerSpec, ...]:
    """The storage of each call of attention per token. ``model``: from `empty_model`.

    Raises whatever the model's code raises where it wants numbers to look at.
    """
    taker = _Shapes()
    tokens = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    with quiet(), torch.inference_mode(), taking(taker):
        model(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False)
    return tuple(taker.layers)


def state_shapes(model: Any) -> StateSpec | None:
    """The model's further state of a request; None: none. ``model``: from `empty_model`, and done with.

    Raises whatever the model's code raises where it wants numbers to look at.
    """
    tokens = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    with quiet(), torch.inference_mode(), taking(_Shapes()):
        units = find_units(model, lambda: model(input_ids=tokens, use_cache=False), values=False)
    tensors = tuple(tensor for unit in units for tensor in unit.tensors)
    return StateSpec(tensors) if tensors else None


class _Shapes:
    """Takes attention's calls and notes their shapes."""

    def __init__(self) -> None:
        self.layers: list[KVLayerSpec] = []

    def take(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        width = max(key.shape[3], value.shape[3])
        self.layers.append(KVLayerSpec.dense(key.shape[1], width + width % 2))
        return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))

"""Which fields of a configuration Transformers' code reads, and other values for them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.fakes.architectures import small

_NOT_THE_MODEL = frozenset({
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "id2label", "label2id", "is_encoder_decoder", "problem_type",
    "name_or_path", "chunk_size_feed_forward", "initializer_range", "quantization_config", "vocab_size",
})  # fmt: skip
"""Read, but not for what the numbers are; and the vocabulary, which tests' prompts are made for."""

_NAMED: dict[str, list[Any]] = {
    "hidden_act": ["gelu"], "hidden_activation": ["silu"], "sliding_window": [5, None], "head_dim": [8],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3, ["sliding_attention", "full_attention"] * 2],
    "num_hidden_layers": [2], "mlp_only_layers": [[1]], "no_rope_layers": [[0, 1, 1], [1, 1, 1]],
    "scoring_func": ["softmax"], "topk_method": ["greedy"], "clip_qkv": [0.1], "max_window_layers": [1],
}  # fmt: skip
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 500.0}, {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
     "original_max_position_embeddings": 16},
]  # fmt: skip


def read_fields(kind: str) -> dict[str, Any]:
    """Names of fields that are read while a small model is made and computes, with their values."""
    made = small(kind)
    config = copy.deepcopy(made.config)
    known = config.to_dict()
    read: set[str] = set()
    cls = type(config)

    def watch(self: Any, name: str) -> Any:
        read.add(name)
        return cls.__getattribute__(self, name)

    config.__class__ = type(cls.__name__, (cls,), {"__getattribute__": watch})
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM._model_mapping[cls](config).eval()
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    names = (read & known.keys()) - _NOT_THE_MODEL
    return {name: known[name] for name in sorted(names) if not name.startswith("_")}


def flipped(name: str, value: Any) -> Iterator[Any]:
    """Other values."""
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        of_types = [kind for kind, part in value.items() if isinstance(part, dict)]
        for change in _ROPES:
            if not of_types:
                yield {**value, **change}
            yield from ({**value, kind: {**value[kind], **change}} for kind in of_types)
    elif name in _NAMED:
        yield from (other for other in _NAMED[name] if other != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value // 2, value + 1)
    elif isinstance(value, float):
        yield from (value * 1.7 + 0.1, value / 2)
    elif value is None:
        yield from (True, 2, 0.5)
    elif isinstance(value, str):
        yield "something else"


def changed(kind: str, name: str, value: Any) -> Any:
    """A small model of the kind with one field changed; None where Transformers refuses it, or fails."""
    made = small(kind)
    raw = {**made.config.to_dict(), name: value}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        try:
            config = type(made.config).from_dict(raw)
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
            model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
        except Exception:
            return None
    return model

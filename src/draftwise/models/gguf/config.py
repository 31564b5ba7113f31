"""The config.json that a GGUF file's metadata stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from draftwise.errors import ModelLoadError
from draftwise.models.gguf.blocks import FLOATS, KEPT, values_of
from draftwise.models.gguf.names import ARCHITECTURES
from draftwise.models.gguf.reader import GgufFile

METHOD = "gguf"
"""``quant_method`` of the configuration of a file some of whose linear layers keep their codes."""

_HF = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
}
assert set(_HF) == set(ARCHITECTURES)
_LINEAR = ("attn_", "ffn_")


class _Keys:
    """Metadata below the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = file.architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self._prefix}.{name}", default)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelLoadError(f"{self.file.path}: metadata {self._prefix}.{name} is missing")
        return value

    def text(self, name: str) -> Any:
        return self.file.metadata.get(f"tokenizer.{name}")


def config_of(file: GgufFile) -> dict[str, Any]:
    """The content that a config.json would have.

    Raises:
        ModelLoadError: a family that is not read, a value is missing, or one asks for what is not supported.
    """
    if file.architecture not in _HF:
        raise ModelLoadError(
            f"{file.path}: GGUF files of architecture {file.architecture!r} are not supported (supported: "
            f"{', '.join(ARCHITECTURES)})"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelLoadError(
            f"{file.path} is one file of a split model: join them (llama-gguf-split --merge)"
        )
    keys = _Keys(file)
    architecture, model_type = _HF[file.architecture]
    tensors = file.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    heads = keys["attention.head_count"]
    if not isinstance(heads, int):
        raise ModelLoadError(f"{file.path}: layers with different numbers of heads are not supported")
    eps = keys.get("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon", 1e-6))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": keys.get("attention.key_length", keys["embedding_length"] // heads),
        "max_position_embeddings": keys["context_length"],
        "rms_norm_eps": float(f"{eps:.6g}"),  # a float32 in the file
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": keys.text("ggml.bos_token_id"),
        "eos_token_id": _ends(keys),
        "dtype": _dtype(file),
    }
    scaling = _rope(keys, config)
    config["rope_theta"] = float(keys.get("rope.freq_base", 10000.0))
    if scaling is not None:
        config["rope_scaling"] = scaling
    config |= _MORE.get(file.architecture, _nothing)(keys, config)
    config["pad_token_id"] = keys.text("ggml.padding_token_id")  # else a family's default
    if any(t.kind.name in KEPT and name.startswith("blk.") for name, t in tensors.items()):
        config["quantization_config"] = {"quant_method": METHOD}
    return config


_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
"""Tokens that end a turn whatever else a file says: Phi-3's say nothing of theirs."""


def _ends(keys: _Keys) -> Any:
    """End of text, and ends of a turn where these are other tokens; as llama.cpp, which knows some by their text."""
    found = [keys.text(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = keys.text("ggml.tokens")
    found += [token for token, text in enumerate(tokens if isinstance(tokens, list) else ()) if text in _ENDS]
    ids = list(dict.fromkeys(token for token in found if token is not None))
    return ids[0] if len(ids) == 1 else ids or None


def _dtype(file: GgufFile) -> str:
    """The dtype of unquantised tensors: floats of layers as the file has them, else bfloat16."""
    kinds = [t.kind.name for name, t in file.tensors.items() if len(t.shape) > 1 and name.startswith("blk.")]
    floats = {kind for kind in kinds if kind in FLOATS}
    if floats and len(floats) == len(set(kinds)):
        return {"F16": "float16", "BF16": "bfloat16"}.get(max(floats, key=kinds.count), "float32")
    return "bfloat16"


# ------------------------------------------------------------------------------------------------------- rotations


def _rope(keys: _Keys, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if "rope_freqs.weight" in keys.file.tensors:
        return _llama3(keys, config)
    if kind in (None, "none", "longrope"):
        return None
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        original = keys.get("rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling
    raise ModelLoadError(f"{keys.file.path}: rope scaling {kind!r} is not supported")


def _llama3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """The settings of Llama 3's scaling, of which a file has the divisors [head_dim / 2] alone: 1 for short waves,
    ``factor`` for long ones, something between for the rest. All published models have 1, 4 and 8192 for the others.

    Raises:
        ModelLoadError: other divisors.
    """
    tensor = keys.file.tensors["rope_freqs.weight"]
    divisors = values_of(tensor.read(0, 1), tensor.kind)[0]
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    dim = config["head_dim"]
    inverse = keys.get("rope.freq_base", 10000.0) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    waves = 2 * math.pi / inverse
    smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not torch.allclose(divisors.double(), expected, rtol=1e-3):
        raise ModelLoadError(
            f"{keys.file.path}: the divisors in rope_freqs.weight are not those of Llama 3's scaling"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# -------------------------------------------------------------------------------------------------------- families


def _nothing(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _llama(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("expert_count"):
        raise ModelLoadError(f"{keys.file.path}: llama with experts (Mixtral) is not supported as GGUF")
    tensors = keys.file.tensors
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _qwen3moe(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys["expert_count"],
        "num_experts_per_tok": keys["expert_used_count"],
        "moe_intermediate_size": keys["expert_feed_forward_length"],
        "norm_topk_prob": True,  # llama.cpp has no other
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _score_scale(config: dict[str, Any], layers_of_largest: int) -> int:
    """The number whose root divides the scores. No file has it; llama.cpp recognises the largest model by its
    layers."""
    if config["num_hidden_layers"] == layers_of_largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    scale = _score_scale(config, layers_of_largest=46)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "query_pre_attn_scalar": scale,
    }


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    scale = _score_scale(config, layers_of_largest=62)
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.get("attention.sliding_window", 1024),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": scale,
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.get(name) is not None:
            found[name] = keys.get(name)
    return found


def _phi3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": keys.get("attention.sliding_window") or None}
    rotated = keys.get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        found["partial_rotary_factor"] = rotated / config["head_dim"]
    tensors = keys.file.tensors
    if "rope_factors_long.weight" in tensors:
        factors = {}
        for name in ("long", "short"):
            tensor = tensors[f"rope_factors_{name}.weight"]
            factors[f"{name}_factor"] = values_of(tensor.read(0, 1), tensor.kind)[0].tolist()
        found["rope_scaling"] = {"rope_type": "longrope", **factors}
        found["original_max_position_embeddings"] = keys["rope.scaling.original_context_length"]
    return found


def _starcoder2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "norm_epsilon": config["rms_norm_eps"],
        "use_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.get("attention.sliding_window") or None,
    }


_MORE: dict[str, Callable[[_Keys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
}

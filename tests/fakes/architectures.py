"""Every causal architecture of the installed Transformers, small enough to be made on the spot."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.fakes import recurrent_kinds

KINDS: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Values of ``model_type`` of causal models."""
_WRAPPERS = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
WRAPPERS: tuple[str, ...] = tuple(sorted(_WRAPPERS))
"""Of models of images or sound, and text."""

_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "sliding_window": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "type_vocab_size": 2, "embedding_size": 64,
    # experts
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 32, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1,
    # latent attention
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    # many heads: with few, keys tie at a score of 0, and which of them are chosen is nobody's promise
    "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8,
    # other names, and decoders of pairs of encoder and decoder
    "rotary_dim": 8, "ffn_dim": 96, "d_model": 64, "decoder_layers": 2, "encoder_layers": 2,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16,
    **recurrent_kinds.SIZES,
}  # fmt: skip
_BY_TYPE = {
    kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
}
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "rope_parameters": _BY_TYPE,
    },
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 16, "head_dim": 24, "qk_nope_head_dim": 16,
        "per_layer_config": {
            1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 16},
        },
    },
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * [*_BY_TYPE]},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": 2},
    "longcat_flash": {"head_dim": 8},
    "ovis2": {"hidden_size": 64},
    "prophetnet": {
        "num_hidden_layers": None, "num_attention_heads": None, "num_decoder_layers": 2, "num_encoder_layers": 2,
        "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    **recurrent_kinds.OWN,
}  # fmt: skip
"""A value of None: the field is left as it is."""
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "intermediate_size": 48, "mlp_ratio": 2, "num_hidden_layers": 1,
    "depth": 1, "num_layers": 1, "encoder_layers": 1, "num_blocks": 1, "num_attention_heads": 2, "num_heads": 2,
    "encoder_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "encoder_ffn_dim": 48, "image_size": 28,
    "patch_size": 14, "out_hidden_size": 64, "output_dim": 64, "num_global_layers": 1, "vision_output_dim": 64,
    "projection_dim": 32, "deepstack_visual_indexes": [0], "projector_hidden_size": 32, "encoder_hidden_size": 32,
}  # fmt: skip
"""Sizes of what reads images and sound: no pass over text comes there."""
for _kind in (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen2_5_omni",
    "paddleocr_vl",
    "glm4v",
    "glm_ocr",
    "hunyuan_vl",
    "glm4v_moe",
):
    _sections = (
        [1, 1, 2] if _kind == "glm4v_moe" else [2, 3, 3]
    )  # M-RoPE's three, together half of what is rotated
    _OWN[f"{_kind}_text"] = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _sections}
    }
_LARGEST = 40_000_000  # parameters


class CannotMake(Exception):
    """No small configuration of this kind is known here."""


@dataclass(frozen=True)
class Small:
    """``model``: None where the configuration alone is small."""

    architecture: str
    config: Any
    model: Any | None


def small(kind: str, *, wrapper: bool = False, **sizes: Any) -> Small:
    """A model with weights by chance, float32; ``sizes``: fields of its configuration. ``wrapper``: it reads images or
    sound, too. Raises CannotMake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = _config(kind, sizes)
        architecture = _WRAPPERS[kind] if wrapper else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        cls: Any = getattr(transformers, architecture) if wrapper else AutoModelForCausalLM
        try:
            make = cls._from_config if wrapper else cls.from_config
            with torch.device("meta"):
                size = sum(p.numel() for p in make(config).parameters())
            if size > _LARGEST:
                return Small(architecture, config, None)
            torch.manual_seed(0)
            model = make(config)
        except Exception as error:  # whatever a model's code raises
            raise CannotMake(f"{type(error).__name__}: {error}") from error
    if kind in recurrent_kinds.KINDS:
        recurrent_kinds.make_loud(model)
    _make_choosy(model)
    return Small(architecture, config, model.float().eval())


_ROUTERS = re.compile(r"(^|\.)(router|gate|classifier)(\.\w+)*\.weight$")
_CORRECTIONS = re.compile(r"(correction_bias|expert_bias)$")
_MOST_EXPERTS = 16


def _make_choosy(model: Any) -> None:
    """Routers that prefer some experts to others: models are made with weights near zero, or zeros, where each gets the
    same, and with corrections of zero, which nobody would miss."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            router = _ROUTERS.search(name) and tensor.ndim == 2 and 1 < len(tensor) <= _MOST_EXPERTS
            if router or _CORRECTIONS.search(name):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)


def save(made: Small, folder: Path) -> None:
    """A checkpoint; without weights where there is no model."""
    folder.mkdir(parents=True, exist_ok=True)
    if made.model is not None:
        made.model.save_pretrained(folder)
        return
    made.config.architectures = [made.architecture]
    made.config.save_pretrained(folder)


def raw_config(folder: Path) -> dict[str, Any]:
    """``config.json``."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def _config(kind: str, sizes: dict[str, Any]) -> Any:
    return _of_class(CONFIG_MAPPING[kind], _OWN.get(kind, {}) | sizes)


def _of_class(cls: Any, own: dict[str, Any]) -> Any:
    plain = _tried(cls, {})
    use = {name: value for name, value in _SIZES.items() if _has(plain, name)}
    if "kv_lora_rank" in use:  # every head has keys of its own, and a size of its own for them
        use["num_key_value_heads"] = 4
        use.pop("head_dim", None)
    if _has(plain, "is_decoder"):
        use["is_decoder"] = True
    if "linear_attention" in (getattr(plain, "layer_types", None) or ()):
        use["num_hidden_layers"] = 4
    parts = {name: getattr(plain, name, None) for name in getattr(cls, "sub_configs", {})}
    text = plain.get_text_config(decoder=True)
    if any(part is text for part in parts.values()):
        use = {}
    for name, value in vars(plain).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value > 255:
            use[name] = 255
    for name, part in parts.items():
        if part is not None:
            kind = _OWN.get(part.model_type, {})
            use[name] = _of_class(type(part), kind) if part is text else _tower(type(part), kind)
    use |= own
    error: Exception | None = None
    for left_out in ((), ("head_dim",), ("sliding_window",), ("head_dim", "sliding_window")):
        try:
            return cls(
                **{name: value for name, value in use.items() if name not in left_out and value is not None}
            )
        except Exception as caught:
            error = caught
    raise CannotMake(f"{type(error).__name__}: {error}")


def _tower(cls: Any, own: dict[str, Any]) -> Any:
    plain = _tried(cls, {})
    return _tried(cls, {name: value for name, value in _TOWER.items() if _has(plain, name)} | own)


def _tried(cls: Any, fields: dict[str, Any]) -> Any:
    try:
        return cls(**fields)
    except Exception as error:
        raise CannotMake(f"{type(error).__name__}: {error}") from error


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # an attribute that differs by layer
        return False

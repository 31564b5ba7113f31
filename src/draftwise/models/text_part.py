"""The text part of a model of text and images (or sound), where that part is a family with code of its own.

Such a model's config.json holds the text part's under ``text_config``, or mixed with its own; the text part's tensors
stand under a prefix, beside those of what reads images. Both are turned into what the text part alone would have:

    Mistral3ForConditionalGeneration {"text_config": {"model_type": "mistral", ...}, "vision_config": ...}
    -> MistralForCausalLM {"model_type": "mistral", ...}
    language_model.model.layers.0.mlp.up_proj.weight, language_model.lm_head.weight, vision_tower.*
    -> model.layers.0.mlp.up_proj.weight, lm_head.weight
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.config import RawConfig
from draftwise.models.registry import supported_architectures
from draftwise.models.rope import over_text

PLAIN = frozenset(
    {
        "DeepseekVLForConditionalGeneration",
        "GlmAsrForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "MossTranscribeDiarizeForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VideoLlama3ForConditionalGeneration",
        "VideoLlavaForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }
)
"""Models that add nothing to their text part while they read text (tests/parity compares each with Transformers)."""

_SAME_AS = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2_5_omni_text": "qwen2", "qwen3_vl_text": "qwen3",
}  # fmt: skip
"""Text parts with a model_type of their own: a known one with M-RoPE, which over text is the plain rotation, since a
token's three positions are alike."""

PART_OF = "text_part_of"
"""Field of the text part's config: the architecture that it is a part of."""


def text_config(raw: RawConfig, names: Callable[[], Iterable[str]] = tuple) -> dict[str, Any]:
    """``config.json`` of the text part, if ``raw`` is of a model in `PLAIN` whose text part has code of its own; else
    ``raw`` itself.

    Args:
        names: gives those of the checkpoint's tensors, if there are any yet: whether the output layer is among them.

    Raises:
        ModelLoadError: Transformers refuses the config.
    """
    found = raw.get("architectures")
    whole = found[0] if isinstance(found, list) and found else None
    if whole not in PLAIN:
        return dict(raw)
    from draftwise.models.general.config import causal_architecture, said_of_text, transformers_config

    outer = transformers_config(raw)
    part = outer.get_text_config(decoder=True)
    architecture = causal_architecture(_SAME_AS.get(part.model_type, part.model_type))
    if architecture not in supported_architectures():
        return dict(raw)
    text: dict[str, Any] = part.to_dict()
    for name in ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"):
        text.pop(name, None)
        if (said := said_of_text(raw, name, part.model_type)) is not None:
            text[name] = said
    rope = text.get("rope_parameters")
    if isinstance(rope, Mapping):
        rope = over_text(rope)
        rope.pop("type", None)  # Transformers' object says it under its newer name, too
        text["rope_parameters"] = rope
    text.pop("rope_scaling", None)
    heads = [name for name in names() if name.endswith("lm_head.weight")]
    text["tie_word_embeddings"] = bool(getattr(outer, "tie_word_embeddings", False)) and not heads
    return {**text, "architectures": [architecture], PART_OF: whole}


def text_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The text part's tensors of a checkpoint, under the names that they have in a model of text alone.

    Raises:
        ModelLoadError: no layers of a decoder with an embedding beside them, or several.
    """
    prefix = _prefix(entries)
    found = {f"model.{name.removeprefix(prefix)}": name for name in entries if name.startswith(prefix)}
    # The output layer stands beside the decoder, or beside one of the parts that it is in.
    parts = prefix.split(".")[:-1]
    for depth in range(len(parts) - 1, -1, -1):
        head = ".".join([*parts[:depth], "lm_head."])
        heads = [name for name in entries if name.startswith(head)]
        if heads:
            found |= {f"lm_head.{name.removeprefix(head)}": name for name in heads}
            break
    return {name: replace(entries[stored], stored=stored) for name, stored in found.items()}


def _prefix(names: Mapping[str, object]) -> str:
    """The prefix of the decoder: ``language_model.model.``, ``model.language_model.``, ``model.text_model.``,
    ``model.``"""
    found = sorted(
        name.removesuffix("embed_tokens.weight") for name in names if name.endswith("embed_tokens.weight")
    )
    found = [
        prefix
        for prefix in found
        if any(re.match(re.escape(prefix) + r"layers\.0\.", name) for name in names)
    ]
    if len(found) != 1:
        raise ModelLoadError(
            f"the tensors of its text part cannot be told from the others ({found or 'none found'})"
        )
    return found[0]

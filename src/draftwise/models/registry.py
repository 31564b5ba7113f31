"""Architecture name of a checkpoint -> model class, imported when first needed."""

from __future__ import annotations

import importlib

from draftwise.errors import ModelLoadError
from draftwise.models.base import DecoderModel
from draftwise.models.config import RawConfig

_MODELS: dict[str, str | type[DecoderModel]] = {
    "DeepseekV2ForCausalLM": "draftwise.models.deepseek:DeepseekV2Model",
    "DeepseekV3ForCausalLM": "draftwise.models.deepseek:DeepseekV3Model",
    "Gemma2ForCausalLM": "draftwise.models.gemma2:Gemma2Model",
    "Gemma3ForCausalLM": "draftwise.models.gemma3:Gemma3TextModel",
    "Glm4MoeForCausalLM": "draftwise.models.glm4_moe:Glm4MoeModel",
    "GptOssForCausalLM": "draftwise.models.gpt_oss:GptOssModel",
    "LlamaForCausalLM": "draftwise.models.llama:LlamaModel",
    "MiMoForCausalLM": "draftwise.models.qwen2:Qwen2Model",
    "MistralForCausalLM": "draftwise.models.mistral:MistralModel",
    "MixtralForCausalLM": "draftwise.models.mixtral:MixtralModel",
    "OlmoeForCausalLM": "draftwise.models.olmoe:OlmoeModel",
    "Phi3ForCausalLM": "draftwise.models.phi3:Phi3Model",
    "Qwen2ForCausalLM": "draftwise.models.qwen2:Qwen2Model",
    "Qwen2MoeForCausalLM": "draftwise.models.qwen2_moe:Qwen2MoeModel",
    "Qwen3ForCausalLM": "draftwise.models.qwen3:Qwen3Model",
    "Qwen3MoeForCausalLM": "draftwise.models.qwen3_moe:Qwen3MoeModel",
}

_MULTIMODAL_FIELDS = (
    "vision_config",
    "audio_config",
    "speech_config",
    "thinker_config",
    "vision_start_token_id",
)


def register_model(architecture: str, model: str | type[DecoderModel]) -> None:
    """Serve checkpoints whose ``architectures`` names ``architecture`` with ``model``, replacing what was there.

    Args:
        model: a subclass of `DecoderModel`, or where to import it from, ``"package.module:Class"``.

    Raises:
        ModelLoadError: ``model`` is neither.
    """
    if isinstance(model, str):
        if model.count(":") != 1:
            raise ModelLoadError(f"model class {model!r} must be written 'package.module:Class'")
    elif not (isinstance(model, type) and issubclass(model, DecoderModel)):
        raise ModelLoadError(f"{model!r} is not a subclass of DecoderModel")
    _MODELS[architecture] = model


def supported_architectures() -> tuple[str, ...]:
    """Names of all registered architectures."""
    return tuple(sorted(_MODELS))


def resolve_model(raw: RawConfig) -> tuple[str, type[DecoderModel]]:
    """The architecture that ``config.json`` names, and its class.

    Raises:
        ModelLoadError: no architecture is named, it is multimodal or unknown, or its class cannot be imported.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json: 'architectures' must be a list of names, not {names!r}")
    known = [name for name in names if name in _MODELS]
    if not names:
        raise ModelLoadError("config.json names no architecture ('architectures' is missing or empty)")
    if not known and (general := _general(names)) is not None:
        return general
    multimodal = next((field for field in _MULTIMODAL_FIELDS if raw.get(field) is not None), None)
    if multimodal is not None and not known:
        raise ModelLoadError(
            f"{' / '.join(names)} is multimodal ({multimodal}), and its text part is unknown here"
        )
    if not known:
        remote = " (its own code, named by auto_map, is never run as a model)" if "auto_map" in raw else ""
        raise ModelLoadError(
            f"architecture {' / '.join(names)} is not supported{remote}; "
            f"supported: {', '.join(supported_architectures())} and most causal models of the installed Transformers"
        )
    return known[0], _load_class(known[0])


def _general(names: list[str]) -> tuple[str, type[DecoderModel]] | None:
    """Models without a family of their own here that are causal models of Transformers, or have one as a part."""
    from draftwise.models.general.config import causal_architectures, wrapper_architectures

    theirs = causal_architectures() | wrapper_architectures()
    name = next((name for name in names if name in theirs), None)
    if name is None:
        return None
    from draftwise.models.general.model import GeneralDecoder

    return name, GeneralDecoder


def _load_class(architecture: str) -> type[DecoderModel]:
    entry = _MODELS[architecture]
    if not isinstance(entry, str):
        return entry
    module_name, _, class_name = entry.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"the class {entry!r} for {architecture} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, DecoderModel)):
        raise ModelLoadError(f"{entry!r} is not a subclass of DecoderModel")
    _MODELS[architecture] = cls
    return cls

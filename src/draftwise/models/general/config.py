"""``config.json`` of any architecture of Transformers, as far as the engine asks for it."""

from __future__ import annotations

from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.models.config import ModelConfig, RawConfig, token_ids
from draftwise.models.rope import RopeConfig

_LAYER_TYPES = frozenset({
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention", "mlp", "moe",
})  # fmt: skip
"""Kinds of layers whose only state is one entry per token: keys, values, and keys by which sparse attention chooses."""
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "recurrent"})
"""Kinds of layers with recurrent state, see `carried`."""


_REFUSED = {
    "BltForCausalLM": "it groups bytes into patches, whose borders a second model chooses",
    "CpmAntForCausalLM": "learned tokens stand before every prompt, and it counts them as positions",
    "DiffusionGemmaForBlockDiffusion": "it writes blocks of tokens by diffusion, not one token after the other",
    "Gemma4AssistantForCausalLM": "it reads the hidden states of another model, for which it drafts",
    "Gemma4UnifiedAssistantForCausalLM": "it reads the hidden states of another model, for which it drafts",
    "MusicgenForCausalLM": "it writes sound, several codes at each position",
    "MusicgenMelodyForCausalLM": "it writes sound, several codes at each position",
    "PI0ForConditionalGeneration": "it steers a robot: what it writes are movements, not text",
    "ProphetNetForCausalLM": "it computes a stream of its own for each of several future tokens",
    "ReformerModelWithLMHead": "it sorts keys into buckets, so that what a token sees depends on the whole sequence",
    "XLNetLMHeadModel": "it predicts masked tokens from both sides, in an order of permutations",
}
"""Models of text by name, of which a row does not say the next token from the rows before it."""


def transformers_config(raw: RawConfig) -> Any:
    """Transformers' own configuration object.

    Raises:
        ModelLoadError: it does not know the model's type, or refuses a value.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ModelLoadError(f"model_type {kind!r} is unknown to the installed Transformers")
    try:
        return CONFIG_MAPPING[kind].from_dict({name: _number(value) for name, value in raw.items()})
    except Exception as error:  # a dataclass of a third party: TypeError, ValueError and its own
        raise ModelLoadError(
            f"config.json is refused by Transformers: {type(error).__name__}: {error}"
        ) from error


def _number(value: Any) -> Any:
    """Numbers that JSON lacks, as Transformers writes them: {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {k: _number(v) for k, v in value.items()}
        )
    return value


def causal_architectures() -> frozenset[str]:
    """Names of the causal language models of the installed Transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def causal_architecture(model_type: str) -> str | None:
    """That of a text model's type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name


def wrapper_architectures() -> frozenset[str]:
    """Names of models that read images or sound beside text, and write text."""
    from transformers.models.auto import modeling_auto as auto

    theirs = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return frozenset(theirs.values())


def is_made_for(architecture: str, model_type: str) -> bool:
    """Whether Transformers runs configurations of a type by this class, which may have been written for another."""
    from transformers.models.auto import modeling_auto as auto

    return architecture in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type),
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type),
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type),
    )


def parse_general(raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
    """The facts that the engine asks a model for. Everything that changes the computation is left to Transformers.

    Raises:
        ModelLoadError: a size that every model has is missing, or ``max_model_len`` is beyond what the model can do.
    """
    if architecture in _REFUSED:
        raise ModelLoadError(f"{architecture} cannot be served: {_REFUSED[architecture]}")
    config = transformers_config(raw).get_text_config(decoder=True)
    kinds = set(_value(config, "layer_types") or ()) - _LAYER_TYPES - _RECURRENT
    if kinds:
        raise ModelLoadError(
            f"{architecture} has layers of type {', '.join(sorted(kinds))}, which are not supported"
        )
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    # Of heads nothing is asked here but hints for training; a model may have others in each layer.
    heads = _count(config, "num_attention_heads") or 1
    positions = _value(config, "max_position_embeddings")
    positions = positions if isinstance(positions, int) and positions > 0 else 2048
    if max_model_len is not None and max_model_len > positions:
        raise ModelLoadError(f"max_model_len {max_model_len} is beyond the model's {positions} positions")
    dim = _count(config, "head_dim") or hidden // heads
    said = {
        name: said_of_text(raw, name, config.model_type)
        for name in ("eos_token_id", "bos_token_id", "torch_dtype")
    }
    dtype = said_of_text(raw, "dtype", config.model_type) or said["torch_dtype"]
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size") or 4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads") or heads,
        head_dim=dim,
        max_model_len=max_model_len or positions,
        rope=RopeConfig("default", 10000.0, dim),
        sliding_window=(None,) * layers,
        norm_eps=float(_value(config, "rms_norm_eps") or 1e-6),
        tied=bool(_value(config, "tie_word_embeddings")),
        eos_token_ids=token_ids(said["eos_token_id"], "eos_token_id"),
        bos_token_id=next(iter(token_ids(said["bos_token_id"], "bos_token_id")), None),
        dtype=dtype if isinstance(dtype, str) else None,
        raw=raw,
    )


def said_of_text(raw: RawConfig, name: str, model_type: str) -> Any:
    """A field as ``config.json`` says it, of the whole or else of its part of a type; not what Transformers takes if
    nothing is said. None: nothing is."""
    if raw.get(name) is not None:
        return raw[name]
    parts = [part for part in raw.values() if isinstance(part, dict)]
    found = [
        part[name] for part in parts if part.get("model_type") == model_type and part.get(name) is not None
    ]
    return found[0] if found else None


def _value(config: Any, name: str) -> Any:
    """Also under the name that the family gives it; None if there is none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # Transformers' own, which is no AttributeError
        return None


def _count(config: Any, name: str) -> int | None:
    """A positive integer; None if it is anything else."""
    value = _value(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _size(config: Any, name: str) -> int:
    count = _count(config, name)
    if count is None:
        raise ModelLoadError(
            f"config.json: {name!r} must be a positive integer, not {_value(config, name)!r}"
        )
    return count

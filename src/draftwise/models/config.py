"""`ModelConfig`: the description of a decoder model, and its reader of Hugging Face's ``config.json``.

Only facts that change the computation are kept. A setting that would change it and is not supported is an error that
names it, never a silent difference.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

from draftwise.errors import ModelLoadError
from draftwise.kernels.ranks import WHOLE, Part
from draftwise.kernels.routing import SILU, Activation
from draftwise.models.mlp import ExpertsConfig
from draftwise.models.rope import RopeConfig, parse_rope

RawConfig = Mapping[str, Any]


class OwnCodeLacks(ModelLoadError):
    """A family's own code lacks something that Transformers' has: the model is to be tried in the general way."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention (`models.latent`)."""

    queries: int | None  # of the latent that queries are made from; None: of the hidden state
    latent: int  # of the one that is stored
    plain: int  # dimensions of a query that are not rotated
    rotated: int
    values: int  # of a head


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. One immutable value; parts that need less take the fields they need."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model may reach
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]  # per layer: window in positions, None: full attention
    norm_eps: float
    tied: bool  # the output layer is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # per-head RMSNorm on queries and keys before the rotation
    wide_qk_norm: bool = False  # the same over all heads at once
    attn_gate: bool = False  # the q projection also gives a gate, see `models.gates`
    activation: Activation = SILU  # of gated MLPs
    experts: ExpertsConfig | None = None  # mixtures of experts in place of MLPs
    attn_softcap: float | None = None  # attention scores become cap * tanh(score / cap)
    logit_softcap: float | None = None  # logits likewise
    attn_scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    embedding_scale: float | None = None  # of embeddings as they enter the first layer
    norm_offset: float = 0.0  # added to the weights of all norms
    local_rope: RopeConfig | None = None  # in layers with a window; None: as in the others
    latent: LatentConfig | None = None  # of latent attention, whose head_dim is that of what is stored
    sinks: bool = False  # each head has a score of one key more, whose value is zero
    part: Part = WHOLE  # whose heads and inner sizes these are (`models.parts`)
    kv_copies: int = 1  # ranks that have the same K/V heads
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str | None = None  # of the checkpoint, as its config says
    raw: RawConfig = field(default_factory=dict, repr=False, compare=False)  # config.json as it was read


def layered(*configs: RawConfig) -> RawConfig:
    """Fields of several configurations, an earlier one's before a later one's. Nothing is copied, so that fields that
    nobody asks for count as not read (`unfollowed`)."""
    return ChainMap(*cast(tuple[dict[str, Any], ...], configs))


def require_int(raw: RawConfig, name: str, default: int | None = None) -> int:
    """A positive integer field; ModelLoadError naming it when it is missing (without default) or is none."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json has no {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelLoadError(f"config.json: {name!r} must be a positive integer, not {value!r}")
    return value


def dense_config(
    raw: RawConfig,
    *,
    architecture: str,
    max_model_len: int | None = None,
    sliding_window: Sequence[int | None] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    wide_qk_norm: bool = False,
    experts: ExpertsConfig | None = None,
    activation: Activation = SILU,
    sinks: bool = False,
    logit_softcap: float | None = None,
    rope: tuple[RopeConfig, int] | None = None,
) -> ModelConfig:
    """Read the fields that every dense family shares; a family passes what differs.

    Args:
        max_model_len: length the caller asks for; None: the model's own.
        sliding_window: per layer; None: full attention everywhere.
        head_dim: when ``config.json`` does not give one; None: hidden_size / num_attention_heads.
        activation: of gated MLPs; whoever gives one has looked at the config's.
        logit_softcap: of logits, for families that know one.
        rope: rotation and model length, read already; None: they are read here.
        experts: mixtures of experts; where every layer has one, ``intermediate_size`` may be missing.

    Raises:
        ModelLoadError: a field is missing, out of range, or asks for something that is not supported.
    """
    hidden, heads = require_int(raw, "hidden_size"), require_int(raw, "num_attention_heads")
    layers = require_int(raw, "num_hidden_layers")
    kv_heads = require_int(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelLoadError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if raw.get("head_dim") is None and head_dim is None and hidden % heads:
        raise ModelLoadError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    dim = require_int(raw, "head_dim", head_dim or hidden // heads)
    named = raw.get("hidden_act", "silu")
    if activation is SILU and named not in ("silu", "swish"):
        raise ModelLoadError(f"activation {named!r} is not supported (only silu)")
    if raw.get("final_logit_softcapping") is not None and logit_softcap is None:
        raise ModelLoadError("final_logit_softcapping (a soft cap on the logits) is not supported")
    positions = require_int(raw, "max_position_embeddings", 2048)
    rotation, length = rope or parse_rope(raw, dim, positions, max_model_len)
    vocab_size = require_int(raw, "vocab_size")
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    inner = experts.inner if experts is not None and all(experts.layers) else None
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=require_int(raw, "intermediate_size", inner),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_model_len=length,
        rope=rotation,
        sliding_window=tuple(sliding_window) if sliding_window is not None else (None,) * layers,
        norm_eps=_norm_eps(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        wide_qk_norm=wide_qk_norm,
        experts=experts,
        activation=activation,
        sinks=sinks,
        attn_softcap=softcap_of(raw, "attn_logit_softcapping"),
        logit_softcap=logit_softcap,
        eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
        bos_token_id=next(iter(token_ids(raw.get("bos_token_id"), "bos_token_id")), None),
        dtype=dtype if isinstance(dtype, str) else None,
        raw=raw,
    )


def windows_by_layer(raw: RawConfig, default: int | None = None) -> tuple[int | None, ...]:
    """The sliding window of each layer of a Qwen-style config: ``use_sliding_window``, ``sliding_window``, and
    ``layer_types`` or ``max_window_layers`` (layers from that number on slide).

    Example: 4 layers, window 64, max_window_layers 2 -> (None, None, 64, 64).
    """
    layers = require_int(raw, "num_hidden_layers")
    window = raw.get("sliding_window", default)
    if not raw.get("use_sliding_window", False) or window is None:
        return (None,) * layers
    window = require_int(raw, "sliding_window", default)
    types = raw.get("layer_types")
    if types is None:
        full = raw.get("max_window_layers", 28)
        return tuple(None if i < full else window for i in range(layers))
    return windows_of_types(types, layers, window)


def windows_of_types(types: object, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The window of each layer by ``layer_types``: that of the sliding ones is ``window``."""
    if not isinstance(types, list):
        raise ModelLoadError(f"config.json: layer_types must be a list, not {types!r}")
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(str(kind) for kind in types if kind not in known)
    if unknown or len(types) != layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(types)} entries for {layers} layers, unknown: {unknown}"
        )
    return tuple(known[kind] for kind in types)


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """A token id field that may be missing, one id or a list of ids."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ModelLoadError(f"{name!r} must be a token id or a list of token ids, not {value!r}")
    return tuple(values)


def softcap_of(raw: RawConfig, name: str) -> float | None:
    """A soft cap, or None."""
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise ModelLoadError(f"config.json: {name!r} must be a positive number, not {value!r}")
    return float(value)


def _norm_eps(raw: RawConfig) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or not 0 <= value < inf:
        raise ModelLoadError(f"config.json: 'rms_norm_eps' must be a number, not {value!r}")
    return float(value)

"""Names of tensors and settings of published heads, and their translation to the engine's.

=====================  ======================================================================================
EAGLE                  ``fc.*``, ``layers.0.*``, maybe ``embed_tokens``, maybe all below ``model.``
EAGLE-3                ``fc``, ``midlayer.*`` or ``layers.0.*``, ``norm``, ``lm_head``, ``d2t``, ``t2d``; the same below
                       ``model.``; architectures LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, Eagle3Speculator
P-EAGLE                as EAGLE-3, and ``mask_hidden`` [1, 3H] or [1, 1, 3H] (3: the target's layers that are read);
                       the mask token is ``pard_token``, ``mask_token_id`` or ``ptd_token_id`` of config.json
speculators            a config.json whose layer is described in ``transformer_layer_config``; tensors as above
block drafters         see `models.heads.block_formats`
MTP layers             see `models.heads.mtp_names`
=====================  ======================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from draftwise.config.heads import mask_token_of
from draftwise.errors import ModelLoadError
from draftwise.models.config import ModelConfig, RawConfig, dense_config, require_int
from draftwise.models.deepseek import latent_config
from draftwise.models.dense import DenseDecoder
from draftwise.models.heads.base import TargetLink
from draftwise.models.heads.eagle import EagleOptions
from draftwise.models.heads.eagle3 import Eagle3Options, default_feature_layers
from draftwise.models.heads.tensors import HeadTensors
from draftwise.models.heads.vocabulary import target_ids_of
from draftwise.models.layers import LayerWeights
from draftwise.models.mlp import ExpertNames
from draftwise.models.registry import resolve_model
from draftwise.models.rope import over_text

_ROTATIONS = ("rope_scaling", "rope_parameters")

logger = logging.getLogger("draftwise")

_SPECULATORS = {
    "eagle3": ("eagle3", "peagle"),
    "mtp": ("mtp",),
    "dflash": ("dflash", "dspark", "dflash2", "domino"),
}


def rename_eagle(name: str) -> str | None:
    """Names of EAGLE's and EAGLE-3's tensors in the engine.

    Examples: model.fc.weight -> fc.weight; midlayer.mlp.up_proj.weight -> layers.0.mlp.up_proj.weight. Rotary tables
    that old checkpoints carry are dropped.
    """
    name = name.removeprefix("model.")
    if name.endswith("rotary_emb.inv_freq"):
        return None
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def head_settings(raw: RawConfig, method: str) -> RawConfig:
    """A config.json with the settings of the head's layer at its top, whichever way it is written.

    Raises:
        ModelLoadError: a speculators-format folder of another method.
    """
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    if kind not in _SPECULATORS.get(method, ()):
        raise ModelLoadError(
            f"config.json: speculators_model_type {kind!r} is not a head of method {method!r}"
        )
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ModelLoadError("config.json has no 'transformer_layer_config'")
    outer = {name: value for name, value in raw.items() if name != "transformer_layer_config"}
    # what vLLM takes for granted in folders of this format
    return {"norm_before_residual": kind != "peagle", **layer, **outer}


def layer_config(
    raw: RawConfig, tensors: HeadTensors, num_layers: int, *, latent: bool = False
) -> ModelConfig:
    """The shape of a head's ``layers.{i}.*``: sizes from its settings, biases and per-head norms from its tensors.

    M-RoPE, of heads for models of text and images, is the plain rotation: rows are of text.

    Args:
        latent: layers may have latent attention, as those of heads for DeepSeek and Kimi.

    Raises:
        ModelLoadError: the layers are of a kind that is not supported (experts, latent attention, attention with a
            gate), or a size is missing.
    """
    raw = {
        name: (over_text(value) or None) if name in _ROTATIONS and isinstance(value, Mapping) else value
        for name, value in raw.items()
    }
    first = "layers.0."
    odd = [
        name
        for name in tensors
        if ".mlp.experts." in name or ("kv_a_proj" in name and not latent) or ".mlp.gate.weight" in name
    ]
    if odd:
        kind = "latent attention" if "kv_a_proj" in odd[0] else "experts"
        raise ModelLoadError(f"a draft layer with {kind} ({tensors[odd[0]].origin}) is not supported")
    q, heads, dim = (
        tensors.linear_shape(first + "self_attn.q_proj"),
        raw.get("num_attention_heads"),
        raw.get("head_dim"),
    )
    if q is not None and isinstance(heads, int) and isinstance(dim, int) and q[0] == 2 * heads * dim:
        query = next(t.origin for name, t in tensors.items() if name.startswith(first + "self_attn.q_proj."))
        raise ModelLoadError(
            f"a draft layer whose attention has an output gate ({query}: {q[0]} rows for {heads} heads of {dim}; "
            "Qwen3-Next, Qwen3.5) is not supported"
        )
    raw = {**raw, "num_hidden_layers": num_layers}
    if any("kv_a_proj" in name for name in tensors):
        if first + "self_attn.q_a_proj.weight" not in tensors:
            raw["q_lora_rank"] = None
        interleaved = bool(raw.get("rope_interleave", True))
        config = latent_config(raw, "draft head", None, None, interleaved=interleaved)
        return replace(config, sliding_window=(None,) * num_layers)
    config = dense_config(
        raw,
        architecture="draft head",
        head_dim=_head_dim(raw, tensors),
        qkv_bias=first + "self_attn.q_proj.bias" in tensors,
        o_bias=first + "self_attn.o_proj.bias" in tensors,
        mlp_bias=first + "mlp.gate_proj.bias" in tensors,
        qk_norm=first + "self_attn.q_norm.weight" in tensors,
    )
    return replace(config, sliding_window=(None,) * num_layers)


def head_windows(raw: RawConfig, num_layers: int) -> tuple[int | None, ...]:
    """How far back each layer of a head attends, in positions; None: to the beginning.

    Heads of the speculators project have windows by default (``layer_types`` of their layer's settings); other settings
    say so with ``use_sliding_window``. A ``sliding_window`` alone, as every Qwen config has one, means nothing.

    Raises:
        ModelLoadError: layers of another type, or a window without a size.
    """
    types = raw.get("layer_types")
    if not isinstance(types, list | tuple) or not types:
        types = ["sliding_attention" if raw.get("use_sliding_window") else "full_attention"] * num_layers
    if len(types) < num_layers:
        raise ModelLoadError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    unknown = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"config.json: draft layers of type {', '.join(unknown)} are not supported")
    return tuple(
        require_int(raw, "sliding_window") if kind == "sliding_attention" else None
        for kind in types[:num_layers]
    )


def sparse_layers(
    raw: RawConfig, tensors: HeadTensors, num_layers: int
) -> tuple[ModelConfig, ExpertNames, type[LayerWeights]] | None:
    """The shape of MTP layers that have experts, what the experts' tensors are called, and what the layers are made
    of: as the target's family says, whose config the settings then are. None: they have none, or nobody knows the
    family.

    Raises:
        ModelLoadError: the family refuses the settings.
    """
    if not any(".mlp.experts." in name for name in tensors):
        return None
    if not raw.get("architectures"):
        return None
    architecture, family = resolve_model(raw)
    if not issubclass(family, DenseDecoder):
        return None
    config = family.parse(raw, architecture)
    if config.experts is None:
        return None
    names = family.names.experts
    prefix = {
        field.name: getattr(names, field.name).removeprefix("model.")
        for field in fields(names)
        if getattr(names, field.name) is not None
    }
    own = replace(
        config,
        num_layers=num_layers,
        sliding_window=(None,) * num_layers,
        experts=replace(config.experts, layers=(True,) * num_layers),
    )
    return own, replace(names, **prefix), family.weights


def _head_dim(raw: RawConfig, tensors: HeadTensors) -> int | None:
    """When the settings do not give it: families whose default is not hidden_size / num_attention_heads."""
    heads = raw.get("num_attention_heads")
    q = tensors.linear_shape("layers.0.self_attn.q_proj")
    if raw.get("head_dim") is not None or q is None or not isinstance(heads, int) or heads < 1:
        return None
    return q[0] // heads


def check_target(raw: RawConfig, link: TargetLink) -> None:
    """Raises ModelLoadError if the settings name another target's vocabulary or hidden size."""
    vocab = raw.get("vocab_size")
    if isinstance(vocab, int) and vocab not in (link.vocab_size, raw.get("draft_vocab_size")):
        raise ModelLoadError(
            f"vocab_size {vocab} is not the target's {link.vocab_size}: the head is for another target"
        )
    hidden = raw.get("target_hidden_size")
    if isinstance(hidden, int) and hidden != link.hidden_size:
        raise ModelLoadError(
            f"target_hidden_size {hidden} is not the target's hidden size {link.hidden_size}: the head is for another "
            "target"
        )


def number_of_layers(tensors: HeadTensors) -> int:
    """Layers ``layers.{i}.*`` that the tensors name, at least 1."""
    found = [
        int(name.split(".")[1])
        for name in tensors
        if name.startswith("layers.") and name.split(".")[1].isdigit()
    ]
    return 1 + max(found, default=0)


def eagle_options(raw: RawConfig, tensors: HeadTensors) -> EagleOptions:
    """The settings of an EAGLE head, from its tensors."""
    return EagleOptions(
        fc_bias="fc.bias" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        logit_scale=float(raw.get("logit_scale", 1.0)),
    )


def eagle3_options(raw: RawConfig, tensors: HeadTensors, link: TargetLink) -> Eagle3Options:
    """The settings of an EAGLE-3 head, from its config.json and tensors."""
    nested = _eagle_config(raw)
    head = tensors.get("lm_head.weight")
    draft_vocab = raw.get("draft_vocab_size") or (head.shape[0] if head is not None else None)
    return Eagle3Options(
        feature_layers=_feature_layers(raw, link),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(nested.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        fc_bias="fc.bias" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        own_head=head is not None,
        draft_vocab_size=draft_vocab,
        logit_scale=float(raw.get("logit_scale", 1.0)),
    )


def mask_token(raw: RawConfig, tensors: HeadTensors) -> int:
    """The mask token of a P-EAGLE head.

    Raises:
        ModelLoadError: the settings name none, or the head has no ``mask_hidden``: it was not trained to draft in
            parallel.
    """
    token = mask_token_of(raw)
    if token is None:
        raise ModelLoadError(
            "parallel_drafting: config.json names no mask token (pard_token, mask_token_id or ptd_token_id); the head "
            "was not trained to draft in parallel"
        )
    if "mask_hidden" not in tensors:
        raise ModelLoadError(
            "parallel_drafting: tensor mask_hidden is missing; the head was not trained to draft in parallel"
        )
    return token


def _feature_layers(raw: RawConfig, link: TargetLink) -> tuple[int, ...] | None:
    """Target layers that are read. They are joined in the order in which the target's pass comes by."""
    nested = _eagle_config(raw)
    if not nested.get("use_aux_hidden_state", True):
        return None
    name = "eagle_aux_hidden_state_layer_ids"
    ids = raw.get(name) or nested.get(name)
    if ids is None or ids == []:
        return default_feature_layers(link.num_layers)
    if not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids):
        raise ModelLoadError(f"config.json: {name} must be a list of layer numbers, not {ids!r}")
    if min(ids) == 1 and not raw.get("layer_ids_are_inputs"):
        # No head reads the input of layer 1, so these numbers (SpecForge, nvidia) mean outputs of layers.
        logger.info("%s %s is read as the outputs of these layers (it begins with 1)", name, list(ids))
        ids = [layer + 1 for layer in ids]
    return tuple(sorted(ids))


def _eagle_config(raw: RawConfig) -> Mapping[str, Any]:
    nested = raw.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def draft_ids(tensors: HeadTensors) -> torch.Tensor | None:
    """int64 [Vd] the target's id of each draft token, from ``d2t``; None: there is no draft vocabulary."""
    return target_ids_of(tensors.read("d2t")) if "d2t" in tensors else None

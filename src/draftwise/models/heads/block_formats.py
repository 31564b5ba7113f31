"""Names of tensors and settings of published block drafters.

=================  ==========================================================================================
z-lab              architectures ``DFlashDraftModel``; ``dflash_config`` {target_layer_ids, mask_token_id,
                   block_size}, or the same at the top; ids name layers whose *output* is read; tensors ``fc``,
                   ``hidden_norm``, ``layers.{i}.*``, ``norm``; embedding and output layer are the target's
DeepSpec           architectures ``Qwen3DSparkModel``; the same settings at the top, and ``markov_rank``,
                   ``markov_head_type``; id -1 is the embedding; own ``embed_tokens`` and ``lm_head``,
                   ``markov_head.*``, maybe ``confidence_head.*``; the root's row gives the first draft
DFlash2            architectures ``DFlash2DraftModel``: z-lab's, ``candidate_selector.*``, ``selector_top_k``,
                   ``layers.{i}.attention_conv.*`` and ``mlp_conv.*``; windowed layers see both ways within the block
Domino             SpecForge's: ``dflash_config`` {projector_type domino, gru_hidden_dim, emb_dim,
                   pure_draft_prefix_len, shift_label}; ``prefix_gru.*``, ``embed_proj.*``
speculators        ``speculators_model_type`` dflash, dflash2, domino or dspark; ``aux_hidden_state_layer_ids`` name
                   what *enters* a layer; ``d2t``, ``t2d``, ``embed_tokens``, ``lm_head``; ``sample_from_anchor`` or
                   ``shift_label`` say whether the root's row gives the first draft (dspark: it does)
=================  ==========================================================================================

Layers of type ``sliding_attention`` are causal within the block unless ``is_causal``, ``dflash_config.causal`` or
``sliding_window_non_causal`` say something else; others are not. JetSpec (arXiv:2606.18394) is a drafter with
``causal: true``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from draftwise.config.heads import block_settings, drafts_from_root
from draftwise.errors import ModelLoadError
from draftwise.models.config import RawConfig, require_int
from draftwise.models.heads.base import TargetLink
from draftwise.models.heads.block import BlockOptions
from draftwise.models.heads.block_conv import ConvShape
from draftwise.models.heads.formats import head_windows
from draftwise.models.heads.markov import MarkovShape
from draftwise.models.heads.tensors import HeadTensors

logger = logging.getLogger("draftwise")

_ABSENT = {
    "mask_embedding": "a mask embedding of its own",
    "attention_sink": "sinks in attention",
    "pre_fc_norms": "norms before fc",
}
"""Parts of tensors' names, and what they are; a drafter that has them drafts otherwise than we would."""


def rename_block(name: str) -> str | None:
    """Names of block drafters' tensors in the engine.

    Examples: model.encoder.fc.weight -> fc.weight; midlayer.mlp.up_proj.weight -> layers.0.mlp.up_proj.weight.
    """
    name = name.removeprefix("model.")
    if name.endswith("rotary_emb.inv_freq"):
        return None
    if name.startswith("encoder."):
        name = name.removeprefix("encoder.").replace("output_norm_enc.", "hidden_norm.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def block_options(raw: RawConfig, tensors: HeadTensors, link: TargetLink) -> BlockOptions:
    """The settings of a block drafter, from its config.json and tensors.

    Raises:
        ModelLoadError: a setting is missing, or it is of a kind that is not supported; named.
    """
    for name in tensors:
        for part, what in _ABSENT.items():
            if part in name:
                raise ModelLoadError(f"{what} ({tensors[name].origin}) is not supported")
    own = block_settings(raw)
    projector = str(own.get("projector_type") or "dflash").lower()
    if projector not in ("dflash", "dflash2", "dspark", "none", "domino"):
        raise ModelLoadError(f"config.json: projector_type {own['projector_type']!r} is not supported")
    if own.get("attention_value_scale") not in (None, 1, 1.0):
        raise ModelLoadError("config.json: attention_value_scale is not supported")
    if raw.get("is_neox_style") is False:
        raise ModelLoadError("config.json: is_neox_style false (neighbours rotated) is not supported")
    head = tensors.get("lm_head.weight")
    draft_vocab = raw.get("draft_vocab_size") if head is not None else None
    if draft_vocab is None and head is not None:
        draft_vocab = head.shape[0]
    rank = raw.get("markov_rank") or 0
    if rank and "markov_head.markov_w1.weight" not in tensors:
        raise ModelLoadError(
            f"config.json: markov_rank is {rank}, and markov_head.markov_w1.weight is missing"
        )
    if any(name.startswith("confidence_head.") for name in tensors):
        logger.info(
            "%s: the confidence head is not used; how much is drafted follows from acceptance", tensors.folder
        )
    domino = None
    if (projector == "domino") != ("prefix_gru.weight_ih_l0" in tensors) and "domino" not in str(
        raw.get("speculators_model_type")
    ):
        raise ModelLoadError(
            "config.json: projector_type domino and the tensor prefix_gru.weight_ih_l0 belong together"
        )
    if "prefix_gru.weight_ih_l0" in tensors:
        first = own.get("pure_draft_prefix_len", 0)
        domino = (require_int(own, "gru_hidden_dim"), require_int(own, "emb_dim"), int(first or 0))
    softcap = own.get("final_logit_softcapping")
    scale = own.get("input_embedding_scale")
    return BlockOptions(
        feature_layers=_feature_layers(raw, own, link),
        mask_token=require_int(own, "mask_token_id"),
        block_size=require_int(own, "block_size"),
        from_root=drafts_from_root(raw),
        own_embedding="embed_tokens.weight" in tensors,
        own_head=head is not None,
        draft_vocab_size=draft_vocab,
        logit_scale=float(own.get("output_multiplier", 1.0)),
        logit_softcap=float(softcap) if softcap else None,
        embedding_scale=None if scale in (None, 1, 1.0) else float(scale),
        markov=MarkovShape(str(raw.get("markov_head_type", "vanilla")).lower(), int(rank)) if rank else None,
        domino=domino,
        selector=_selector(own, tensors),
        convs=_convs(own, tensors),
    )


def _selector(own: Mapping[str, Any], tensors: HeadTensors) -> tuple[int, int] | None:
    """Rank and candidates of DFlash2's path selector."""
    table = tensors.get("candidate_selector.predecessor_codebook")
    if table is None:
        return None
    top_k = own.get("selector_top_k", 16)
    if type(top_k) is not int:
        raise ModelLoadError(f"config.json: selector_top_k must be a number, not {top_k!r}")
    return table.shape[-1], top_k


def _convs(own: Mapping[str, Any], tensors: HeadTensors) -> ConvShape | None:
    """DFlash2's convolutions: taps from the tensors, groups from how many numbers a kernel has."""
    base = tensors.get("layers.0.attention_conv.base_kernel")
    projection = tensors.get("layers.0.attention_conv.kernel_projection.weight")
    if base is None and projection is None:
        return None
    if base is None or projection is None or len(base.shape) != 3 or not base.shape[1]:
        raise ModelLoadError("DFlash2's convolutions (layers.0.attention_conv.*) are not whole")
    return ConvShape(base.shape[1], projection.shape[0] // (2 * base.shape[1]))


def _feature_layers(raw: RawConfig, own: Mapping[str, Any], link: TargetLink) -> tuple[int, ...]:
    """Layers whose entering states are read. Who names outputs means one more."""
    name, more = "target_layer_ids", 1
    ids = own.get(name)
    if "speculators_model_type" in raw:
        name, more = "aux_hidden_state_layer_ids", 0
        ids = raw.get(name)
    if ids is None and "num_target_layers" in raw and "speculators_model_type" not in raw:
        return _spread(require_int(raw, "num_target_layers"), require_int(raw, "num_hidden_layers"))
    if not isinstance(ids, list | tuple) or not ids or not all(type(layer) is int for layer in ids):
        raise ModelLoadError(f"config.json: {name} must be a list of the target's layers, not {ids!r}")
    if raw.get("num_target_layers") not in (None, link.num_layers):
        raise ModelLoadError(
            f"config.json: num_target_layers {raw['num_target_layers']} is not the target's {link.num_layers}: the "
            "drafter is for another target"
        )
    return tuple(layer + more for layer in ids)


def _spread(num_target: int, num_draft: int) -> tuple[int, ...]:
    """What z-lab's first drafters read, whose config says no layers: outputs from layer 1 to the third last, as many as
    they have layers; one layer reads the middle.

    Example: 36 and 5: outputs of 1, 9, 17, 25, 33, which enter 2, 10, 18, 26, 34.
    """
    if num_draft == 1:
        return (num_target // 2 + 1,)
    step = (num_target - 4) / (num_draft - 1)
    return tuple(round(1 + i * step) + 1 for i in range(num_draft))


def block_windows(raw: RawConfig, num_layers: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """How far back each layer attends, and whether it is causal within the block.

    Raises:
        ModelLoadError: layers of another type, or a window without a size.
    """
    own = block_settings(raw)
    settings = dict(raw)
    if own.get("swa_window_size") is not None:
        settings["sliding_window"] = own["swa_window_size"]
    if not raw.get("layer_types"):
        settings["use_sliding_window"] = bool(own.get("use_swa", False))
    windows = head_windows(settings, num_layers)
    told = raw.get("is_causal")
    if told is None:
        told = own.get("causal")
    kind = f"{raw.get('speculators_model_type')} {raw.get('architectures')}".lower()
    if told is None and raw.get("sliding_window_non_causal", "dflash2" in kind) is True:
        told = False
    if told is not None:
        return windows, (bool(told),) * num_layers
    by_type = bool(raw.get("layer_types"))
    return windows, tuple(by_type and window is not None for window in windows)

"""The names of multi-token-prediction layers in published checkpoints; a target's loader passes over them.

===============  ================================================================================================
DeepSeek-V3      ``model.layers.{n}.{enorm, hnorm, eh_proj, shared_head.norm}`` beside the layer's own tensors, n from
                 the target's number of layers on; maybe ``embed_tokens`` and ``shared_head.head``, copies of the
                 target's
Qwen3-Next       ``mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}``, shared by all layers
                 ``mtp.layers.{i}.*``
MiMo             ``model.mtp_layers.{i}.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}`` beside the
                 layer's own tensors
===============  ================================================================================================

In the engine all are ``{i}.{enorm, hnorm, proj, norm}.weight`` and ``layers.{i}.*``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.(.+)$")
_MIMO = re.compile(r"^(?:model\.)?mtp_layers\.(\d+)\.(.+)$")
_QWEN = re.compile(r"^mtp\.(?:layers\.(\d+)\.)?(.+)$")
_PARTS = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "proj",
    "shared_head.norm": "norm",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "proj",
    "final_layernorm": "norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "proj",
    "norm": "norm",
    "embed_tokens": "embed_tokens",
    "shared_head.head": "lm_head",
}
_BROUGHT = ("embed_tokens", "lm_head")  # parts that a layer may have of its own, whatever is shared


@dataclass(frozen=True, slots=True)
class MtpForm:
    """How a family puts a layer together."""

    name: str
    token_first: bool  # order of the normalised token and feature in the projection's input
    zero_first: bool  # the first row's embedding counts as zero
    normed_feature: bool  # the feature of the next row is the output after the last norm; else before it
    shared: bool  # norms and projection are the same for all layers


DEEPSEEK = MtpForm("DeepSeek-V3", token_first=True, zero_first=True, normed_feature=False, shared=False)
QWEN = MtpForm("Qwen3-Next", token_first=True, zero_first=False, normed_feature=True, shared=True)
MIMO = MtpForm("MiMo", token_first=False, zero_first=True, normed_feature=True, shared=False)
SPECULATORS = MtpForm("speculators", token_first=True, zero_first=False, normed_feature=True, shared=False)
"""MiMo's names with the order of Qwen3-Next."""


def mtp_form(names: Collection[str], speculators: bool) -> MtpForm | None:
    """Which form a checkpoint's MTP layers have, by their names; None: it has none.

    ``speculators``: the folder is in that project's format, which means something else by MiMo's names.
    """
    for name in names:
        base = name.rpartition(".")[0]  # .weight, or what a quantised layer has in its place
        if name.startswith("mtp.") and base.endswith(".fc"):
            return QWEN
        if _MIMO.match(name) and base.endswith(".input_proj"):
            return SPECULATORS if speculators else MIMO
        if _LAYER.match(name) and base.endswith(".eh_proj"):
            return DEEPSEEK
    return None


def renamer(names: Collection[str], form: MtpForm) -> dict[str, str]:
    """Checkpoint name -> the engine's name, of the tensors of MTP layers; also ``embed_tokens.weight`` and
    ``lm_head.weight`` where a layer has its own (DeepSeek's naming; ``{i}.`` before them).

    Example: model.layers.61.eh_proj.weight -> 0.proj.weight, model.layers.61.mlp.up_proj.weight ->
    layers.0.mlp.up_proj.weight, model.layers.61.shared_head.head.weight -> 0.lm_head.weight. Tensors of quantised
    layers keep their suffix: model.layers.61.eh_proj.weight_scale_inv -> 0.proj.weight_scale_inv.
    """
    pattern = {"DeepSeek-V3": _LAYER, "Qwen3-Next": _QWEN}.get(form.name, _MIMO)
    found = [(name, match) for name in names if (match := pattern.match(name))]
    numbers = sorted({int(m.group(1)) for _, m in found if m.group(1) is not None})
    if form is DEEPSEEK:  # other layers are the target's
        numbers = sorted({int(m.group(1)) for _, m in found if m.group(2).startswith("eh_proj.")})
    index = {number: i for i, number in enumerate(numbers)}
    out: dict[str, str] = {}
    for name, match in found:
        rest = match.group(2)
        if match.group(1) is None:
            i = 0
        elif int(match.group(1)) in index:
            i = index[int(match.group(1))]
        else:
            continue
        base, _, suffix = rest.rpartition(".")
        part = _PARTS.get(base)
        if part is not None and (part in _BROUGHT or (match.group(1) is None) == form.shared):
            out[name] = f"{i}.{part}.{suffix}"
        elif not rest.endswith("rotary_emb.inv_freq"):
            out[name] = f"layers.{i}.{rest}"
    return out


def mtp_tensors(names: Collection[str]) -> set[str]:
    """Which tensors of a target's checkpoint are its MTP layers'.

    Example: model.layers.12.enorm.weight and model.layers.12.mlp.up_proj.weight, if model.layers.12.eh_proj.weight is
    there too.
    """
    form = mtp_form(names, False)
    return set() if form is None else set(renamer(names, form))

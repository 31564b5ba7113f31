"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (2106.09685); rank-stabilised scales:
Kalajdzievski 2023 (2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import read_json
from draftwise.models.heads.tensors import HeadTensors, scan_head
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.paths import resolve_path
from draftwise.models.words import shorten

_KEY = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight$")
_REFUSED = {
    "use_dora": "DoRA (magnitudes beside the low-rank part)",
    "modules_to_save": "modules_to_save (whole modules in the place of the model's)",
    "lora_bias": "lora_bias (biases in the low-rank part)",
    "layer_replication": "layer_replication (layers that stand there twice)",
    "trainable_token_indices": "trainable_token_indices (rows of the embedding)",
    "target_parameters": "target_parameters (parameters that are not linear layers, such as experts)",
    "use_qalora": "QA-LoRA",
    "alora_invocation_tokens": "activated LoRA (adapters that begin inside a text)",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_adapter(path: str, *, max_rank: int | None = None) -> dict[str, LowRank]:
    """The low-rank parts of an adapter, by the name of the linear layer in the checkpoint, without ``.weight``.

    Args:
        path: folder or hub id.
        max_rank: the largest rank that is taken; None: any.

    Raises:
        ModelLoadError: no adapter, something in it is not supported (named), or its tensors do not fit together.
    """
    folder = resolve_path(path, weights=True, pickles=True)
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise ModelLoadError(f"{folder} is not an adapter: adapter_config.json is missing")
    raw = read_json(file)
    try:
        _refuse(raw)
        tensors = scan_head(folder, "adapter_model.safetensors", "adapter_model.bin")
        return _parts(raw, tensors, max_rank)
    except ModelLoadError as error:
        if str(error).startswith(str(folder)):
            raise
        raise ModelLoadError(f"{folder}: {error}") from error
    except (re.error, AttributeError, TypeError) as error:  # of patterns that are none
        raise ModelLoadError(f"{folder}: adapter_config.json is not understood: {error}") from error


def _refuse(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(f"adapters of type {kind!r} are not supported, only LORA")
    for name, what in _REFUSED.items():
        if raw.get(name):
            raise ModelLoadError(f"{what} is not supported")
    if raw.get("bias", "none") != "none":
        raise ModelLoadError(f"bias {raw['bias']!r} (biases of its own) is not supported")
    start = str(raw.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGED_BASE):
        raise ModelLoadError(
            f"init_lora_weights {start!r} changes the model's own weights, which is not supported"
        )


def _parts(raw: Mapping[str, Any], tensors: HeadTensors, max_rank: int | None) -> dict[str, LowRank]:
    pairs: dict[str, dict[str, str]] = {}
    odd = []
    for name in tensors:
        found = _KEY.match(name)
        if found is None:
            odd.append(name)
        else:
            pairs.setdefault(found.group(1), {})[found.group(2)] = name
    if odd:
        raise ModelLoadError(
            f"tensors that are not a low-rank part of a linear layer: {shorten(sorted(odd))}"
        )
    if not pairs:
        raise ModelLoadError("it has no tensors (such as ...q_proj.lora_A.weight)")
    out = {}
    for module, names in sorted(pairs.items()):
        if len(names) != 2:
            raise ModelLoadError(f"{module} has only lora_{next(iter(names))}")
        a, b = tensors[names["A"]], tensors[names["B"]]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ModelLoadError(
                f"{module}: {list(a.shape)} and {list(b.shape)} are not two parts of one product"
            )
        rank = a.shape[0]
        said = _pattern(raw.get("rank_pattern"), module, raw.get("r"))
        if said != rank:
            raise ModelLoadError(f"{module} has rank {rank}, adapter_config.json says {said!r}")
        if max_rank is not None and rank > max_rank:
            raise ModelLoadError(f"{module} has rank {rank}, which is over max_lora_rank = {max_rank}")
        alpha = _pattern(raw.get("alpha_pattern"), module, raw.get("lora_alpha", rank))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ModelLoadError(f"lora_alpha must be a number, not {alpha!r}")
        scale = alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)
        out[module] = LowRank(tensors.read(names["A"]), tensors.read(names["B"]), scale)
    return out


def _pattern(table: Any, module: str, default: Any) -> Any:
    """The value of the pattern that matches a module's name, or the end of it from a dot on."""
    for key, value in (table or {}).items():
        if re.match(rf"(?:.*\.)?(?:{key})$", module):
            return value
    return default

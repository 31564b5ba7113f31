"""Names of speculative methods: those there are, those to come, old spellings, and which one a checkpoint is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.errors import ConfigError

BUILTIN_METHODS = ("draft_model", "ngram", "synthetic")
PLANNED_METHODS = ("suffix", "eagle", "eagle3", "medusa", "mtp", "dflash", "extract_hidden_states")
METHOD_ALIASES = {
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "[suffix]": "suffix",
    "draft": "draft_model",
    "deepseek_mtp": "mtp",
    "mimo_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "ernie_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "longcat_flash_mtp": "mtp",
}
MODELLESS_METHODS = ("ngram", "synthetic", "suffix")
CHAIN_METHODS = ("ngram", "draft_model")
"""Methods that draft chains only, and so refuse a `speculative_token_tree`."""


def resolve_method(value: str) -> str:
    """Return the method's canonical name.

    Raises:
        ConfigError: the method is unknown (the closest name is suggested) or not supported yet.
    """
    name = METHOD_ALIASES.get(value, value)
    if name in PLANNED_METHODS:
        also = f" (an old name of {name!r})" if name != value else ""
        raise ConfigError(
            f"speculative_config.method: {value!r}{also} is not supported yet; "
            f"available: {', '.join(BUILTIN_METHODS)}, or a registered proposer"
        )
    if name in BUILTIN_METHODS:
        return name
    # Names that third parties registered, and dotted paths. Imported late: the registry needs torch.
    from draftwise.propose.registry import resolve_proposer

    resolve_proposer(name)
    return name


def detect_method(model: str, revision: str | None) -> str:
    """Tell from a draft checkpoint's config.json (local, or in the hub's cache) which method it is for.

    Without a config.json in reach the name decides, as users of eagle heads are used to; what names no
    special head is a draft model. The answer may be a method that is not supported yet.
    """
    if model in METHOD_ALIASES or model in MODELLESS_METHODS:
        return METHOD_ALIASES.get(model, model)
    config = _read_config(model, revision)
    if config is None:
        lowered = model.lower()
        for marker in ("eagle3", "eagle", "medusa", "dflash", "mtp"):
            if marker in lowered:
                return marker
        return "draft_model"
    return _method_of(config)


def _method_of(config: Mapping[str, Any]) -> str:
    kind = str(config.get("speculators_model_type") or config.get("model_type") or "").lower()
    architectures = " ".join(map(str, config.get("architectures") or ())).lower()
    if kind in ("peagle", "p-eagle"):
        return "eagle3"
    for marker in ("eagle3", "eagle", "medusa", "dflash", "mtp"):
        if marker in kind or marker in architectures:
            return marker
    if "medusa_num_heads" in config:
        return "medusa"
    if "draft_vocab_size" in config or "eagle_aux_hidden_state_layer_ids" in config:
        return "eagle3"
    return "draft_model"


def _read_config(model: str, revision: str | None) -> Mapping[str, Any] | None:
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        if Path(model).expanduser().exists():
            return None
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "config.json", revision=revision)
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"speculative_config.model: {model!r} has an unreadable config.json: {error}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"speculative_config.model: {model!r} has a config.json that is no JSON object")
    return config

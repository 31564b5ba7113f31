"""Fields of a `SpeculativeConfig` that do not go with its method, or with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.config.extraction import extracted_layers
from draftwise.config.hybrid import check_look_up
from draftwise.errors import ConfigError
from draftwise.names import CHAIN_METHODS, HEAD_METHODS, STATIC_METHODS

_ONLY_FOR = {
    "draft_num_layers": ("early_exit",),
    "hybrid_drafter": ("hybrid",),
    "hybrid_lookup": ("hybrid",),
    "hybrid_min_match": ("hybrid",),
    "prompt_lookup_max": ("ngram", "hybrid"),
    "prompt_lookup_min": ("ngram", "hybrid"),
    "draft_model_config": ("extract_hidden_states",),
    "parallel_drafting": ("draft_model", "eagle3"),
    "use_heterogeneous_vocab": ("draft_model",),
    "quantization": ("draft_model", *HEAD_METHODS),
    "lora_path": ("draft_model",),
    "medusa_choices": ("medusa",),
}
_SUFFIX_METHODS = ("suffix", "hybrid")
"""Methods of the fields whose names begin with ``suffix_decoding_``."""


def check_fields(method: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field is not supported, or contradicts the method or another field.

    Args:
        method: resolved.
        given: the fields that are set (not None, not False), and their values.
    """
    for name in given:
        methods = _SUFFIX_METHODS if name.startswith("suffix_decoding_") else _ONLY_FOR.get(name, ())
        if methods and method not in methods:
            known = " or ".join(map(repr, methods))
            raise ConfigError(f"speculative_config.{name}: only for method {known}, not for {method!r}")
    if "parallel_drafting" in given:
        for name in ("speculative_token_tree", "speculative_dynamic_tree"):
            if name in given:
                raise ConfigError(
                    f"speculative_config.{name}: parallel_drafting drafts chains only; leave one of the two out"
                )
    if method == "hybrid":
        check_look_up(given.get("hybrid_lookup"), given)
    if method == "extract_hidden_states":
        extracted_layers(given.get("draft_model_config"))
        if given.get("num_speculative_tokens", 1) != 1:
            raise ConfigError(
                "speculative_config.num_speculative_tokens: must be 1 with method 'extract_hidden_states', which "
                "drafts nothing"
            )
    if "speculative_token_tree" in given and method in CHAIN_METHODS:
        raise ConfigError(
            f"speculative_config.speculative_token_tree: method {method!r} drafts chains, "
            "not trees; use num_speculative_tokens"
        )
    if "speculative_dynamic_tree" in given:
        if "speculative_token_tree" in given:
            raise ConfigError(
                "speculative_config.speculative_dynamic_tree: contradicts speculative_token_tree; a tree's shape "
                "is given or follows the drafter's confidence"
            )
        if method in STATIC_METHODS:
            raise ConfigError(
                f"speculative_config.speculative_dynamic_tree: method {method!r} drafts no dynamic trees"
            )

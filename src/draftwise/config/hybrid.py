"""Checks of a `SpeculativeConfig` of method ``hybrid``: a look-up, and a drafter inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from draftwise.errors import ConfigError

_OF_THE_OUTER = (
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "speculative_dynamic_tree",
    "speculative_token_tree",
)
"""Fields that the drafter inside may not have."""


def check_inner(name: str, method: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a drafter of this method, of which these fields were given, cannot stand inside."""
    if method in ("hybrid", "ngram", "suffix"):
        raise ConfigError(f"{name}: method {method!r} is not a model; give a draft model or a head")
    for field_name in _OF_THE_OUTER:
        if given.get(field_name) is not None:
            raise ConfigError(f"{name}.{field_name}: give it beside hybrid_drafter, not inside it")


def check_look_up(lookup: str | None, given: Iterable[str]) -> None:
    """Raise ConfigError if a field that was given is a setting of the other look-up."""
    other, prefix = ("suffix", "suffix_decoding_") if lookup == "ngram" else ("ngram", "prompt_lookup_")
    for name in given:
        if name.startswith(prefix):
            raise ConfigError(f"speculative_config.{name}: only with hybrid_lookup {other!r}")


def check_match_length(lookup: str | None, min_match: int | None, longest: int | None) -> None:
    """Raise ConfigError if no n-gram is as long as the match that beats the model.

    Args:
        lookup: ``hybrid_lookup``.
        min_match: ``hybrid_min_match``.
        longest: ``prompt_lookup_max``, resolved.
    """
    least = min_match or 4
    if lookup == "ngram" and longest is not None and least > longest:
        raise ConfigError(
            f"speculative_config.hybrid_min_match: {least} is over prompt_lookup_max = {longest}: no match is as long"
        )

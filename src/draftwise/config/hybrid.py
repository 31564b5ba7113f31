"""What a `SpeculativeConfig` of method ``hybrid`` may say: a look-up, and a drafter inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from draftwise.config import coerce as to
from draftwise.errors import ConfigError

if TYPE_CHECKING:
    from draftwise.config.speculative import SpeculativeConfig

_OF_THE_OUTER = (
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "speculative_dynamic_tree",
    "speculative_token_tree",
)
"""Fields that the drafter inside may not have."""


def inner_drafter(name: str, value: Any) -> SpeculativeConfig:
    """``hybrid_drafter``: the drafter inside a hybrid one."""
    from draftwise.config.speculative import SpeculativeConfig

    try:
        inner = SpeculativeConfig.from_dict(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if inner.method in ("hybrid", "ngram", "suffix"):
        raise ConfigError(f"{name}: method {inner.method!r} is no model; give a draft model or a head")
    # A head may bring a tree along; that is no contradiction.
    given: Mapping[str, Any] = {} if isinstance(value, SpeculativeConfig) else to.mapping(name, value)
    for field_name in _OF_THE_OUTER:
        if given.get(field_name) is not None:
            raise ConfigError(f"{name}.{field_name}: belongs beside hybrid_drafter, not into it")
    return inner


def drafter_of(config: SpeculativeConfig) -> SpeculativeConfig:
    """The drafter inside, which ``model`` alone may name, too.

    Raises:
        ConfigError: there is none, or two of them.
    """
    if config.hybrid_drafter is not None:
        if config.model is not None:
            raise ConfigError("speculative_config.model: contradicts hybrid_drafter, which names the model")
        return config.hybrid_drafter
    if config.model is None:
        raise ConfigError(
            "speculative_config.hybrid_drafter: method 'hybrid' needs a model that drafts where nothing matches, such "
            "as {'method': 'draft_model', 'model': ...}"
        )
    return inner_drafter(
        "speculative_config.hybrid_drafter", {"model": config.model, "revision": config.revision}
    )


def check_look_up(config: SpeculativeConfig) -> None:
    """Raise ConfigError for a setting of the other look-up."""
    other, prefix = (
        ("suffix", "suffix_decoding_") if config.hybrid_lookup == "ngram" else ("ngram", "prompt_lookup_")
    )
    for f in fields(config):
        if f.name.startswith(prefix) and getattr(config, f.name) is not None:
            raise ConfigError(f"speculative_config.{f.name}: only with hybrid_lookup {other!r}")


def check_match_length(config: SpeculativeConfig) -> None:
    """Raise ConfigError if no n-gram is as long as the match that beats the model. Lengths are resolved."""
    least, longest = config.hybrid_min_match or 4, config.prompt_lookup_max
    if config.hybrid_lookup == "ngram" and longest is not None and least > longest:
        raise ConfigError(
            f"speculative_config.hybrid_min_match: {least} is over prompt_lookup_max = {longest}: no match is as long"
        )

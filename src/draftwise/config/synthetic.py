"""What a `SpeculativeConfig` with the rule ``synthetic`` may say: the share of drafts to accept, in either form."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from draftwise.errors import ConfigError

if TYPE_CHECKING:
    from draftwise.config.speculative import SpeculativeConfig


def acceptance_rates(config: SpeculativeConfig) -> tuple[float, ...] | None:
    """`SpeculativeConfig.acceptance_rates`."""
    if config.rejection_sample_method != "synthetic":
        return None
    if config.synthetic_acceptance_rates is not None:
        return config.synthetic_acceptance_rates
    assert config.synthetic_acceptance_length is not None
    left = config.synthetic_acceptance_length - 1.0
    return tuple(round(min(max(left - i, 0.0), 1.0), 12) for i in range(config.num_speculative_tokens))


def check_synthetic(config: SpeculativeConfig) -> None:
    """Rates or a mean length where the rule is ``synthetic``, and only there.

    Raises:
        ConfigError: neither or both are given, do not fit the number of drafts, or the rule is another.
    """
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    given = "synthetic_acceptance_rates" if rates is not None else "synthetic_acceptance_length"
    if config.rejection_sample_method != "synthetic":
        if rates is not None or length is not None:
            raise ConfigError(f"speculative_config.{given}: only with rejection_sample_method 'synthetic'")
        return
    if (rates is None) == (length is None):
        raise ConfigError(
            "speculative_config.rejection_sample_method: 'synthetic' needs exactly one of "
            "synthetic_acceptance_rates and synthetic_acceptance_length"
        )
    k = config.num_speculative_tokens
    if length is not None and length > k + 1:
        raise ConfigError(
            f"speculative_config.synthetic_acceptance_length: {length:g} is outside [1, {k + 1}] "
            f"(num_speculative_tokens = {k})"
        )
    if rates is not None:
        if len(rates) != k:
            raise ConfigError(
                f"speculative_config.synthetic_acceptance_rates: {len(rates)} rates for "
                f"num_speculative_tokens = {k}"
            )
        if any(b > a for a, b in pairwise(rates)):
            raise ConfigError(
                f"speculative_config.synthetic_acceptance_rates: must not increase, got {list(rates)!r}"
            )

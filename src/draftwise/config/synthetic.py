"""Checks of a `SpeculativeConfig` with the rule ``synthetic``: the share of drafts to accept, in either form."""

from __future__ import annotations

from itertools import pairwise

from draftwise.errors import ConfigError


def rates_of_length(length: float, k: int) -> tuple[float, ...]:
    """Rates of k positions with this mean acceptance length, see `SpeculativeConfig.acceptance_rates`."""
    left = length - 1.0
    return tuple(round(min(max(left - i, 0.0), 1.0), 12) for i in range(k))


def check_synthetic(rule: str | None, rates: tuple[float, ...] | None, length: float | None, k: int) -> None:
    """Rates or a mean length where the rule is ``synthetic``, and only there. ``k``: number of drafts.

    Raises:
        ConfigError: neither or both are given, do not fit the number of drafts, or the rule is another.
    """
    given = "synthetic_acceptance_rates" if rates is not None else "synthetic_acceptance_length"
    if rule != "synthetic":
        if rates is not None or length is not None:
            raise ConfigError(f"speculative_config.{given}: only with rejection_sample_method 'synthetic'")
        return
    if (rates is None) == (length is None):
        raise ConfigError(
            "speculative_rule: 'synthetic' needs exactly one of "
            "synthetic_acceptance_rates and synthetic_acceptance_length"
        )
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

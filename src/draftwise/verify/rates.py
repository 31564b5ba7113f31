"""Acceptance rates for rule ``synthetic``. Without torch, so that configurations can resolve them early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """``rates[i]``: the share of steps in which draft position i is accepted (and all before it), so the mean
    number of committed tokens is 1 + their sum. Must fall (or stay) from position to position, within [0, 1].
    Positions past the last rate are never accepted. Raises `ConfigError`."""

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(float(rate) for rate in self.rates))
        before = 1.0
        for rate in self.rates:
            if not 0.0 <= rate <= before:  # also refuses nan
                raise ConfigError(
                    f"synthetic_acceptance_rates is {list(self.rates)}; rates must lie in [0, 1] and never rise"
                )
            before = rate

    @classmethod
    def from_length(cls, length: float, num_speculative_tokens: int) -> SyntheticAcceptance:
        """Rates whose mean acceptance length is ``length``: whole positions first, then the rest.

        >>> SyntheticAcceptance.from_length(2.6, 3).rates
        (1.0, 0.6, 0.0)
        """
        if not (math.isfinite(length) and 1.0 <= length <= num_speculative_tokens + 1):
            raise ConfigError(
                f"synthetic_acceptance_length is {length!r}; it must lie in [1, {num_speculative_tokens + 1}]"
                f" (num_speculative_tokens + 1)"
            )
        left = length - 1.0
        # rounding keeps 2.6 - 1 - 1 at the 0.6 that was meant
        return cls(tuple(round(min(1.0, max(0.0, left - i)), 12) for i in range(num_speculative_tokens)))

    @classmethod
    def from_rates(cls, rates: Sequence[float], num_speculative_tokens: int) -> SyntheticAcceptance:
        """Checked against the draft length. Raises `ConfigError` if there are more or fewer rates."""
        if len(rates) != num_speculative_tokens:
            raise ConfigError(
                f"synthetic_acceptance_rates has {len(rates)} entries; it must have"
                f" {num_speculative_tokens} (num_speculative_tokens)"
            )
        return cls(tuple(rates))

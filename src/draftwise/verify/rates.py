"""Acceptance rates for rule ``synthetic``."""

from __future__ import annotations

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

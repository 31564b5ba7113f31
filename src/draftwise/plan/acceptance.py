"""How many drafts are accepted: per method and position, and per kind of text."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwise.errors import ConfigError, shown

DEFAULT_RATES = (0.85, 0.3, 0.0)
"""Dynamo's defaults: of the first position, of the second if the first was accepted, then nothing."""
ANY_KIND = ""
_POSITIONS = 64


@dataclass(frozen=True)
class AcceptanceModel:
    """``rates[kind][method]``: chance that position j is accepted given that the ones before it were. A kind that is
    not known is `ANY_KIND`, which stands for all; positions beyond the last are as good as that one."""

    rates: Mapping[str, Mapping[str, Sequence[float]]]
    _kept: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if ANY_KIND not in self.rates:
            raise ConfigError("acceptance: rates are missing for every kind of request")
        for kind, methods in self.rates.items():
            for method, rates in methods.items():
                if not rates or any(not 0 <= rate <= 1 for rate in rates):  # NaN is neither
                    raise ConfigError(
                        f"acceptance of {method!r}{f' on {kind!r}' if kind else ''}: expected chances from 0 to 1, got "
                        f"{shown(list(rates))}"
                    )

    @classmethod
    def constant(cls, rates: Sequence[float] = DEFAULT_RATES, method: str = "model") -> AcceptanceModel:
        """One method, one kind of text."""
        return cls({ANY_KIND: {method: tuple(rates)}})

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are known for requests of any kind."""
        return tuple(self.rates[ANY_KIND])

    def survival(self, method: str, kind: str = ANY_KIND) -> tuple[float, ...]:
        """[64] chance that at least the first j + 1 positions are accepted. Raises ConfigError for an unknown method.

        Example: rates 0.7, 0.5, 0.2 are 0.7, 0.35, 0.07, 0.014, ...: three drafts give 1 + 1.12 tokens per step.
        """
        kept = self._kept.get((kind, method))
        if kept is None:
            rates = self.rates.get(kind, {}).get(method) or self.rates[ANY_KIND].get(method)
            if rates is None:
                raise ConfigError(
                    f"acceptance: no rates are known for method {method!r} (known: {', '.join(self.methods)})"
                )
            chances, chance = [], 1.0
            for j in range(_POSITIONS):
                chance *= rates[min(j, len(rates) - 1)]
                chances.append(chance)
            kept = self._kept[kind, method] = tuple(chances)
        return kept

    def length(self, method: str, drafts: int, kind: str = ANY_KIND) -> float:
        """Tokens that a step gives on average with ``drafts`` drafts: 1 + accepted ones."""
        if method == "none" or drafts == 0:
            return 1.0
        return 1.0 + math.fsum(self.survival(method, kind)[:drafts])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            kind: {m: list(rates) for m, rates in methods.items()} for kind, methods in self.rates.items()
        }


def draw(survival: Sequence[float], drafts: int, rng: random.Random) -> int:
    """Accepted drafts of ``drafts``, from one draw: as many positions as it does not reach.

    Example: survival 0.7, 0.35, 0.07 and a draw of 0.4: the first position alone.
    """
    u = rng.random()
    accepted = 0
    while accepted < drafts and u < survival[accepted]:
        accepted += 1
    return accepted


def conditional(survival: Sequence[float]) -> tuple[float, ...]:
    """Chances given what came before, of shares accepted to depth 1, 2, ... at least.

    Example: 0.8, 0.4, 0.1 is 0.8, 0.5, 0.25.
    """
    out, before = [], 1.0
    for share in survival:
        out.append(min(share / before, 1.0) if before > 0 else 0.0)
        before = share
    return tuple(out)


def read_acceptance(text: str, methods: Sequence[str] = ("model",)) -> AcceptanceModel:
    """From a flag: ``0.85,0.3,0`` (of every method there is), or a file: what ``draftwise bench accept --json``
    printed, or an object method -> rates, or kind -> method -> rates.

    Raises:
        ConfigError: neither, or rates that are none.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        return _of_file(Path(text))
    return AcceptanceModel({ANY_KIND: dict.fromkeys(methods, rates)})


def _of_file(path: Path) -> AcceptanceModel:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"acceptance: {str(path)!r} is neither rates (0.85,0.3,0) nor a readable JSON file: {error}"
        ) from None
    if isinstance(value, dict) and value.get("benchmark") == "accept":
        return _of_bench(value, path)
    if isinstance(value, dict) and isinstance(value.get("acceptance"), dict):
        value = value["acceptance"]  # of a profile
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"acceptance: {path}: expected an object of rates per method")
    flat = all(isinstance(rates, list) for rates in value.values())
    kinds = {ANY_KIND: value} if flat else value
    try:
        rates = {
            str(k): {str(m): tuple(map(float, r)) for m, r in methods.items()} for k, methods in kinds.items()
        }
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"acceptance: {path}: expected lists of chances per method") from None
    if ANY_KIND not in rates:
        rates[ANY_KIND] = next(iter(rates.values()))
    return AcceptanceModel(rates)


def _of_bench(value: Mapping[str, Any], path: Path) -> AcceptanceModel:
    """Workloads are kinds; any kind is all of them together, each draft with the same weight."""
    kinds: dict[str, dict[str, tuple[float, ...]]] = {}
    sums: dict[str, tuple[float, list[float]]] = {}
    try:
        for row in value["results"]:
            survival, drafts = [float(x) for x in row["acceptance_per_position"]], float(row["num_drafts"])
            if not survival or drafts <= 0:
                continue
            length = row.get("mean_acceptance_length")
            if length and length > 1:
                # Steps in which nothing was found to draft are in the one and not in the other.
                tried = min((float(row["tokens_per_step"]) - 1) / (length - 1), 1.0)
                survival, drafts = [share * tried for share in survival], drafts / max(tried, 1e-6)
            kinds.setdefault(row["workload"], {})[row["method"]] = conditional(survival)
            count, total = sums.setdefault(row["method"], (0.0, []))
            total += [0.0] * (len(survival) - len(total))
            for j, share in enumerate(survival):
                total[j] += drafts * share
            sums[row["method"]] = count + drafts, total
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"acceptance: {path} is no output of bench accept --json: {error!r}") from None
    if not sums:
        raise ConfigError(f"acceptance: in {path} nothing was drafted")
    kinds[ANY_KIND] = {m: conditional([t / count for t in total]) for m, (count, total) in sums.items()}
    return AcceptanceModel(kinds)

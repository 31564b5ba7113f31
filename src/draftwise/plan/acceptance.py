"""How many drafts are proposed and accepted: per method and position, per kind of text, by length of the context."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from draftwise.errors import ConfigError, shown

DEFAULT_RATES = (0.85, 0.3, 0.0)
"""Dynamo's defaults: of the first position, of the second if the first was accepted, then nothing."""
ANY_KIND = ""
_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class Chances:
    """One method on one kind of text. ``rates``: chance that position j is accepted given that it was proposed and the
    ones before it were accepted. ``offers``: share of steps in which position j is proposed, as long as so many drafts
    are asked for: a look-up finds nothing in some steps, and something short in others; empty: always.
    ``context``: mean tokens of a request, where this was measured; None: of any length.

    Positions beyond the last are as good as that one, and are proposed as often.
    """

    rates: Sequence[float]
    offers: Sequence[float] = ()
    context: float | None = None

    def check(self, of: str) -> None:
        """Raise ConfigError unless these are chances."""
        if not self.rates or any(not 0 <= x <= 1 for x in (*self.rates, *self.offers)):  # NaN is neither
            raise ConfigError(
                f"acceptance of {of}: expected chances from 0 to 1, got {shown([*self.rates, *self.offers])}"
            )
        if any(b > a for a, b in pairwise(self.offers)):
            raise ConfigError(
                f"acceptance of {of}: a later position is proposed no more often than one before"
            )


class Draws:
    """`Chances` reckoned out. ``survival`` [64]: chance that at least the first j + 1 positions are accepted, of drafts
    that were proposed; ``offered`` [64]: share of steps in which position j is proposed; None: always. ``until``:
    tokens of a request from which on others hold."""

    __slots__ = ("offered", "survival", "until")

    def __init__(self, chances: Chances, until: float = math.inf) -> None:
        found, chance = [], 1.0
        for j in range(_POSITIONS):
            chance *= chances.rates[min(j, len(chances.rates) - 1)]
            found.append(chance)
        self.survival = tuple(found)
        offers = chances.offers
        self.offered = tuple(offers[min(j, len(offers) - 1)] for j in range(_POSITIONS)) if offers else None
        self.until = until

    def proposed(self, drafts: int) -> float:
        """Drafts per step on average, of ``drafts`` that are asked for."""
        return float(drafts) if self.offered is None else math.fsum(self.offered[:drafts])

    def accepted(self, drafts: int) -> float:
        """Of these, accepted ones. Example: survival 0.7, 0.35 and two drafts in every second step: 0.525."""
        if self.offered is None:
            return math.fsum(self.survival[:drafts])
        return math.fsum(a * b for a, b in zip(self.survival[:drafts], self.offered[:drafts], strict=True))


@dataclass(frozen=True)
class AcceptanceModel:
    """``rates[kind][method]`` and ``offers[kind][method]``: as in `Chances`. A kind that is not known is `ANY_KIND`,
    which stands for all. ``contexts[kind][method]``: the same by length of the request, in any order: the nearest one
    holds, by the ratio of lengths."""

    rates: Mapping[str, Mapping[str, Sequence[float]]]
    offers: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    contexts: Mapping[str, Mapping[str, Sequence[Chances]]] = field(default_factory=dict)
    _kept: dict[tuple[str, str], tuple[Draws, tuple[Draws, ...]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if ANY_KIND not in self.rates:
            raise ConfigError("acceptance: rates are missing for every kind of request")
        for kind, methods in self.rates.items():
            for method, rates in methods.items():
                for chances in (Chances(rates, self._offers(kind, method)), *self._parts(kind, method)):
                    chances.check(f"{method!r}{f' on {kind!r}' if kind else ''}")

    @classmethod
    def constant(cls, rates: Sequence[float] = DEFAULT_RATES, method: str = "model") -> AcceptanceModel:
        """One method, one kind of text."""
        return cls({ANY_KIND: {method: tuple(rates)}})

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are known for requests of any kind."""
        return tuple(self.rates[ANY_KIND])

    def _offers(self, kind: str, method: str) -> Sequence[float]:
        return self.offers.get(kind, {}).get(method, ())

    def _parts(self, kind: str, method: str) -> Sequence[Chances]:
        return self.contexts.get(kind, {}).get(method, ())

    def draws(self, method: str, kind: str = ANY_KIND, context: float | None = None) -> Draws:
        """Those of requests of ``context`` tokens; None: of any length. Raises ConfigError for an unknown method.

        Example: measured at 100 and 400 tokens, the second holds from 200 on.
        """
        kept = self._kept.get((kind, method))
        if kept is None:
            kept = self._kept[kind, method] = self._made(method, kind)
        whole, parts = kept
        if context is None or not parts:
            return whole
        for part in parts:
            if context < part.until:
                return part
        raise AssertionError("the last part has no end")

    def _made(self, method: str, kind: str) -> tuple[Draws, tuple[Draws, ...]]:
        if not self.rates.get(kind, {}).get(method):
            kind = ANY_KIND
        rates = self.rates[kind].get(method)
        if rates is None:
            raise ConfigError(
                f"acceptance: no rates are known for method {method!r} (known: {', '.join(self.methods)})"
            )
        parts = sorted(self._parts(kind, method), key=lambda part: part.context or 0.0)
        ends = [
            math.sqrt(max(a.context or 1.0, 1.0) * max(b.context or 1.0, 1.0)) for a, b in pairwise(parts)
        ]
        made = tuple(Draws(part, end) for part, end in zip(parts, [*ends, math.inf], strict=False))
        return Draws(Chances(rates, self._offers(kind, method))), made

    def survival(self, method: str, kind: str = ANY_KIND) -> tuple[float, ...]:
        """[64] chance that at least the first j + 1 positions are accepted, of drafts that were proposed. Raises
        ConfigError for an unknown method.

        Example: rates 0.7, 0.5, 0.2 are 0.7, 0.35, 0.07, 0.014, ...: three drafts give 1 + 1.12 tokens per step.
        """
        return self.draws(method, kind).survival

    def length(self, method: str, drafts: int, kind: str = ANY_KIND, context: float | None = None) -> float:
        """Tokens that a step gives on average if ``drafts`` drafts are asked for: 1 + accepted ones."""
        if method == "none" or drafts == 0:
            return 1.0
        return 1.0 + self.draws(method, kind, context).accepted(drafts)

    def proposed(self, method: str, drafts: int, kind: str = ANY_KIND, context: float | None = None) -> float:
        """Drafts per step on average if ``drafts`` are asked for."""
        if method == "none" or drafts == 0:
            return 0.0
        return self.draws(method, kind, context).proposed(drafts)

    def scaled(self, luck: float) -> AcceptanceModel:
        """With ``luck`` times as many drafts accepted, and as many proposed."""
        if luck == 1.0:
            return self

        def of(rates: Sequence[float]) -> tuple[float, ...]:
            return (min(rates[0] * luck, 1.0), *rates[1:])

        return AcceptanceModel(
            {kind: {m: of(rates) for m, rates in methods.items()} for kind, methods in self.rates.items()},
            self.offers,
            {
                kind: {m: [replace(c, rates=of(c.rates)) for c in parts] for m, parts in methods.items()}
                for kind, methods in self.contexts.items()
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """The rates, for JSON."""
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


@dataclass(slots=True)
class AcceptanceCounts:
    """Counted steps of one method. ``sizes[n]``: steps in which n drafts were verified; ``tried[j]``: steps in which
    position j was proposed and all before it were accepted; ``accepted[j]``: of these, those that accepted it;
    ``tokens``: of the requests when the steps began, summed up."""

    sizes: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tokens: int = 0

    @property
    def steps(self) -> int:
        return sum(self.sizes)

    def add(self, size: int, accepted: int, tokens: int) -> None:
        """One step: of ``size`` drafts ``accepted`` were accepted. ``tokens``: of the request when it began."""
        _longer(self.sizes, size + 1)
        _longer(self.tried, size)
        _longer(self.accepted, size)
        self.sizes[size] += 1
        self.tokens += tokens
        for j in range(min(accepted + 1, size)):
            self.tried[j] += 1
            self.accepted[j] += j < accepted

    def merge(self, other: AcceptanceCounts) -> None:
        """Add another's."""
        for mine, theirs in (
            (self.sizes, other.sizes), (self.tried, other.tried), (self.accepted, other.accepted)
        ):  # fmt: skip
            _longer(mine, len(theirs))
            for j, n in enumerate(theirs):
                mine[j] += n
        self.tokens += other.tokens

    def chances(self) -> Chances | None:
        """None: there were no steps.

        Example: of four steps one found nothing, one a draft, and two two drafts: offers 0.75, 0.5.
        """
        steps = self.steps
        if not steps:
            return None
        rates: list[float] = []
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            if not tried:
                break
            rates.append(accepted / tried)
        context = self.tokens / steps
        if not rates:  # nothing was ever proposed
            return Chances((0.0,), (0.0,), context)
        offers = tuple(sum(self.sizes[j + 1 :]) / steps for j in range(len(self.tried)))
        return Chances(tuple(rates), () if min(offers) == 1.0 else offers, context)


def _longer(values: list[int], length: int) -> None:
    values += [0] * (length - len(values))

"""What one replica can take on, by the performance model and what was seen of acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from draftwise.plan.acceptance import ANY_KIND, AcceptanceModel
from draftwise.plan.operating import OperatingPoint, Sla, best_point
from draftwise.plan.times import Infeasible, StepTimes


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one replica. ``prompt_tokens``, ``output_tokens``: per second if it did nothing else. ``ttft``, ``itl``:
    what the model expects at that point, seconds. ``late``: nothing keeps to the limits; these are the nearest.
    ``known``: the model says something about such requests at all."""

    prompt_tokens: float
    output_tokens: float
    ttft: float
    itl: float
    method: str = "none"
    drafts: int = 0
    late: bool = False
    known: bool = True


class Capacity(Protocol):
    """What the planner asks: rates for requests of this shape, while steps take ``slower`` times what is modelled, and
    a draft-step gives ``accepted`` tokens (None: as modelled)."""

    def __call__(
        self, isl: float, osl: float, slower: float = 1.0, accepted: float | None = None
    ) -> Rates: ...


@dataclass(frozen=True, slots=True)
class FixedCapacity:
    """Rates that somebody measured, whatever the requests."""

    prompt_tokens: float
    output_tokens: float
    ttft: float = 0.1
    itl: float = 0.02

    def __call__(self, isl: float, osl: float, slower: float = 1.0, accepted: float | None = None) -> Rates:
        return Rates(self.prompt_tokens, self.output_tokens, self.ttft, self.itl)


class ModelCapacity:
    """From a performance model: the best setting within the limits is looked for (`best_point`)."""

    def __init__(
        self,
        times: StepTimes,
        acceptance: AcceptanceModel,
        sla: Sla,
        *,
        most_requests: int = 256,
        most_drafts: int = 7,
        methods: Sequence[str] | None = None,
        ignore_speculation: bool = False,
    ) -> None:
        """``most_requests``, ``most_drafts``: of an engine. ``ignore_speculation``: reckon as if nothing were
        drafted, as planners do that do not know of it."""
        self._times, self._acceptance, self._sla = times, acceptance, sla
        self._most = most_requests
        self._most_drafts = 0 if ignore_speculation else most_drafts
        self._methods = methods
        self._kept: dict[tuple[int, int, int, int], Rates] = {}

    def __call__(self, isl: float, osl: float, slower: float = 1.0, accepted: float | None = None) -> Rates:
        # Requests a few percent longer or shorter are the same: a plan must not hang on that, and is quick.
        key = (_step(isl), _step(osl), _step(slower * 100), _step((accepted or 0.0) * 100))
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) > 4096:
                self._kept.clear()
            kept = self._kept[key] = self._find(
                _value(key[0]),
                _value(key[1]),
                _value(key[2]) / 100,
                _value(key[3]) / 100 if accepted else None,
            )
        return kept

    def _find(self, isl: float, osl: float, slower: float, accepted: float | None) -> Rates:
        length = max(int(isl), 1)
        itl = self._sla.itl
        sla = Sla(itl=None if itl is None else itl / slower)
        found = best_point(
            self._times,
            self._scaled(accepted),
            sla,
            length,
            max(int(osl), 1),
            most_requests=self._most,
            most_drafts=self._most_drafts,
            methods=self._methods,
        )
        late = isinstance(found, Infeasible)
        point = found.nearest if isinstance(found, Infeasible) else found
        ttft = self._times.prompt_time(0, length, True)
        prompt_tokens = length / ttft if ttft > 0 else math.inf
        if not isinstance(point, OperatingPoint):
            return Rates(prompt_tokens, 0.0, ttft, math.inf, late=True, known=False)
        return Rates(
            prompt_tokens,
            point.tokens_per_second / slower,
            ttft,
            point.itl,
            point.method,
            point.drafts,
            late,
        )

    def _scaled(self, accepted: float | None) -> AcceptanceModel:
        """The acceptance model, all chances multiplied so that the usual number of drafts gives ``accepted`` tokens."""
        if accepted is None:
            return self._acceptance
        rates = {}
        for method, chances in self._acceptance.rates[ANY_KIND].items():
            usual = self._acceptance.length(method, max(self._most_drafts, 1))
            factor = min(max((accepted - 1) / (usual - 1), 0.0), 1.5) if usual > 1 else 1.0
            rates[method] = (min(chances[0] * factor, 1.0), *chances[1:])
        return replace(self._acceptance, rates={ANY_KIND: rates}, _kept={})


def _step(value: float) -> int:
    """Number of a step of 5 %. Example: 100 and 102 are the same, 110 is two further."""
    return round(math.log(max(value, 1e-6)) / math.log(1.05))


def _value(step: int) -> float:
    return float(1.05**step)

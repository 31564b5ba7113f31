"""The capacity of one replica, from the performance model and the observed acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draftwise.plan.acceptance import ANY_KIND, AcceptanceModel
from draftwise.plan.operating import OperatingPoint, Sla, choose, operating_point, points
from draftwise.plan.times import Infeasible, StepTimes


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one replica. ``prompt_tokens``, ``output_tokens``: per second if it did nothing else. ``ttft``,
    ``itl``:
    what the model expects at that point, seconds. ``late``: nothing keeps to the limits; these are the nearest.
    ``known``: the model says something about such requests at all. ``curve``: (requests at once, seconds per token of
    each, with the best setting there), as far as the limit per token lets it; ``wait``: seconds that a request may wait
    for a place among them; None: any time. Without a curve nothing is said of waiting. ``reading``: seconds that a
    prompt adds to a step in which others decode: less than a step of its own.
    """

    prompt_tokens: float
    output_tokens: float
    ttft: float
    itl: float
    method: str = "none"
    drafts: int = 0
    late: bool = False
    known: bool = True
    curve: tuple[tuple[int, float], ...] = ()
    wait: float | None = None
    reading: float = 0.0


class Capacity(Protocol):
    """The planner's source of rates for requests of this shape, while steps take ``slower`` times what is modelled,
    and
    ``luck`` times as many drafts are accepted. `setting`: the method and number of drafts with which a replica that
    gets ``load`` such requests per second makes its users wait least between tokens. `accepted`: drafts that the model
    expects to be accepted of ``drafts``; None: nothing drafts."""

    def __call__(self, isl: float, osl: float, slower: float = 1.0, luck: float = 1.0) -> Rates: ...
    def setting(
        self, isl: float, osl: float, load: float, slower: float = 1.0, luck: float = 1.0
    ) -> tuple[str, int]: ...
    def accepted(self, drafts: float | None) -> float | None: ...


@dataclass(frozen=True, slots=True)
class FixedCapacity:
    """Measured rates, the same for all requests."""

    prompt_tokens: float
    output_tokens: float
    ttft: float = 0.1
    itl: float = 0.02

    def __call__(self, isl: float, osl: float, slower: float = 1.0, luck: float = 1.0) -> Rates:
        return Rates(self.prompt_tokens, self.output_tokens, self.ttft, self.itl)

    def setting(
        self, isl: float, osl: float, load: float, slower: float = 1.0, luck: float = 1.0
    ) -> tuple[str, int]:
        return "none", 0

    def accepted(self, drafts: float | None) -> float | None:
        return None


class ModelCapacity:
    """From a performance model: the best setting within the limits is looked for (`choose`)."""

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
        self._settings: dict[tuple[int, int, int, int, int], tuple[str, int]] = {}

    def __call__(self, isl: float, osl: float, slower: float = 1.0, luck: float = 1.0) -> Rates:
        # Requests a few percent longer or shorter are the same: a plan must not hang on that, and is quick.
        key = (_step(isl), _step(osl), _step(slower * 100), _step(luck * 100))
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) > 4096:
                self._kept.clear()
            kept = self._kept[key] = self._find(
                _value(key[0]), _value(key[1]), _value(key[2]) / 100, _value(key[3]) / 100
            )
        return kept

    def _find(self, isl: float, osl: float, slower: float, luck: float) -> Rates:
        length, output = max(int(isl), 1), max(int(osl), 1)
        itl = self._sla.itl
        sla = Sla(itl=None if itl is None else itl / slower)
        context = length + output // 2
        settings = list(
            points(
                self._times,
                self._acceptance.scaled(luck),
                context,
                most_requests=self._most,
                most_drafts=self._most_drafts,
                methods=self._methods,
            )
        )
        found = choose(settings, self._times, sla, length, context)
        late = isinstance(found, Infeasible)
        point = found.nearest if isinstance(found, Infeasible) else found
        ttft = self._times.prompt_time(0, length, True)
        prompt_tokens = length / ttft if ttft > 0 else math.inf
        if not isinstance(point, OperatingPoint):
            return Rates(prompt_tokens, 0.0, ttft, math.inf, late=True, known=False)
        reading = self._times.prompt_time(0, length, False)
        curve, wait = self._curve(settings, slower, ttft, reading, osl)
        return Rates(
            prompt_tokens,
            point.tokens_per_second / slower,
            ttft,
            point.itl,
            point.method,
            point.drafts,
            late,
            curve=() if late else curve,
            wait=wait,
            reading=reading,
        )

    def _curve(
        self, settings: Sequence[OperatingPoint], slower: float, ttft: float, reading: float, osl: float
    ) -> tuple[tuple[tuple[int, float], ...], float | None]:
        """`Rates.curve` and `Rates.wait`.

        Where a request more would make all too slow, no place is left, and nobody may wait for one: an engine would
        take the request in and be too slow. Where all places of the engine are taken, it waits for its first token.
        """
        best: dict[int, OperatingPoint] = {}
        for p in settings:
            if p.concurrency not in best or p.itl < best[p.concurrency].itl:
                best[p.concurrency] = p
        curve: list[tuple[int, float]] = []
        for n, p in sorted(best.items()):
            # While a prompt is read nobody gets a token: of n requests, each waits for the prompts of n - 1 others.
            users = p.itl * slower + (n - 1) * reading / max(osl, 1.0)
            if self._sla.itl is not None and users > self._sla.itl and curve:
                return tuple(curve), 0.0
            curve.append((n, p.itl * slower))
        if self._sla.ttft is None:
            return tuple(curve), None
        step = max(best[n].step for n in best) * slower
        return tuple(curve), max(self._sla.ttft - ttft - step, 0.0)

    def setting(
        self, isl: float, osl: float, load: float, slower: float = 1.0, luck: float = 1.0
    ) -> tuple[str, int]:
        key = (_step(isl), _step(osl), _step(load * 100), _step(slower * 100), _step(luck * 100))
        kept = self._settings.get(key)
        if kept is None:
            if len(self._settings) > 4096:
                self._settings.clear()
            kept = self._settings[key] = self._quickest(isl, osl, load, slower, luck)
        return kept

    def _quickest(self, isl: float, osl: float, load: float, slower: float, luck: float) -> tuple[str, int]:
        """By Little's law: who decodes at once are the requests per second times how long each decodes, which hangs on
        how many do.

        Example: 10 requests/s of 100 tokens at 4 ms per token are 4 at once; if 4 at once take 6 ms, they are 6.
        """
        times, acceptance = self._times, self._acceptance.scaled(luck)
        context = max(int(isl + osl / 2), 1)
        most = self._most
        if times.kv_tokens is not None:
            most = max(min(most, times.kv_tokens // context), 1)
        drafts = self._most_drafts if times.most_drafts is None else min(self._most_drafts, times.most_drafts)
        methods = [m for m in (self._methods or times.methods) if m != "none" and m in acceptance.methods]
        best = (math.inf, "none", 0)
        for method, k in [("none", 0), *((m, k) for m in methods for k in range(1, drafts + 1))]:
            n, itl = 1, math.inf
            for _ in range(6):
                itl = operating_point(times, acceptance, method, k, n, context).itl
                wanted = min(max(math.ceil(load * osl * itl * slower - 1e-9), 1), most)
                if wanted == n:
                    break
                n = wanted
            best = min(best, (itl, method, k))
        return best[1:]

    def accepted(self, drafts: float | None) -> float | None:
        rates = self._acceptance.rates[ANY_KIND]
        method = next((m for m in (self._methods or self._times.methods) if m in rates), None)
        if method is None or not self._most_drafts:
            return None
        if drafts is None:
            drafts = float(self._most_drafts)
        whole = int(drafts)
        # What is observed are steps that had something to verify, and what they verified.
        survival = self._acceptance.survival(method)
        low, high = (sum(survival[:k]) for k in (whole, whole + 1))
        return low + (drafts - whole) * (high - low)


def _step(value: float) -> int:
    """Number of a step of 5 %. Example: 100 and 102 are the same, 110 is two further."""
    return round(math.log(max(value, 1e-6)) / math.log(1.05))


def _value(step: int) -> float:
    return float(1.05**step)

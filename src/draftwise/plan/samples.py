"""Samples of `draftwise profile`: steps and prompts of one engine, in visits that lie apart.

A machine is quick at one moment and slow at the next. So a size is visited several times, and what is kept is each
single measurement: the median says what such a step takes, the scatter around it what users feel besides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

_QUANTILES = 64
"""Equally likely factors that stand for how times scatter."""
_FEW = 3
"""Measurements of a size below which nothing is said of how they scatter."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """Steps of one size. ``drafts``: asked for per request; ``length``: tokens of a request when they began;
    ``rows``: verified together, on average; ``context``: tokens in the cache together; ``target``, ``draft``: median
    seconds; ``steps``: how many were measured, in ``rounds`` visits. ``targets``, ``draftings``, ``widths``: each
    single one, and its rows (a look-up finds something to verify in some steps only); empty: not known."""

    method: str
    drafts: int
    requests: int
    length: int
    rows: int
    context: int
    target: float
    draft: float
    steps: int
    rounds: int = 1
    targets: tuple[float, ...] = ()
    draftings: tuple[float, ...] = ()
    widths: tuple[int, ...] = ()

    def and_more(self, other: StepSample) -> StepSample:
        """Both visits together."""
        whole = self.steps + other.steps
        targets, draftings = (*self.targets, *other.targets), (*self.draftings, *other.draftings)
        return replace(
            self,
            rows=round((self.rows * self.steps + other.rows * other.steps) / whole),
            context=(self.context * self.steps + other.context * other.steps) // whole,
            target=statistics.median(targets or (self.target, other.target)),
            draft=statistics.median(draftings or (self.draft, other.draft)),
            steps=whole,
            rounds=self.rounds + other.rounds,
            targets=targets,
            draftings=draftings,
            widths=(*self.widths, *other.widths),
        )

    def _groups(self) -> list[list[int]]:
        """Numbers of steps that verified alike: as many drafts per request, rounded."""
        groups: dict[int, list[int]] = {}
        for i, width in enumerate(self.widths):
            groups.setdefault(round(width / self.requests), []).append(i)
        return [groups[key] for key in sorted(groups)]

    def by_rows(self) -> list[tuple[int, float]]:
        """(rows, median seconds of the target's part), for each number of drafts that was verified.

        Example: one request, 5 rows in two steps of 3 ms and 1 row in three of 2 ms: (1, 2 ms) and (5, 3 ms).
        """
        if len(self.widths) != len(self.targets) or not self.widths:
            return [(self.rows, self.target)]
        return [
            (
                round(statistics.fmean(self.widths[i] for i in group)),
                statistics.median(self.targets[i] for i in group),
            )
            for group in self._groups()
        ]

    def factors(self) -> list[float]:
        """By how much each step took more than the median of those that verified as much."""
        wholes = [a + b for a, b in zip(self.targets, self.draftings, strict=True)]
        if len(self.widths) != len(wholes):
            return _factors(wholes)
        return [factor for group in self._groups() for factor in _factors([wholes[i] for i in group])]


@dataclass(frozen=True, slots=True)
class PromptSample:
    """Prompts of one length, alone on the engine, whose cache is empty. ``seconds``: from their arrival to the first
    token, each; ``readings``: of these, those in which the drafter read the prompt (not its first drafts);
    ``behind``: by how much the few steps after it took longer than those that follow."""

    method: str
    tokens: int
    seconds: tuple[float, ...]
    readings: tuple[float, ...] = ()
    behind: tuple[float, ...] = ()
    rounds: int = 1

    def and_more(self, other: PromptSample) -> PromptSample:
        """Both visits together."""
        return replace(
            self,
            seconds=(*self.seconds, *other.seconds),
            readings=(*self.readings, *other.readings),
            behind=(*self.behind, *other.behind),
            rounds=self.rounds + other.rounds,
        )

    @property
    def typical(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(self.seconds)

    def factors(self) -> list[float]:
        """By how much each took more than their median."""
        return _factors(self.seconds)


@dataclass(frozen=True, slots=True)
class RestSample:
    """By how much longer an engine takes that did nothing for ``pause`` seconds: its caches are cold, and its processor
    has slept. ``factors``: for each part of `REST_PARTS`, of each measured request, its time over that of the same
    request without a pause."""

    pause: float
    factors: tuple[tuple[float, ...], ...]
    rounds: int = 1

    def and_more(self, other: RestSample) -> RestSample:
        """Both visits together."""
        both = tuple((*a, *b) for a, b in zip(self.factors, other.factors, strict=True))
        return replace(self, factors=both, rounds=self.rounds + other.rounds)


REST_PARTS = (0.0, 0.05, 0.15, 0.4)
"""Seconds of work after a pause up to which a part goes: the first step, and what follows it."""


@dataclass(slots=True)
class Setting:
    """One format of weights on one number of devices."""

    weights: str
    kv_tokens: int
    block_size: int
    kv_bytes: float
    devices: int = 1
    prompts: list[PromptSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    rest: RestSample | None = None

    @property
    def rest_factors(self) -> tuple[tuple[float, float], ...]:
        """(seconds of work after a pause up to which it holds, median factor); empty: not measured, or no more than
        chance: a pause makes nothing quicker, and no later step slower than the ones before it."""
        if self.rest is None or not all(self.rest.factors):
            return ()
        found: list[tuple[float, float]] = []
        for until, factors in zip(REST_PARTS, self.rest.factors, strict=True):
            before = found[-1][1] if len(found) > 1 else 2.0  # of the steps; the first one reads a prompt
            found.append((until, min(max(statistics.median(factors), 1.0), before)))
        return tuple(found) if any(factor > 1 for _, factor in found) else ()

    @property
    def prefill(self) -> list[tuple[int, float]]:
        """(tokens of a prompt, median seconds from an empty cache to the first token) without drafts, by length."""
        return sorted((p.tokens, p.typical) for p in self.prompts if p.method == "none")

    def readings(self, method: str) -> list[tuple[int, float]]:
        """(tokens of a prompt, median seconds in which the drafter reads it), by length."""
        return sorted(
            (p.tokens, max(statistics.median(p.readings), 0.0))
            for p in self.prompts
            if p.method == method and p.readings
        )

    @property
    def behind(self) -> float:
        """Seconds by which the first steps after a prompt take longer, together; the median over all prompts."""
        found = [seconds for p in self.prompts if p.method == "none" for seconds in p.behind]
        return max(statistics.median(found), 0.0) if found else 0.0

    def step(self, method: str, drafts: int, requests: int, length: int) -> StepSample | None:
        """The samples of this size; ``length``: of each request when the steps begin."""
        for s in self.steps:
            if (s.method, s.drafts, s.requests, s.length) == (method, drafts, requests, length):
                return s
        return None

    def prompt(self, method: str, tokens: int) -> PromptSample | None:
        """The samples of prompts of this length."""
        for p in self.prompts:
            if (p.method, p.tokens) == (method, tokens):
                return p
        return None

    def add_step(self, sample: StepSample) -> None:
        """Another visit to a size, or the first one."""
        known = self.step(sample.method, sample.drafts, sample.requests, sample.length)
        if known is None:
            self.steps.append(sample)
        else:
            self.steps[self.steps.index(known)] = known.and_more(sample)

    def add_prompt(self, sample: PromptSample) -> None:
        """Another visit to a length, or the first one."""
        known = self.prompt(sample.method, sample.tokens)
        if known is None:
            self.prompts.append(sample)
        else:
            self.prompts[self.prompts.index(known)] = known.and_more(sample)

    def add_rest(self, sample: RestSample) -> None:
        """Another visit, or the first one."""
        self.rest = sample if self.rest is None else self.rest.and_more(sample)

    def step_factors(self) -> tuple[float, ...]:
        """Equally likely factors by which single steps differ from the median of their size; empty: not known."""
        return quantiles(factor for s in self.steps for factor in s.factors())

    def prompt_factors(self) -> tuple[float, ...]:
        """The same of prompts."""
        return quantiles(factor for p in self.prompts for factor in p.factors())


def _factors(seconds: Sequence[float]) -> list[float]:
    if len(seconds) < _FEW:
        return []
    middle = statistics.median(seconds)
    return [s / middle for s in seconds] if middle > 0 else []


def quantiles(values: Iterable[float], count: int = _QUANTILES) -> tuple[float, ...]:
    """``count`` values that are equally likely: each the mean of its share of the sorted ones, so that their mean is
    that of all. Fewer values than that are themselves.

    Example: 1, 2, 3, 4, 5, 9 in 3 shares: 1.5, 3.5, 7.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n <= count:
        return tuple(ordered)
    cuts = [i * n // count for i in range(count + 1)]
    return tuple(statistics.fmean(ordered[a:b]) for a, b in pairwise(cuts))

"""Where to run an engine: how many requests at once, which method and how many drafts, so that users wait no longer
than they may and the device does most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.times import Infeasible, StepTimes


@dataclass(frozen=True, slots=True)
class Sla:
    """Seconds that users may wait: for the first token, and between tokens after it. None: any time."""

    ttft: float | None = None
    itl: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("ttft", self.ttft), ("itl", self.itl)):
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"{name}: expected a time above 0, got {limit:g} s")

    def met(self, ttft: float | None, itl: float | None) -> bool:
        """Whether both times are within their limits; one that does not exist is."""
        late = self.ttft is not None and ttft is not None and ttft > self.ttft
        slow = self.itl is not None and itl is not None and itl > self.itl
        return not late and not slow

    def __str__(self) -> str:
        parts = [
            f"{name} {1000 * limit:g} ms"
            for name, limit in (("ttft", self.ttft), ("itl", self.itl))
            if limit is not None
        ]
        return ", ".join(parts) or "no limits"


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """``concurrency`` requests that decode together, each with ``context`` tokens in the cache.

    ``step``: seconds of a step; ``itl``: per token of a request; ``tokens_per_second``: of the engine. ``kv_share``: of
    the cache in use; None: its size is not known. ``break_even``: accepted drafts per step from which on drafting pays.
    """

    method: str
    drafts: int
    concurrency: int
    context: int
    step: float
    accepted_length: float
    itl: float
    tokens_per_second: float
    kv_share: float | None
    break_even: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def rows_of_step(
    acceptance: AcceptanceModel, method: str, drafts: int, concurrency: int, context: int
) -> int:
    """Rows of a step in which ``concurrency`` requests of ``context`` tokens ask for ``drafts`` drafts each, on
    average.

    Example: 4 requests and 5 drafts in half of the steps: 4 + 10.
    """
    return concurrency + round(concurrency * acceptance.proposed(method, drafts, context=context))


def operating_point(
    times: StepTimes,
    acceptance: AcceptanceModel,
    method: str,
    drafts: int,
    concurrency: int,
    context: int,
) -> OperatingPoint:
    """The performance of one setting. Raises ConfigError if its times are not numbers.

    Example: a step of 12 ms with 3 drafts of which 1.4 are accepted: 2.4 tokens per step, 5 ms per token.
    """
    n, whole = concurrency, concurrency * context
    plain = times.target_time(n, n, whole)
    drafting = method != "none" and drafts > 0
    step, length = plain, 1.0
    if drafting:
        rows = rows_of_step(acceptance, method, drafts, n, context)
        step = times.target_time(n, rows, whole) + times.draft_time(method, n, drafts)
        length = acceptance.length(method, drafts, context=context)
    if not (math.isfinite(step) and step > 0 and math.isfinite(plain) and plain > 0):
        raise ConfigError(f"performance model: a step of {n} requests takes {step} s")
    return OperatingPoint(
        method=method if drafting else "none",
        drafts=drafts if drafting else 0,
        concurrency=n,
        context=context,
        step=step,
        accepted_length=length,
        itl=step / length,
        tokens_per_second=n * length / step,
        kv_share=None if times.kv_tokens is None else whole / times.kv_tokens,
        break_even=step / plain - 1,
    )


def ladder(most: int) -> list[int]:
    """Numbers of requests that are looked at: all up to 8, then by an eighth more. Example: 20 is 1..8, 9, 10, ...
    20."""
    out, n = [], 1
    while n < most:
        out.append(n)
        n += max(1, n // 8)
    return [*out, most]


def points(
    times: StepTimes,
    acceptance: AcceptanceModel,
    context: int,
    *,
    methods: Sequence[str] | None = None,
    most_drafts: int = 7,
    most_requests: int = 256,
) -> Iterator[OperatingPoint]:
    """All settings that the cache has room for and that the times say something about."""
    room = most_requests
    if times.kv_tokens is not None:
        room = min(room, times.kv_tokens // max(context, 1))
    if room < 1:
        return
    if times.most_drafts is not None:
        most_drafts = min(most_drafts, times.most_drafts)
    names = [m for m in (methods if methods is not None else times.methods) if m != "none"]
    for n in ladder(room):
        for method, drafts in [("none", 0), *((m, k) for m in names for k in range(1, most_drafts + 1))]:
            rows = rows_of_step(acceptance, method, drafts, n, context)
            if times.outside(n, rows, n * context) is None:
                yield operating_point(times, acceptance, method, drafts, n, context)


def best_point(
    times: StepTimes, acceptance: AcceptanceModel, sla: Sla, isl: int, osl: int, **limits: object
) -> OperatingPoint | Infeasible:
    """The setting with the most tokens per second among those that keep to the limits; none: the one that comes
    nearest, with the reason. ``isl`` + half of ``osl`` is the mean context; ``limits``: as `points` takes them.

    The first token is compared with the time of the prompt alone on an idle engine: the least that it takes.
    """
    context = isl + osl // 2
    return choose(list(points(times, acceptance, context, **limits)), times, sla, isl, context)  # type: ignore[arg-type]


def choose(
    found: Sequence[OperatingPoint], times: StepTimes, sla: Sla, isl: int, context: int
) -> OperatingPoint | Infeasible:
    """`best_point` among points that are known; ``context``: of these."""
    if not found:
        return Infeasible(
            f"nothing is known of a context of {context} tokens (cache: {times.kv_tokens} tokens, measured up to "
            f"{times.max_context})"
        )
    ttft = times.prompt_time(0, isl, True)
    if sla.ttft is not None and ttft > sla.ttft:
        fastest = min(found, key=lambda p: p.itl)
        return Infeasible(
            f"a prompt of {isl} tokens alone takes {1000 * ttft:.4g} ms, the limit is {1000 * sla.ttft:.4g} ms",
            fastest,
        )
    fitting = [p for p in found if sla.itl is None or p.itl <= sla.itl]
    if not fitting:
        fastest = min(found, key=lambda p: p.itl)
        assert sla.itl is not None
        return Infeasible(
            f"no setting is within {1000 * sla.itl:.4g} ms per token: the nearest takes {1000 * fastest.itl:.4g} ms",
            fastest,
        )
    return max(fitting, key=lambda p: p.tokens_per_second)


def pareto(found: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The settings that no other beats in both time per token and tokens per second, by time per token."""
    out: list[OperatingPoint] = []
    for point in sorted(found, key=lambda p: (p.itl, -p.tokens_per_second)):
        if not out or point.tokens_per_second > out[-1].tokens_per_second:
            out.append(point)
    return out


def by_setting(found: Sequence[OperatingPoint]) -> Mapping[tuple[str, int], list[OperatingPoint]]:
    """Points by method and number of drafts."""
    out: dict[tuple[str, int], list[OperatingPoint]] = {}
    for point in found:
        out.setdefault((point.method, point.drafts), []).append(point)
    return out

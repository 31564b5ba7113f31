"""Load on any OpenAI-compatible server: what its users wait for, and how many it serves well.

Open loop: requests arrive at random (Poisson) times at a given rate, whether or not the server keeps up, as users do.
Closed loop: a fixed number of clients, each sending its next request when its last one is answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwise.bench.http_client import HttpError, Target, get_text, request

PERCENTILES = (50, 90, 95, 99)
SLA_FIELDS = ("ttft", "tpot", "itl", "e2e")


@dataclass(slots=True)
class Record:
    """One request. Times in seconds since it arrived. ``gaps``: between chunks, which may hold several tokens."""

    ttft: float | None = None
    e2e: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first."""
        if self.ttft is None or self.e2e is None or self.tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.tokens - 1)

    def meets(self, sla: Mapping[str, float]) -> bool:
        """Whether every time is within its limit (seconds); a failed request is not."""
        if self.error is not None:
            return False
        times = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e, "itl": max(self.gaps, default=0.0)}
        return all((value := times[name]) is None or value <= limit for name, limit in sla.items())


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a time in seconds."""

    mean: float
    percentiles: Mapping[int, float]

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, **{f"p{p}": value for p, value in self.percentiles.items()}}


@dataclass(frozen=True, slots=True)
class ServeReport:
    """The results of a load. Rates per second over ``seconds``, first request sent to last one answered."""

    seconds: float
    num_requests: int
    num_failed: int
    errors: Mapping[str, int]
    request_rate: float
    token_rate: float
    output_tokens: int
    prompt_tokens: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    sla: Mapping[str, float]
    goodput: float | None  # requests per second within the SLA
    attainment: float | None  # share of all requests within it
    acceptance: Mapping[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("ttft", "tpot", "itl", "e2e"):
            value = getattr(self, name)
            out[name] = None if value is None else value.as_dict()
        return out | {"errors": dict(self.errors), "sla": dict(self.sla)}


def distribution(values: Sequence[float]) -> Distribution | None:
    """Nearest-rank percentiles; None of nothing.

    Example: of 1, 2, 3, 4 the 50th is 2 and the 90th is 4.
    """
    if not values:
        return None
    ordered = sorted(values)
    ranks = {p: ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}
    return Distribution(sum(ordered) / len(ordered), ranks)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests are sent: a Poisson process; an infinite rate: all at once."""
    if rate == float("inf"):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def send(target: Target, path: str, body: Mapping[str, Any], arrived: float | None = None) -> Record:
    """One streamed request. Never raises: what went wrong is in ``error``. ``arrived``: when its user came, if that
    was before now (a user waits also while the client does)."""
    start = time.perf_counter() if arrived is None else arrived
    record = Record()
    last: float | None = None
    chunks = 0
    try:
        async with request(target, "POST", path, body) as answer:
            if answer.status != 200:
                message = (await answer.body()).decode("utf-8", "replace")
                raise HttpError(answer.status, _message(message))
            async for data in answer.events():
                now = time.perf_counter()
                if data == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise HttpError(200, str(event["error"].get("message", event["error"])))
                if usage := event.get("usage"):
                    record.tokens = usage.get("completion_tokens", 0)
                    record.prompt_tokens = usage.get("prompt_tokens", 0)
                if not any(_has_text(choice) for choice in event.get("choices", ())):
                    continue
                chunks += 1
                if last is None:
                    record.ttft = now - start
                else:
                    record.gaps.append(now - last)
                last = now
        record.e2e = time.perf_counter() - start
        record.tokens = record.tokens or chunks  # a server that reports no usage: a chunk counts as a token
    except HttpError as error:
        record.error = f"HTTP {error.status}" if error.status not in (0, 200) else str(error)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        record.error = f"not understood: {type(error).__name__}"
    return record


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("text")
        or delta.get("content")
        or delta.get("tool_calls")
        or delta.get("reasoning_content")
    )


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


async def bench_serve(
    target: Target,
    bodies: Sequence[Mapping[str, Any]],
    *,
    path: str = "/v1/completions",
    rate: float | None = None,
    concurrency: int | None = None,
    sla: Mapping[str, float] | None = None,
    seed: int = 0,
    advance: Callable[[str], None] = lambda _: None,
) -> ServeReport:
    """Send all bodies: at ``rate`` requests per second (open loop; ``concurrency``, if given, caps how many are in
    flight), or, without a rate, from ``concurrency`` clients (closed loop).

    Raises HttpError if the server cannot be reached at all.
    """
    assert rate is not None or concurrency is not None
    before = await _counters(target)
    limit = asyncio.Semaphore(concurrency if concurrency is not None else len(bodies))

    async def limited(body: Mapping[str, Any], arrived: float | None) -> Record:
        async with limit:
            record = await send(target, path, body, arrived)
        advance("")
        return record

    start = time.perf_counter()
    tasks = []
    times = arrivals(len(bodies), rate, seed) if rate is not None else [0.0] * len(bodies)
    for when, body in zip(times, bodies, strict=True):
        delay = start + when - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.ensure_future(limited(body, start + when if rate is not None else None)))
    records = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    return report(records, seconds, sla or {}, _difference(before, await _counters(target)))


def report(
    records: Sequence[Record], seconds: float, sla: Mapping[str, float], acceptance: Mapping[str, Any] | None
) -> ServeReport:
    """Sum up."""
    good = [r for r in records if r.error is None]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    tokens = sum(r.tokens for r in good)
    within = sum(r.meets(sla) for r in records)
    return ServeReport(
        seconds=seconds,
        num_requests=len(records),
        num_failed=len(records) - len(good),
        errors=errors,
        request_rate=len(good) / seconds,
        token_rate=tokens / seconds,
        output_tokens=tokens,
        prompt_tokens=sum(r.prompt_tokens for r in good),
        ttft=distribution([r.ttft for r in good if r.ttft is not None]),
        tpot=distribution([t for r in good if (t := r.tpot) is not None]),
        itl=distribution([gap for r in good for gap in r.gaps]),
        e2e=distribution([r.e2e for r in good if r.e2e is not None]),
        sla=sla,
        goodput=within / seconds if sla else None,
        attainment=within / len(records) if sla else None,
        acceptance=acceptance,
    )


# ------------------------------------------------------------------------------------ acceptance from /metrics


async def _counters(target: Target) -> dict[str, float] | None:
    """Speculation's counters of a server that has them, by name without prefix; positions as "per_pos/0"."""
    try:
        text = await get_text(target, "/metrics")
    except HttpError as error:
        if error.status == 0:
            raise
        return None
    return parse_counters(text)


def parse_counters(text: str) -> dict[str, float]:
    """Counters of a Prometheus exposition with ``draftwise:`` or ``vllm:`` names; several engines are added up."""
    found: dict[str, float] = {}
    pattern = r"^(?:draftwise|vllm):spec_decode_num_(\w+?)(?:_total)?(?:\{([^}]*)\})? (\S+)"
    for name, labels, value in re.findall(pattern, text, re.MULTILINE):
        if name.endswith("_created"):
            continue
        position = re.search(r'position="(\d+)"', labels)
        key = f"per_pos/{position[1]}" if position else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


def _difference(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None
) -> dict[str, Any] | None:
    if not before and not after:
        return None
    change = {name: value - (before or {}).get(name, 0.0) for name, value in (after or {}).items()}
    drafts = change.get("drafts", 0.0)
    if drafts <= 0:
        return None
    drafted, accepted = change.get("draft_tokens", 0.0), change.get("accepted_tokens", 0.0)
    positions = sorted((int(n[8:]), value) for n, value in change.items() if n.startswith("per_pos/"))
    return {
        "num_drafts": int(drafts),
        "num_draft_tokens": int(drafted),
        "num_accepted_tokens": int(accepted),
        "mean_acceptance_length": 1 + accepted / drafts,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_per_position": [value / drafts for _, value in positions],
    }

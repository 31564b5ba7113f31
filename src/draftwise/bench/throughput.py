"""Many requests at once: total tokens per second by the number of concurrent requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwise.bench.measure import Series, measure, rotated, speculation_of

if TYPE_CHECKING:
    from draftwise import LLM


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """One method at one number of concurrent requests. ``scaling``: against one request with the same method;
    ``speedup``: against plain decoding of as many requests. Times in seconds."""

    method: str
    concurrency: int
    tokens_per_second: float
    scaling: float | None
    speedup: float | None
    mean_acceptance_length: float | None
    host_time_per_step: float
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def throughput(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    methods: Sequence[str],
    concurrencies: Sequence[int] = (1, 8, 16, 64),
    temperature: float = 0.0,
    output_tokens: int = 128,
    rounds: int = 3,
    advance: Callable[[str], None] = lambda _: None,
) -> list[ThroughputRow]:
    """Start n requests together and wait for all, for each n and method, alternating.

    Needs at least ``max(concurrencies)`` prompts; smaller runs take turns through them.
    """
    from draftwise import SamplingParams

    assert len(prompts) >= max(concurrencies)
    names = list(methods)
    series = {(name, n): Series(name, temperature) for name in names for n in concurrencies}
    params = {
        name: SamplingParams(
            temperature=temperature,
            max_tokens=output_tokens,
            ignore_eos=True,
            speculation=speculation_of(name),
        )
        for name in names
    }
    for name in names:
        measure(llm, prompts[: max(concurrencies)], params[name].replace(max_tokens=4))
    for turn in range(rounds):
        for n in concurrencies:
            start = (turn * n) % (len(prompts) - n + 1)
            for name in rotated(names, turn):
                series[name, n].samples.append(measure(llm, prompts[start : start + n], params[name]))
                advance(f"{name}, {n} at once")
    return [_row(series, name, n, min(concurrencies)) for n in concurrencies for name in names]


def _row(series: dict[tuple[str, int], Series], name: str, n: int, least: int) -> ThroughputRow:
    own = series[name, n]
    plain = series.get(("none", n))
    return ThroughputRow(
        method=name,
        concurrency=n,
        tokens_per_second=own.tokens_per_second,
        scaling=own.tokens_per_second / series[name, 1].tokens_per_second if least == 1 else None,
        speedup=None if plain in (None, own) else own.tokens_per_second / plain.tokens_per_second,
        mean_acceptance_length=own.mean_acceptance_length,
        host_time_per_step=own.per_step("host_time"),
        num_samples=len(own.samples),
    )

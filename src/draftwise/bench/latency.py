"""One request at a time: what each method gives in tokens per second, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwise.bench.measure import Sample, Series, measure, rotated, speculation_of

if TYPE_CHECKING:
    from draftwise import LLM


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One method at one temperature; times in seconds, medians over prompts and rounds.

    ``speedup``: ratio of median tokens per second to plain decoding's at the same temperature. ``equal_tokens``:
    every greedy output equals plain decoding's; None at other temperatures. ``equal_prompts``: prompts with equal
    outputs.
    """

    method: str
    temperature: float
    tokens_per_second: float
    speedup: float | None
    ttft: float | None
    itl: float | None
    mean_acceptance_length: float | None
    host_time_per_step: float
    equal_tokens: bool | None
    equal_prompts: int | None
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def latency(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    methods: Sequence[str],
    temperatures: Sequence[float] = (0.0, 0.8),
    output_tokens: int = 128,
    rounds: int = 3,
    advance: Callable[[str], None] = lambda _: None,
) -> list[LatencyRow]:
    """Run every prompt alone with every method, methods alternating from prompt to prompt and round to round.

    ``methods``: names of loaded drafters; "none" (plain) is added if it is missing, first. ``advance`` is called
    after each run with what ran. Outputs have exactly ``output_tokens`` tokens.
    """
    from draftwise import SamplingParams

    names = list(methods) if "none" in methods else ["none", *methods]
    rows: list[LatencyRow] = []
    for temperature in temperatures:
        series = {name: Series(name, temperature) for name in names}
        params = {
            name: SamplingParams(
                temperature=temperature,
                max_tokens=output_tokens,
                ignore_eos=True,
                speculation=speculation_of(name),
            )
            for name in names
        }
        for name in names:  # warm up: allocations and first-use costs are not measured
            measure(llm, [prompts[0]], params[name].replace(max_tokens=min(16, output_tokens)))
        turn = 0
        for _ in range(rounds):
            for prompt in prompts:
                for name in rotated(names, turn):
                    series[name].samples.append(measure(llm, [prompt], params[name]))
                    advance(f"{name}, temperature {temperature:g}")
                turn += 1
        rows += [_row(series[name], series["none"]) for name in names]
    return rows


def _row(series: Series, plain: Series) -> LatencyRow:
    equal = None
    if series.temperature == 0:
        equal = sum(_same(a, b) for a, b in zip(series.samples, plain.samples, strict=True))
    return LatencyRow(
        method=series.method,
        temperature=series.temperature,
        tokens_per_second=series.tokens_per_second,
        speedup=None if series is plain else series.tokens_per_second / plain.tokens_per_second,
        ttft=series.median("ttft"),
        itl=series.median("itl"),
        mean_acceptance_length=series.mean_acceptance_length,
        host_time_per_step=series.per_step("host_time"),
        equal_tokens=None if equal is None else equal == len(series.samples),
        equal_prompts=equal,
        num_samples=len(series.samples),
    )


def _same(a: Sample, b: Sample) -> bool:
    return a.token_ids == b.token_ids

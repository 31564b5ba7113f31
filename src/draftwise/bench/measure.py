"""One timed run of a few requests, and what is read off it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwise import LLM, SamplingParams


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: requests that were there together. Times in seconds."""

    tokens: int
    seconds: float
    ttft: float | None
    itl: float | None
    token_ids: tuple[tuple[int, ...], ...]  # one per request
    num_steps: int  # of the engine
    host_time: float  # of all steps: everything outside of the models' forward passes
    forward_time: float  # in the target's forward passes
    draft_time: float  # in drafters, their forward passes included
    draft_forward_time: float  # in these passes
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: tuple[int, ...]


def measure(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Sample:
    """Generate for all prompts at once, and read the clock and the counters. Begins with an empty prefix cache and
    with drafters that have learned nothing: runs repeat the same prompts."""
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    llm.reset_prefix_cache()
    llm.reset_drafters()
    before = llm.stats()
    start = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    after = llm.stats()
    speculation = [output.metrics.speculation for output in outputs]
    return Sample(
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds=seconds,
        ttft=_mean(output.metrics.ttft for output in outputs),
        itl=_mean(output.metrics.itl for output in outputs),
        token_ids=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        num_steps=after.num_steps - before.num_steps,
        host_time=after.host_time - before.host_time,
        forward_time=after.forward_time - before.forward_time,
        draft_time=after.draft_time - before.draft_time,
        draft_forward_time=after.draft_forward_time - before.draft_forward_time,
        num_drafts=sum(s.num_drafts for s in speculation),
        num_draft_tokens=sum(s.num_draft_tokens for s in speculation),
        num_accepted_tokens=sum(s.num_accepted_tokens for s in speculation),
        accepted_per_pos=_sum_positions([s.num_accepted_tokens_per_pos for s in speculation]),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _sum_positions(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    width = max((len(row) for row in counts), default=0)
    return tuple(sum(row[i] for row in counts if i < len(row)) for i in range(width))


@dataclass(slots=True)
class Series:
    """The samples of one variant (a method under one set of sampling parameters)."""

    method: str
    temperature: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Median over the samples."""
        return statistics.median(s.tokens / s.seconds for s in self.samples)

    def median(self, name: str) -> float | None:
        """Median of a field of the samples, None if none has it."""
        values = [value for s in self.samples if (value := getattr(s, name)) is not None]
        return statistics.median(values) if values else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts over all samples; None without a draft."""
        drafts = sum(s.num_drafts for s in self.samples)
        return 1 + sum(s.num_accepted_tokens for s in self.samples) / drafts if drafts else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of the drafts accepted to depth 1, 2, ... at least."""
        drafts = sum(s.num_drafts for s in self.samples)
        return (
            tuple(n / drafts for n in _sum_positions([s.accepted_per_pos for s in self.samples]))
            if drafts
            else ()
        )

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per engine step and request, prompts' steps included."""
        return sum(s.tokens for s in self.samples) / max(
            1, sum(s.num_steps * len(s.token_ids) for s in self.samples)
        )

    def per_step(self, name: str) -> float:
        """A time of the samples divided by their steps, in seconds: over all samples."""
        return float(
            sum(getattr(s, name) for s in self.samples) / max(1, sum(s.num_steps for s in self.samples))
        )


def speculation_of(method: str) -> Mapping[str, Any]:
    """The per-request setting of a variant: "none" is plain decoding, "eagle3/tree" the method with a dynamic tree."""
    name, _, shape = method.partition("/")
    return {"method": name, "speculative_dynamic_tree": True} if shape == "tree" else {"method": name}


def rotated(items: Sequence[str], turn: int) -> list[str]:
    """The items, beginning with another one each turn: no variant always runs first or after the same one."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]

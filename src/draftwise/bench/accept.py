"""What each method guesses right, by kind of text, and what its guesses cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwise.bench.measure import Series, measure, speculation_of
from draftwise.bench.workloads import Workload

if TYPE_CHECKING:
    from draftwise import LLM


@dataclass(frozen=True, slots=True)
class AcceptRow:
    """One method on one workload. ``mean_acceptance_length`` counts the target's own token and only steps with a
    draft; ``tokens_per_step`` counts all steps. ``acceptance_per_position[i]``: drafts accepted to depth i + 1 at
    least, as a share of the drafts. Times in seconds per engine step."""

    method: str
    workload: str
    mean_acceptance_length: float | None
    tokens_per_step: float
    acceptance_per_position: tuple[float, ...]
    num_drafts: int
    num_draft_tokens: int
    draft_time_per_step: float
    forward_time_per_step: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def accept(
    llm: LLM,
    workloads: Sequence[Workload],
    *,
    methods: Sequence[str],
    temperature: float = 0.0,
    output_tokens: int = 96,
    advance: Callable[[str], None] = lambda _: None,
) -> list[AcceptRow]:
    """Run each workload's prompts, one at a time, with each method."""
    from draftwise import SamplingParams

    rows: list[AcceptRow] = []
    for workload in workloads:
        for name in methods:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=output_tokens,
                ignore_eos=True,
                speculation=speculation_of(name),
            )
            series = Series(name, temperature)
            for prompt in workload.prompts:
                series.samples.append(measure(llm, [prompt], params))
                advance(f"{name}, {workload.name}")
            rows.append(
                AcceptRow(
                    method=name,
                    workload=workload.name,
                    mean_acceptance_length=series.mean_acceptance_length,
                    tokens_per_step=series.tokens_per_step,
                    acceptance_per_position=series.acceptance_per_position,
                    num_drafts=sum(s.num_drafts for s in series.samples),
                    num_draft_tokens=sum(s.num_draft_tokens for s in series.samples),
                    draft_time_per_step=series.per_step("draft_time"),
                    forward_time_per_step=series.per_step("forward_time"),
                )
            )
    return rows

"""Measures each method's acceptance and the cost of its drafts, by kind of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwise.bench.measure import Series, measure, rotated, speculation_of
from draftwise.bench.workloads import Workload

if TYPE_CHECKING:
    from draftwise import LLM


OVERALL = "all prompts"


@dataclass(frozen=True, slots=True)
class AcceptRow:
    """One variant (a method, or "method/tree" with dynamic trees) on one workload.

    ``mean_acceptance_length`` counts the target's own token and only steps with a draft; ``tokens_per_step`` counts all
    steps. ``acceptance_per_position[i]``: drafts accepted to depth i + 1 at least, as a share of the drafts. Times
    in seconds per engine step. ``speedup`` against plain decoding, which took turns with it: ratio of medians.
    """

    method: str
    workload: str
    mean_acceptance_length: float | None
    tokens_per_step: float
    acceptance_per_position: tuple[float, ...]
    num_drafts: int
    num_draft_tokens: int
    draft_time_per_step: float
    forward_time_per_step: float
    speedup: float

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
    ignore_eos: bool = True,
    advance: Callable[[str], None] = lambda _: None,
) -> list[AcceptRow]:
    """Run each workload's prompts, one at a time, with each variant and plainly; the variants take turns.

    Of several workloads whose answers end by themselves (``ignore_eos`` false) there are rows of all prompts together
    at the end, as the workload `OVERALL`."""
    from draftwise import SamplingParams

    rows: list[AcceptRow] = []
    overall = {name: Series(name, temperature) for name in ("none", *methods)}
    for workload in workloads:
        series = {name: Series(name, temperature) for name in ("none", *methods)}
        for turn, prompt in enumerate(workload.prompts):
            for name in rotated(list(series), turn):
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=output_tokens,
                    ignore_eos=ignore_eos,
                    speculation=speculation_of(name),
                )
                series[name].samples.append(measure(llm, [prompt], params))
                advance(f"{name}, {workload.name}")
        for name, one in series.items():
            overall[name].samples += one.samples
        plain = series.pop("none").tokens_per_second
        rows += [_row(one, workload.name, plain) for one in series.values()]
    if len(workloads) > 1 and not ignore_eos:
        plain = overall.pop("none").tokens_per_second
        rows += [_row(one, OVERALL, plain) for one in overall.values()]
    return rows


def _row(series: Series, workload: str, plain: float) -> AcceptRow:
    """``plain``: tokens per second of plain decoding."""
    return AcceptRow(
        method=series.method,
        workload=workload,
        mean_acceptance_length=series.mean_acceptance_length,
        tokens_per_step=series.tokens_per_step,
        acceptance_per_position=series.acceptance_per_position,
        num_drafts=sum(s.num_drafts for s in series.samples),
        num_draft_tokens=sum(s.num_draft_tokens for s in series.samples),
        draft_time_per_step=series.per_step("draft_time"),
        forward_time_per_step=series.per_step("forward_time"),
        speedup=series.tokens_per_second / plain,
    )

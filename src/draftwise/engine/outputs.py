"""Output objects. They follow vLLM's; all durations are in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwise.adapt.controller import ControlStats
from draftwise.sched.request import StepTrace


@dataclass(frozen=True, slots=True)
class Logprob:
    """Raw log-probability of a token at a position, its rank (1: most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsDict = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """The results of speculation for a request.

    A draft is one verified, non-empty proposal. ``mean_acceptance_length`` counts the target's own token:
    1 + accepted / drafts, and is None before the first draft. ``steps_by_method``: decoding steps by the method
    that had drafted ("none": plain steps). ``num_accepted_tokens_per_pos[i]``: drafts accepted to depth i + 1 at least.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    steps_by_method: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_method.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "steps_by_method": dict(self.steps_by_method),
        }


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request. ``ttft``: arrival to first token; ``itl``: mean time between tokens after the first;
    ``e2e``: arrival to end; ``queue_time``: arrival to first step. None: did not happen (yet)."""

    arrival_time: float
    queue_time: float | None = None
    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "queue_time": self.queue_time,
            "ttft": self.ttft,
            "itl": self.itl,
            "e2e": self.e2e,
            "num_preemptions": self.num_preemptions,
            "num_cached_tokens": self.num_cached_tokens,
            "speculation": self.speculation.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. ``finish_reason``: "stop", "length", "abort", "error", or None while it goes on;
    ``stop_reason``: the stop string or stop token id that ended it, None for end-of-sequence."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[LogprobsDict, ...] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None
    trace: tuple[StepTrace, ...] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All samples of one prompt. ``metrics`` sums speculation over the samples; its times are the first sample's
    to start and the last one's to end."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: tuple[LogprobsDict | None, ...] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    """For method ``extract_hidden_states``: ``hidden_states_path`` is the file with the prompt's hidden states."""

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Names of adapters whose requests run, and of those whose requests wait. ``most``: that a step computes."""

    most: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. Blocks: ``num_free_blocks + num_used_blocks == num_blocks`` (cached blocks nobody
    uses count as free). Times are totals over all steps, in seconds; ``host_time`` is what a step took outside of the
    models' forward passes. ``control``: how much is drafted now, and the expected gain. ``drafter_failures``: how
    often a drafter raised or gave an invalid answer, by "method.hook", such as "eagle3.propose"; its requests went on
    without speculation. ``adapters``: None without ``enable_lora``."""

    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    block_size: int
    kv_cache_bytes: int
    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_requests_finished: int
    finish_reasons: Mapping[str, int]
    num_prompt_tokens: int
    num_generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    step_time: float
    forward_time: float
    draft_forward_time: float
    draft_time: float
    verify_time: float
    speculation: SpeculationMetrics
    control: ControlStats = field(default_factory=ControlStats)
    drafter_failures: Mapping[str, int] = field(default_factory=dict)
    adapters: AdapterStats | None = None

    @property
    def host_time(self) -> float:
        return self.step_time - self.forward_time - self.draft_forward_time


@dataclass(frozen=True, slots=True)
class Guarantees:
    """Which promises hold for the engine as configured.

    ``lossless``: output has the target's distribution (with the lossless rules). ``same_bits``: greedy output is
    bit-identical with and without speculation, by construction of the kernels. ``same_seed_same_text``: with the
    coupled rule, text depends on target, prompt, parameters and seed alone: as bits of the logits, by construction
    only where ``same_bits`` holds.
    """

    lossless: bool
    same_bits: bool
    same_seed_same_text: bool
    reasons: tuple[str, ...] = ()

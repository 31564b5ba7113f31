"""A request as the scheduler sees it. Written by the scheduler alone."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from draftwise.sampling.params import SamplingParams
from draftwise.types import IntArray, Speculation, TokenLogprobs


class TextSink(Protocol):
    """Watches the text of committed tokens for stop strings (the detokenizer). A request without any has none."""

    def push(self, token_id: int) -> object:
        """Add one output token; a true answer means a stop string was completed (and the text is cut there)."""
        ...


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One verified step of a request, for reports: the tree that was verified and what became of it."""

    method: str
    draft_tokens: tuple[int, ...]
    draft_parents: tuple[int, ...]
    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class SpeculationCounts:
    """Counters of one request, in vLLM's terms: a draft is one verified, non-empty proposal."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    steps_by_method: dict[str, int] = field(default_factory=dict)

    def add(self, method: str, drafted: int, accepted: int, depth: int) -> None:
        """Count one step. ``depth``: longest path of the verified proposal, positions that could be accepted."""
        self.steps_by_method[method] = self.steps_by_method.get(method, 0) + 1
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        per_pos = self.num_accepted_tokens_per_pos
        while len(per_pos) < depth:
            per_pos.append(0)
        for i in range(accepted):
            per_pos[i] += 1

    def merge(self, other: SpeculationCounts) -> None:
        """Add another's counts to these."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        missing = len(other.num_accepted_tokens_per_pos) - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos.extend([0] * missing)
        for i, n in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[i] += n
        for method, n in other.steps_by_method.items():
            self.steps_by_method[method] = self.steps_by_method.get(method, 0) + n


class Request:
    """Mutable state of one sample of one prompt."""

    __slots__ = (
        "adapter",
        "arrival_time",
        "bad_words_ids",
        "counts",
        "error",
        "finish_reason",
        "finished_time",
        "first_token_time",
        "kv_transfer_params",
        "last_token_time",
        "logprobs",
        "max_total",
        "num_cached",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_proposed",
        "num_tokens",
        "params",
        "priority",
        "prompt_logprobs",
        "rid",
        "sample_index",
        "scheduled_time",
        "seed",
        "sink",
        "speculation",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tokens_np",
        "trace",
    )

    def __init__(
        self,
        rid: int,
        prompt_np: IntArray,
        params: SamplingParams,
        speculation: Speculation,
        *,
        max_total: int,
        seed: int,
        arrival_time: float,
        sample_index: int = 0,
        priority: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
        sink: TextSink | None = None,
        keep_trace: bool = False,
        adapter: int = 0,
    ) -> None:
        """``max_total``: tokens (prompt + output) at which the request ends; ``stop_token_ids``: end-of-sequence
        and the user's stop tokens, ending the request once ``min_tokens`` are out; ``adapter``: the number of its
        adapter, 0: none."""
        self.rid = rid
        self.adapter = adapter
        self.params = params
        self.speculation = speculation
        self.seed = seed
        self.sample_index = sample_index
        self.priority = priority
        self.arrival_time = arrival_time
        self.stop_token_ids = stop_token_ids
        self.bad_words_ids = bad_words_ids
        self.sink = sink
        self.max_total = max_total
        self.num_prompt = len(prompt_np)
        self.num_tokens = self.num_prompt
        self.tokens_np: IntArray = np.empty(max_total, np.int32)
        self.tokens_np[: self.num_prompt] = prompt_np
        self.num_computed = 0
        self.num_cached = 0
        self.num_proposed = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.kv_transfer_params: Mapping[str, object] | None = None
        self.logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if params.prompt_logprobs is not None else None
        )
        self.counts = SpeculationCounts()
        self.trace: list[StepTrace] | None = [] if keep_trace else None
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finished_time: float | None = None

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def order(self) -> tuple[int, int]:
        """Scheduling order: lower priority value first, then first come."""
        return (self.priority, self.rid)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def takes_prefix(self) -> bool:
        """Whether it may use what the cache has of its tokens; otherwise the target has to read all of them."""
        return not self.wants_prompt_logprobs and not self.speculation.whole_prompt

    @property
    def salt(self) -> str | None:
        """What its blocks in the prefix cache are told apart by: keys depend on the adapter."""
        return f"adapter {self.adapter}" if self.adapter else None

    @property
    def known_np(self) -> IntArray:
        """[num_tokens] prompt and output so far (a view)."""
        return self.tokens_np[: self.num_tokens]

    @property
    def num_shown(self) -> int:
        """Output tokens whose text the user gets, of a request without stop strings: all but a stop token, unless its
        text is wanted, too."""
        hidden = self.finish_reason == "stop" and not self.params.include_stop_str_in_output
        return self.num_output - hidden

    def output_ids(self, start: int = 0, end: int | None = None) -> list[int]:
        """Output tokens from the ``start``-th to the one before the ``end``-th (None: all)."""
        last = self.num_tokens if end is None else self.num_prompt + end
        ids: list[int] = self.tokens_np[self.num_prompt + start : last].tolist()
        return ids

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, str | None]:
        """Append output tokens up to the first that ends the request: (tokens taken, finish reason)."""
        start, tokens_np, count = self.num_tokens, self.tokens_np, len(token_ids)
        end = start + count
        if self.sink is None and end < self.max_total and self.stop_token_ids.isdisjoint(token_ids):
            # nothing can end here
            if count < 4:  # a store into a slice takes four times as long
                for i, token in enumerate(token_ids, start):
                    tokens_np[i] = token
            else:
                tokens_np[start:end] = token_ids
            self.num_tokens = end
            return count, None
        for i, token in enumerate(token_ids):
            tokens_np[self.num_tokens] = token
            self.num_tokens += 1
            reason = self._end_at(token)
            if reason is not None:
                return i + 1, reason
        return len(token_ids), None

    def _end_at(self, token: int) -> str | None:
        """Why the request ends with its newest token; None: it does not."""
        sink = self.sink
        if token in self.stop_token_ids and self.num_output >= self.params.min_tokens:
            if token in self.params.stop_token_ids:
                self.stop_reason = token
            # The stop token is delivered as an id; its text only if the user wants it.
            if sink is not None and self.params.include_stop_str_in_output:
                sink.push(token)
            return "stop"
        match = None if sink is None else sink.push(token)
        if match:
            self.stop_reason = match if isinstance(match, str) else getattr(match, "stop", None)
            return "stop"
        return "length" if self.num_tokens >= self.max_total else None


class RequestUpdate(NamedTuple):
    """What a step changed for one request: ``num_new`` output tokens were added at its end."""

    request: Request
    num_new: int
    finished: bool

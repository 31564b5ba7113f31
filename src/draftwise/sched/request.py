"""A request as the scheduler sees it. Written by the scheduler alone."""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from draftwise.names import method_name
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
    """One verified step of a request, for reports: the verified tree and the outcome."""

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

    def add_many(self, book: RequestBook) -> None:
        """The counters of a book."""
        steps = self.steps_by_method
        for number, count in ((0, book.plain_steps), *zip(book.methods, book.steps, strict=True)):
            if count:
                name = method_name(number)
                steps[name] = steps.get(name, 0) + count
        self.num_drafts += book.num_drafts
        self.num_draft_tokens += book.num_drafted
        self.num_accepted_tokens += book.num_accepted
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (book.deepest - len(per_pos)))
        for i, times in enumerate(book.accepted_at[: book.deepest]):
            per_pos[i] += times

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


class RequestBook(ctypes.Structure):
    """The numbers of a request, where native code finds them, too (``dw::RequestBook`` of ``csrc/books.h``)."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_computed", ctypes.c_int64),
        ("num_proposed", ctypes.c_int64),
        ("max_total", ctypes.c_int64),
        ("tokens_at", ctypes.c_void_p),
        ("stops_at", ctypes.c_void_p),
        ("num_stops", ctypes.c_int64),
        ("watched", ctypes.c_int64),
        ("taken_in", ctypes.c_double),
        ("plain_steps", ctypes.c_int64),
        ("methods", ctypes.c_int64 * 3),
        ("steps", ctypes.c_int64 * 3),
        ("num_drafts", ctypes.c_int64),
        ("num_drafted", ctypes.c_int64),
        ("num_accepted", ctypes.c_int64),
        ("deepest", ctypes.c_int64),
        ("accepted_at", ctypes.c_int32 * 64),
    )

    __slots__ = ()
    __hash__ = object.__hash__  # a structure has none

    num_tokens: int
    num_computed: int
    num_proposed: int
    max_total: int
    tokens_at: int
    stops_at: int
    num_stops: int
    watched: int
    """Whether each of its steps is watched: native code does not take in its results."""
    taken_in: float
    plain_steps: int
    methods: ctypes.Array[ctypes.c_int64]
    """Numbers of the methods that drafted for it (`method_number`), 0: none. A hybrid has several."""
    steps: ctypes.Array[ctypes.c_int64]
    """Steps of each."""
    num_drafts: int
    num_drafted: int
    num_accepted: int
    deepest: int
    accepted_at: ctypes.Array[ctypes.c_int32]
    """Steps that accepted more than so many drafts."""


_TALLIES = RequestBook.plain_steps.offset  # type: ignore[attr-defined]  # of a field
_TALLIES_SIZE = ctypes.sizeof(RequestBook) - _TALLIES


def adapter_salt(adapter: int) -> str | None:
    """The salt of blocks of requests with an adapter of this number; 0: none."""
    return f"adapter {adapter}" if adapter else None


class Request(RequestBook):
    """Mutable state of one sample of one prompt."""

    __slots__ = (
        "_counts",
        "_stop_ids",
        "_stops",
        "adapter",
        "arrival_time",
        "at",
        "bad_words_ids",
        "error",
        "finish_reason",
        "finished_time",
        "first_token_time",
        "kv_transfer_params",
        "logprobs",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "params",
        "priority",
        "prompt_logprobs",
        "read_at_end",
        "rid",
        "sample_index",
        "scheduled_time",
        "seed",
        "sink",
        "speculation",
        "status",
        "stop_reason",
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
        super().__init__()
        self.at = ctypes.addressof(self)
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
        self.read_at_end = params.output_kind == "final_only"
        """Whether nobody looks at its tokens before it has ended."""
        self.max_total = max_total
        self.num_prompt = len(prompt_np)
        self.num_tokens = self.num_prompt
        self.tokens_np: IntArray = np.empty(max_total, np.int32)
        self.tokens_at = self.tokens_np.__array_interface__["data"][0]
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
        self._counts = SpeculationCounts()
        self.trace: list[StepTrace] | None = [] if keep_trace else None
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self.watched = 1  # until its first token is out

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """See `__init__`."""
        return self._stop_ids

    @stop_token_ids.setter
    def stop_token_ids(self, ids: frozenset[int]) -> None:
        self._stop_ids = ids
        self._stops = array("i", sorted(token for token in ids if 0 <= token < 1 << 31))
        self.stops_at, self.num_stops = self._stops.buffer_info()

    @property
    def last_token_time(self) -> float | None:
        """When its newest token was taken in."""
        return None if self.first_token_time is None else self.taken_in

    @last_token_time.setter
    def last_token_time(self, now: float) -> None:
        if self.first_token_time is None:
            self.first_token_time = now
            self.watched = self.sink is not None or self.logprobs is not None or self.trace is not None
        self.taken_in = now

    @property
    def counts(self) -> SpeculationCounts:
        """The request's totals of speculation so far."""
        counts = self._counts
        if self.plain_steps or self.num_drafts:
            counts.add_many(self)
            ctypes.memset(self.at + _TALLIES, 0, _TALLIES_SIZE)
        return counts

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
        """The salt of its blocks in the prefix cache, because keys depend on the adapter."""
        return adapter_salt(self.adapter)

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
    """A step's change of one request: ``num_new`` output tokens were added at its end."""

    request: Request
    num_new: int
    finished: bool


def together(updates: Sequence[RequestUpdate]) -> list[RequestUpdate]:
    """The updates of several rounds of one step, one for each request."""
    found: dict[int, RequestUpdate] = {}
    for update in updates:
        rid = update.request.rid
        before = found.get(rid)
        if before is not None:
            update = RequestUpdate(update.request, before.num_new + update.num_new, update.finished)
        found[rid] = update
    return list(found.values())

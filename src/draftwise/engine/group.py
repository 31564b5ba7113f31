"""The samples of one prompt: their requests, and the output object made from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from draftwise.engine.adapters import Lease
from draftwise.engine.detokenizer import IncrementalDetokenizer
from draftwise.engine.outputs import (
    CompletionOutput,
    Logprob,
    LogprobsDict,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request, SpeculationCounts
from draftwise.structured.base import Grammar
from draftwise.types import TokenLogprobs

OutputKind = Literal["cumulative", "delta", "final_only"]


class TextPiece(NamedTuple):
    """New text of a prompt with one sample, if there is nothing else to report. ``text`` is empty while a character
    is incomplete."""

    text: str
    num_tokens: int


class TokenText(Protocol):
    """The part of a tokenizer that outputs need."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(slots=True)
class _Sample:
    request: Request
    detokenizer: IncrementalDetokenizer | None
    # The reader's: what it was given, or, for cumulative outputs, what was built and is used again.
    sent_tokens: int = 0
    sent_logprobs: int = 0
    sent_steps: int = 0
    cumulative_logprob: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsDict] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _SampleNews:
    """The progress of a sample. ``text``: from its detokenizer, if the engine runs it for stop strings."""

    num_output: int
    num_shown: int
    num_logprobs: int
    num_steps: int
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Reading:
    """The progress of a group's samples: everything that must be read under the engine's lock. It never changes
    afterwards. ``metrics`` None: build a `TextPiece`."""

    delta: bool
    samples: tuple[_SampleNews, ...]
    finished: bool
    metrics: RequestMetrics | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    kv_transfer_params: Mapping[str, Any] | None


class RequestGroup:
    """One prompt with its n samples.

    An output is made in two steps. `read` looks at what the engine writes, under the engine's lock, and costs next to
    nothing; `build` makes objects of it, which may take long (log-probabilities), without the lock and in any thread,
    but for one reader at a time. Nothing is built twice: neither what was in an earlier output, nor the prompt's
    log-probabilities.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: Sequence[Request],
        detokenizers: Sequence[IncrementalDetokenizer | None],
        tokenizer: TokenText | None,
        grammar: Grammar | None = None,
        lease: Lease | None = None,
    ) -> None:
        """``grammar``: a reference that keeps the compiled grammar for the executor. ``lease``: of its adapter."""
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self._token_texts = None if tokenizer is None else token_texts(tokenizer)
        self._samples = [_Sample(r, d) for r, d in zip(requests, detokenizers, strict=True)]
        self._prompt_ids: tuple[int, ...] = tuple(requests[0].known_np[: requests[0].num_prompt].tolist())
        self._prompt_logprobs: tuple[LogprobsDict | None, ...] | None = None
        self._grammar = grammar
        self.lease = lease
        """Whoever queues its requests lets go of this: then they keep the adapter themselves."""

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self._samples]

    @property
    def finished(self) -> bool:
        return all(sample.request.finish_reason is not None for sample in self._samples)

    @property
    def num_finished(self) -> int:
        return sum(sample.request.finish_reason is not None for sample in self._samples)

    @property
    def num_output(self) -> int:
        return sum(sample.request.num_output for sample in self._samples)

    # --------------------------------------------------------------------------------- under the engine's lock

    def read(self, kind: OutputKind, *, text_only: bool = False) -> Reading:
        """The state now ("cumulative", "final_only"), or what is new since the last "delta".

        ``text_only``: the reader takes a `TextPiece` where there is text alone, which is neither the first nor the last
        of its sample.
        """
        delta = kind == "delta"
        first = self._samples[0].request
        prompt_logprobs = first.prompt_logprobs
        if prompt_logprobs is not None and len(prompt_logprobs) < first.num_prompt:
            prompt_logprobs = None
        return Reading(
            delta=delta,
            samples=tuple([_news(sample, delta) for sample in self._samples]),
            finished=self.finished,
            metrics=None if text_only and self._has_text_alone() else self._metrics(),
            prompt_logprobs=prompt_logprobs,
            kv_transfer_params=first.kv_transfer_params,
        )

    def _has_text_alone(self) -> bool:
        sample = self._samples[0]
        request = sample.request
        return (
            sample.sent_tokens > 0
            and sample.detokenizer is not None
            and request.finish_reason is None
            and request.logprobs is None
            and request.trace is None
            and len(self._samples) == 1
        )

    # ------------------------------------------------------------------------------------------ without the lock

    def output(self, kind: OutputKind = "cumulative") -> RequestOutput:
        """`read` and `build` in one, where nobody else writes."""
        output = self.build(self.read(kind))
        assert not isinstance(output, TextPiece)
        return output

    def num_to_build(self, reading: Reading) -> int:
        """The number of `Logprob` objects that `build` will make, which can take long."""
        count = 0
        if reading.prompt_logprobs is not None and self._prompt_logprobs is None:
            count += _num_entries(reading.prompt_logprobs, 0, len(reading.prompt_logprobs))
        for sample, news in zip(self._samples, reading.samples, strict=True):
            logprobs = sample.request.logprobs
            if logprobs is not None:
                done = sample.sent_logprobs if reading.delta else len(sample.logprobs)
                count += _num_entries(logprobs, done, news.num_logprobs)
        return count

    def build(self, reading: Reading) -> RequestOutput | TextPiece:
        """Build the output of a reading. Readings must be built in their order."""
        if reading.metrics is None:
            sample, news = self._samples[0], reading.samples[0]
            piece = TextPiece(_text(sample, news, True), news.num_output - sample.sent_tokens)
            sample.sent_tokens = news.num_output
            return piece
        if reading.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = tuple(
                [None if entry is None else self._logprobs(entry) for entry in reading.prompt_logprobs]
            )
        pairs = zip(self._samples, reading.samples, strict=True)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=tuple([self._completion(i, s, n, reading.delta) for i, (s, n) in enumerate(pairs)]),
            finished=reading.finished,
            metrics=reading.metrics,
            prompt_logprobs=self._prompt_logprobs,
            kv_transfer_params=reading.kv_transfer_params,
        )

    def _completion(self, index: int, sample: _Sample, news: _SampleNews, delta: bool) -> CompletionOutput:
        request = sample.request
        text = _text(sample, news, delta)
        if delta:
            token_ids = tuple(request.output_ids(sample.sent_tokens, news.num_output))
            sample.sent_tokens = news.num_output
        else:
            sample.token_ids += request.output_ids(len(sample.token_ids), news.num_output)
            token_ids = tuple(sample.token_ids)
        logprobs = None
        if request.logprobs is not None:
            done = sample.sent_logprobs if delta else len(sample.logprobs)
            fresh = request.logprobs[done : news.num_logprobs]
            new = [self._logprobs(entry) for entry in fresh]
            for entry in request.logprobs[sample.sent_logprobs : news.num_logprobs]:
                sample.cumulative_logprob += entry.logprob
            sample.sent_logprobs = news.num_logprobs
            if delta:
                logprobs = tuple(new)
            else:
                sample.logprobs += new
                logprobs = tuple(sample.logprobs)
        trace = None
        if request.trace is not None:
            trace = tuple(request.trace[sample.sent_steps if delta else 0 : news.num_steps])
            if delta:
                sample.sent_steps = news.num_steps
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=news.finish_reason,
            stop_reason=news.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sample.cumulative_logprob,
            error=news.error,
            trace=trace,
        )

    def _logprobs(self, entry: TokenLogprobs) -> LogprobsDict:
        """The token itself first, then the most likely ones."""
        text = self._token_texts or _no_text
        out = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            if token not in out:
                out[token] = Logprob(value, rank, text(token))
        return out

    def _metrics(self) -> RequestMetrics:
        requests = self.requests
        counts = requests[0].counts
        if len(requests) > 1:
            counts = SpeculationCounts()
            for request in requests:
                counts.merge(request.counts)
        arrival = requests[0].arrival_time
        scheduled = [r.scheduled_time for r in requests if r.scheduled_time is not None]
        first = [r.first_token_time for r in requests if r.first_token_time is not None]
        ended = [r.finished_time for r in requests if r.finished_time is not None]
        gaps = [
            (r.last_token_time - r.first_token_time, r.num_output - 1)
            for r in requests
            if r.first_token_time is not None and r.last_token_time is not None and r.num_output > 1
        ]
        return RequestMetrics(
            arrival_time=arrival,
            queue_time=min(scheduled) - arrival if scheduled else None,
            ttft=min(first) - arrival if first else None,
            itl=sum(t for t, _ in gaps) / sum(n for _, n in gaps) if gaps else None,
            e2e=max(ended) - arrival if len(ended) == len(requests) else None,
            num_preemptions=sum(r.num_preemptions for r in requests),
            num_cached_tokens=max(r.num_cached for r in requests),
            speculation=speculation_metrics(counts),
        )


def _news(sample: _Sample, delta: bool) -> _SampleNews:
    request, detokenizer = sample.request, sample.detokenizer
    text = None
    if detokenizer is not None and request.sink is not None:
        if request.finish_reason is not None:
            detokenizer.finish()
        text = detokenizer.delta() if delta else detokenizer.text
    return _SampleNews(
        num_output=request.num_output,
        num_shown=request.num_shown,
        num_logprobs=0 if request.logprobs is None else len(request.logprobs),
        num_steps=0 if request.trace is None else len(request.trace),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        text=text,
    )


def _text(sample: _Sample, news: _SampleNews, delta: bool) -> str:
    """The text up to a position. Without stop strings it is decoded here, when a reader asks."""
    detokenizer = sample.detokenizer
    if news.text is not None or detokenizer is None:
        return news.text or ""
    start = detokenizer.num_tokens
    if start < news.num_shown:
        detokenizer.extend(sample.request.output_ids(start, news.num_shown))
    if news.finish_reason is not None:
        detokenizer.finish()
    return detokenizer.delta() if delta else detokenizer.text


def _num_entries(logprobs: Sequence[TokenLogprobs | None], start: int, end: int) -> int:
    """All positions have the same number of alternatives; a prompt's first has none."""
    last = logprobs[end - 1] if start < end else None
    return 0 if last is None else (end - start) * (1 + len(last.top_ids))


def _no_text(token_id: int) -> None:
    return None


def token_texts(tokenizer: TokenText) -> Callable[[int], str]:
    """Texts of single tokens, each decoded once for all requests of a tokenizer."""
    known = _TOKEN_TEXTS.get(tokenizer)
    if known is None:
        known = _TOKEN_TEXTS[tokenizer] = {}
    texts = known

    def text(token_id: int) -> str:
        found = texts.get(token_id)
        if found is None:
            found = texts[token_id] = tokenizer.decode([token_id])
        return found

    return text


_TOKEN_TEXTS: weakref.WeakKeyDictionary[TokenText, dict[int, str]] = weakref.WeakKeyDictionary()


def speculation_metrics(counts: SpeculationCounts) -> SpeculationMetrics:
    """Freeze the counters."""
    return SpeculationMetrics(
        num_drafts=counts.num_drafts,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(counts.num_accepted_tokens_per_pos),
        steps_by_method=dict(counts.steps_by_method),
    )

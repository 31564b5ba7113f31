"""The samples of one prompt: their requests, and the output object made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

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
from draftwise.types import TokenLogprobs

OutputKind = Literal["cumulative", "delta", "final_only"]


class TextPiece(NamedTuple):
    """What is new in the one sample of a prompt, where that is text and nothing else. ``text`` may be empty: a
    character is not complete."""

    text: str
    num_tokens: int


class TokenText(Protocol):
    """The one thing output needs of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(slots=True)
class _Sample:
    request: Request
    detokenizer: IncrementalDetokenizer | None
    sent_tokens: int = 0
    sent_logprobs: int = 0
    sent_steps: int = 0

    def text(self) -> IncrementalDetokenizer | None:
        """The text so far. Without stop strings nobody needs it before somebody asks: it is made here."""
        detokenizer, request = self.detokenizer, self.request
        if detokenizer is not None and request.sink is None:
            start, end = detokenizer.num_tokens, request.num_shown
            if start < end:
                detokenizer.extend(request.output_ids(start, end))
        return detokenizer


class RequestGroup:
    """One prompt with its n samples. Not safe for concurrent use: the engine's lock guards it."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: Sequence[Request],
        detokenizers: Sequence[IncrementalDetokenizer | None],
        tokenizer: TokenText | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self._tokenizer = tokenizer
        self._samples = [_Sample(r, d) for r, d in zip(requests, detokenizers, strict=True)]
        self._prompt_ids: tuple[int, ...] = tuple(requests[0].known_np[: requests[0].num_prompt].tolist())

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self._samples]

    @property
    def finished(self) -> bool:
        return all(sample.request.finish_reason is not None for sample in self._samples)

    @property
    def num_output(self) -> int:
        return sum(sample.request.num_output for sample in self._samples)

    def text_piece(self) -> TextPiece | None:
        """What is new since the last "delta", if it is text alone and not the first or the last of it; else None, and
        `output` has it."""
        sample = self._samples[0]
        request = sample.request
        if (
            not sample.sent_tokens
            or request.finish_reason is not None
            or request.logprobs is not None
            or request.trace is not None
            or len(self._samples) > 1
        ):
            return None
        detokenizer = sample.text()
        if detokenizer is None:
            return None
        num_output = request.num_output
        piece = TextPiece(detokenizer.delta(), num_output - sample.sent_tokens)
        sample.sent_tokens = num_output
        return piece

    def output(self, kind: OutputKind = "cumulative") -> RequestOutput:
        """The state now ("cumulative", "final_only"), or what is new since the last "delta"."""
        delta = kind == "delta"
        first = self._samples[0].request
        prompt_logprobs = None
        if first.prompt_logprobs is not None and len(first.prompt_logprobs) >= first.num_prompt:
            prompt_logprobs = tuple(
                None if entry is None else self._logprobs(entry) for entry in first.prompt_logprobs
            )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=tuple(self._completion(i, sample, delta) for i, sample in enumerate(self._samples)),
            finished=self.finished,
            metrics=self._metrics(),
            prompt_logprobs=prompt_logprobs,
            kv_transfer_params=self._samples[0].request.kv_transfer_params,
        )

    def _completion(self, index: int, sample: _Sample, delta: bool) -> CompletionOutput:
        request, detokenizer = sample.request, sample.text()
        text = ""
        if detokenizer is not None:
            if request.finish_reason is not None:
                detokenizer.finish()
            text = detokenizer.delta() if delta else detokenizer.text
        start = sample.sent_tokens if delta else 0
        token_ids = tuple(request.output_ids(start))
        logprobs = cumulative = None
        if request.logprobs is not None:
            low = sample.sent_logprobs if delta else 0
            logprobs = tuple(self._logprobs(entry) for entry in request.logprobs[low:])
            cumulative = sum(entry.logprob for entry in request.logprobs)
            if delta:
                sample.sent_logprobs = len(request.logprobs)
        trace = None
        if request.trace is not None:
            trace = tuple(request.trace[sample.sent_steps if delta else 0 :])
        if delta:
            sample.sent_tokens = request.num_output
            sample.sent_steps += len(trace or ())
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            error=request.error,
            trace=trace,
        )

    def _logprobs(self, entry: TokenLogprobs) -> LogprobsDict:
        """The token itself first, then the most likely ones."""
        out = {entry.token_id: Logprob(entry.logprob, entry.rank, self._text(entry.token_id))}
        for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            if token not in out:
                out[token] = Logprob(value, rank, self._text(token))
        return out

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])

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


def speculation_metrics(counts: SpeculationCounts) -> SpeculationMetrics:
    """Freeze the counters."""
    return SpeculationMetrics(
        num_drafts=counts.num_drafts,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(counts.num_accepted_tokens_per_pos),
        steps_by_method=dict(counts.steps_by_method),
    )

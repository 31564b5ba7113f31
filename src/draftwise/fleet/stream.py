"""`FleetStream`: what a reader holds of a request that some replica serves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import CompletionOutput, LogprobsDict, RequestMetrics, RequestOutput
from draftwise.sampling.params import SamplingParams


class FleetStream:
    """Outputs of one prompt. What a slow reader has not taken is folded, so that nothing piles up for him.

    The fleet writes it (`arrived`, `failed`, `queued`), in the event loop of its reader.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        params: SamplingParams,
        arrival_time: float,
        *,
        on_text_only: Callable[[FleetStream], None],
        on_close: Callable[[FleetStream], None],
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.params = params
        self.text: str | None = None  # of the prompt
        self.prompt_ids: tuple[int, ...] = ()
        self.delivered = False  # its reader has got something
        self.text_only = False
        self.aborted = False
        self.ended = False  # nothing will come any more
        self.num_output = 0  # tokens that came
        self._arrival_time = arrival_time
        self._on_text_only = on_text_only
        self._on_close = on_close
        self._waiting: deque[RequestOutput | TextPiece] = deque()
        self._error: BaseException | None = None
        self._event = asyncio.Event()
        self._settled = asyncio.Event()
        self._closed = self._over = False

    # -------------------------------------------------------------------------------------------- the fleet's

    def queued(self) -> None:
        """A replica has it: it is valid."""
        self._settled.set()

    def arrived(self, item: Any) -> None:
        """An output of the replica: (text, tokens), or a `RequestOutput` without the prompt."""
        new: RequestOutput | TextPiece
        if isinstance(item, tuple):
            new = TextPiece(*item)
            self.num_output += new.num_tokens
        else:
            assert isinstance(item, RequestOutput)
            new = dataclasses.replace(item, prompt=self.text, prompt_token_ids=self.prompt_ids)
            count = sum(len(completion.token_ids) for completion in item.outputs)
            self.num_output = self.num_output + count if self.params.output_kind == "delta" else count
            self.ended = item.finished
        if self.params.output_kind != "delta":
            self._waiting.clear()
        last = self._waiting.pop() if self._waiting else None
        if last is not None and (folded := fold(last, new)) is not None:
            self._waiting.append(folded)
        else:
            if last is not None:
                self._waiting.append(last)
            self._waiting.append(new)
        self._settled.set()
        self._event.set()

    def failed(self, error: BaseException) -> None:
        """It ends with an exception, behind what came before."""
        self._error = error
        self.ended = True
        self._settled.set()
        self._event.set()

    def begin_again(self) -> None:
        """Another replica begins the request anew: unread output of the first one is dropped."""
        assert not self.delivered
        self._waiting.clear()
        self.num_output = 0
        self.ended = False

    def end_aborted(self) -> None:
        """It ends as an aborted request does, with no replica to say so."""
        samples = range(self.params.n)
        self.arrived(
            RequestOutput(
                request_id=self.request_id,
                prompt=None,
                prompt_token_ids=(),
                outputs=tuple(CompletionOutput(i, "", (), finish_reason="abort") for i in samples),
                finished=True,
                metrics=RequestMetrics(self._arrival_time),
            )
        )

    # ------------------------------------------------------------------------------------------- the reader's

    @property
    def prepared(self) -> bool:
        """A replica has it."""
        return self._settled.is_set() and self._error is None

    async def ready(self) -> None:
        """Return when a replica has it, or it was aborted before. Raises RequestError, EngineDeadError."""
        await self._settled.wait()
        if self._error is not None and not self._waiting:
            raise self._error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises RequestError for an invalid request, EngineDeadError if its replica failed."""
        output = await self._next()
        assert not isinstance(output, TextPiece)
        return output

    async def pieces(self) -> AsyncIterator[RequestOutput | TextPiece]:
        """See `RequestStream.pieces`."""
        assert self.params.output_kind == "delta"
        if not self.text_only:
            self.text_only = True
            self._on_text_only(self)
        while not self._over:
            yield await self._next()

    async def _next(self) -> RequestOutput | TextPiece:
        if self._over or (self._closed and not self._waiting):
            self._over = True
            raise StopAsyncIteration
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._event.clear()
            await self._event.wait()
        self.delivered = True
        output = self._waiting.popleft()
        self._over = not isinstance(output, TextPiece) and output.finished
        return output

    def close(self) -> None:
        """Abort what still runs and forget the request. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._on_close(self)


def fold(
    before: RequestOutput | TextPiece, new: RequestOutput | TextPiece
) -> RequestOutput | TextPiece | None:
    """Two deltas as one; None: they are of different kinds, and stay two."""
    if isinstance(before, TextPiece) and isinstance(new, TextPiece):
        return TextPiece(before.text + new.text, before.num_tokens + new.num_tokens)
    if isinstance(before, TextPiece) or isinstance(new, TextPiece):
        return None
    pairs = zip(before.outputs, new.outputs, strict=True)
    return dataclasses.replace(new, outputs=tuple(_joined(b, n) for b, n in pairs))


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs: tuple[LogprobsDict, ...] | None = new.logprobs
    if before.logprobs is not None:
        logprobs = before.logprobs + (new.logprobs or ())
    trace = new.trace if before.trace is None else before.trace + (new.trace or ())
    return dataclasses.replace(
        new,
        text=before.text + new.text,
        token_ids=before.token_ids + new.token_ids,
        logprobs=logprobs,
        trace=trace,
    )

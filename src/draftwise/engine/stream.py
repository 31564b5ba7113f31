"""`RequestStream`: the stream of a request of `AsyncLLM`, from its submission to the last output."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Protocol, Self

from draftwise.engine.group import Reading, RequestGroup, TextPiece
from draftwise.engine.loops import running_loop
from draftwise.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from draftwise.engine.readers import Readers
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams

_MANY = 2000
"""From this number of log-probabilities on, an output is built in a thread, so that other streams go on."""


class StreamOwner(Protocol):
    """The engine as a stream sees it."""

    def enqueue(self, stream: RequestStream, group: RequestGroup) -> None:
        """The stream's requests are prepared. Raises RequestError, EngineDeadError."""
        ...

    def read(self, stream: RequestStream) -> Reading | None:
        """The new output; None: there is none yet. Raises EngineDeadError."""
        ...

    def forget(self, stream: RequestStream) -> None:
        """Abort the request, because its reader is gone."""
        ...


class RequestStream:
    """The outputs of one prompt, submitted by `AsyncLLM.submit`; an asynchronous iterator. Close it when done.

    New output is read from the group when the reader asks. A slow reader gets fewer, larger pieces, and no queue
    grows.
    """

    def __init__(
        self,
        owner: StreamOwner,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        readers: Readers,
        workers: Workers,
        arrival_time: float,
    ) -> None:
        """``prompt``: the prompt's text, if it has one; ``readers``: the readers of the running event loop."""
        self.request_id = request_id
        self.params = params
        self.readers = readers
        self.event = asyncio.Event()  # set in the readers' loop: there is something new
        self.due = 0.0  # the loop's time before which `Readers` may hold news back
        self.wants_pieces = params.output_kind != "final_only"
        self.progress = (0, 0)  # tokens and finished samples that were read; written under the engine's lock
        self.text_only = (
            False  # its reader takes pieces, of one sample: `next_output` may answer with a `TextPiece`
        )
        self.aborted = False  # while the request was prepared, or before; written under the engine's lock
        self._owner = owner
        self._prompt = prompt
        self._workers = workers
        self._arrival_time = arrival_time
        self._group: RequestGroup | None = None
        self._task: asyncio.Task[None] | None = None  # prepares
        self._error: Exception | None = None
        self._building: asyncio.Future[RequestOutput | TextPiece] | None = None
        self._ended = False

    # ------------------------------------------------------------------------------------------- preparation

    @property
    def group(self) -> RequestGroup:
        """The request's samples, once it is `prepared`."""
        assert self._group is not None, "the request is not prepared yet"
        return self._group

    @property
    def prepared(self) -> bool:
        """The request is queued."""
        return self._group is not None

    def queued(self, group: RequestGroup) -> None:
        """The engine has the requests of this prompt now."""
        self._group = group

    def prepare(self, group: Awaitable[RequestGroup]) -> None:
        """Queue the group when it is ready. `ready` and the first output raise its errors."""
        self._task = self.readers.loop.create_task(self._prepare(group))

    async def _prepare(self, group: Awaitable[RequestGroup]) -> None:
        try:
            made = await group
            self._owner.enqueue(self, made)
        except Exception as error:
            self._error = error

    def abort(self) -> None:
        """Cancel a preparation that is still running. Call it in the readers' loop."""
        if self._task is not None and not self.prepared:
            self._task.cancel()

    async def ready(self) -> None:
        """Return when the request is queued, or was aborted before.

        Raises RequestError if it is invalid, EngineDeadError if the engine failed or was closed.
        """
        self._check_loop()
        if self._task is not None:
            await asyncio.wait([self._task])  # goes on if the waiting task is cancelled
        if self._error is not None:
            raise self._error

    def _check_loop(self) -> None:
        """Raises RequestError in another event loop than the one that is told of news: there one would wait for
        ever."""
        if running_loop() is not self.readers.loop:
            raise RequestError(
                "these outputs are for the event loop in which the request was submitted, and another one runs: submit "
                "it where its outputs are read"
            )

    # ----------------------------------------------------------------------------------------------- outputs

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises RequestError for an invalid request, EngineDeadError if the engine failed."""
        output = await self.next_output()
        assert not isinstance(output, TextPiece)
        return output

    async def pieces(self) -> AsyncIterator[RequestOutput | TextPiece]:
        """Outputs, where an output with text alone is a `TextPiece`, which halves the server's work. Only with
        ``output_kind`` "delta"."""
        assert self.params.output_kind == "delta"
        self.text_only = True
        while not self._ended:
            yield await self.next_output()

    async def next_output(self) -> RequestOutput | TextPiece:
        """The next output of `pieces` or of the iteration. Raises StopAsyncIteration at the end, and their errors."""
        if self._ended:
            raise StopAsyncIteration
        self._check_loop()
        if self._group is None:
            await self.ready()
            if self._group is None:
                self._ended = True
                if not self.aborted:  # the stream was closed
                    raise StopAsyncIteration
                return self._aborted_output()
        while self._building is None:
            await self.event.wait()
            self.event.clear()
            reading = self._owner.read(self)
            if reading is None:
                continue
            if self._group.num_to_build(reading) <= _MANY:
                return self._last(self._group.build(reading))
            work = functools.partial(self._group.build, reading)
            self._building = self._workers.submit(Lane.OUTPUT, work)
        output = await asyncio.shield(self._building)  # a reader that is cancelled may come again
        self._building = None
        return self._last(output)

    def _last(self, output: RequestOutput | TextPiece) -> RequestOutput | TextPiece:
        self._ended = not isinstance(output, TextPiece) and output.finished
        return output

    def _aborted_output(self) -> RequestOutput:
        samples = range(self.params.n)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=(),
            outputs=tuple(CompletionOutput(i, "", (), finish_reason="abort") for i in samples),
            finished=True,
            metrics=RequestMetrics(self._arrival_time),
        )

    def close(self) -> None:
        """Abort the request if it still runs, and forget it. Closing twice is allowed."""
        self._owner.forget(self)
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.readers.loop.call_soon_threadsafe(self._task.cancel)


def wake(touched: Mapping[RequestStream, bool]) -> list[RequestStream]:
    """Wake readers from the engine's thread, with one call per event loop. Value: whether this was the last
    output. Returns those that can never read, because their event loop was closed."""
    by_loop: dict[Readers, tuple[list[RequestStream], list[RequestStream]]] = {}
    for stream, ended in touched.items():
        by_loop.setdefault(stream.readers, ([], []))[ended].append(stream)
    gone: list[RequestStream] = []
    for readers, (news, ends) in by_loop.items():
        if not readers.tell(news, ends):
            gone += [*news, *ends]
    return gone

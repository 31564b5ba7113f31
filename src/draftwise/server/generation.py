"""The generation behind one HTTP request: several prompts, a deadline, and an end that always comes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from draftwise.config.lora import LoRARequest
from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import RequestOutput
from draftwise.errors import EngineDeadError, ParametersError
from draftwise.sampling.params import SamplingParams
from draftwise.server.engine import OutputStream, ServedEngine
from draftwise.server.errors import APIError, bad_request, deadline_exceeded, from_exception, shutting_down
from draftwise.server.spans import RequestSpans
from draftwise.server.sse import unless_gone

Prompt = str | Mapping[str, Any]


class Generation:
    """Prompts that were queued together. Close it when done, which aborts running requests."""

    def __init__(
        self,
        engine: ServedEngine,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        timeout: float | None = None,
        keep_trace: bool = False,
        lora_request: LoRARequest | None = None,
        on_close: Callable[[], None] = lambda: None,
        spans: RequestSpans | None = None,
    ) -> None:
        """Begin all prompts; await `ready`. ``on_close`` is called once, also if this raises; ``spans`` is ended if it
        does not.

        Raises RequestError (nothing runs then) or EngineDeadError.
        """
        self._on_close: Callable[[], None] | None = on_close
        self._streams: list[OutputStream] = []
        self._names: list[str] = []
        self._engine = engine
        self._timer: asyncio.TimerHandle | None = None
        self._timeout = timeout
        self._expired = False
        self._spans: RequestSpans | None = None
        self._last: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for i, prompt in enumerate(prompts):
                # Clients choose request ids. In the engine no two requests may share a name, whatever they chose.
                name = f"{request_id}-{i}-{uuid.uuid4().hex}"
                stream = engine.submit(
                    prompt, params, name, priority=priority, keep_trace=keep_trace, lora_request=lora_request
                )
                self._streams.append(stream)
                self._names.append(name)
        except BaseException:
            self.close()
            raise
        self._spans = spans
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)

    async def ready(self, request: Request) -> None:
        """Return when all prompts are queued: some are prepared in threads. What has failed is closed.

        Raises RequestError (nothing runs then), EngineDeadError, or ClientGone.
        """
        try:
            for stream in self._streams:
                if not stream.prepared:
                    await unless_gone(request, stream.ready())
        except BaseException:
            self.close()
            raise

    def _expire(self) -> None:
        self._expired = True
        for name in self._names:
            self._engine.abort(name)

    def close(self) -> None:
        """Abort what runs. Closing twice is fine."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.close()
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.end(self._last)
        on_close = self._on_close
        self._on_close = None
        if on_close is not None:
            on_close()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt index, output) as they come. Raises APIError if a sample failed, or the deadline passed."""
        try:
            if len(self._streams) == 1:
                async for output in self._streams[0]:
                    self._last[0] = output
                    self._check(output)
                    yield 0, output
                return
            async for i, output in self._merged():
                self._last[i] = output
                self._check(output)
                yield i, output
        except EngineDeadError as error:
            raise from_exception(error) from None

    async def pieces(self) -> AsyncIterator[tuple[int, RequestOutput | TextPiece]]:
        """`outputs`, of which those of one prompt that bring text alone come as a `TextPiece`."""
        if len(self._streams) > 1:
            async for item in self.outputs():
                yield item
            return
        try:
            async for output in self._streams[0].pieces():
                if not isinstance(output, TextPiece):
                    self._last[0] = output
                    self._check(output)
                yield 0, output
        except EngineDeadError as error:
            raise from_exception(error) from None

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        # Room for one output: a slow reader keeps the streams from being read, and they fold what is new.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

        async def pump(i: int, stream: OutputStream) -> None:
            try:
                async for output in stream:
                    await queue.put((i, output))
            except Exception as error:
                await queue.put((i, error))
            else:
                await queue.put((i, None))

        tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(self._streams)]
        try:
            left = len(tasks)
            while left:
                i, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield i, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def final(self) -> list[RequestOutput]:
        """The last output of each prompt. Raises APIError."""
        async for _ in self.outputs():
            pass
        return [output for output in self._last if output is not None]

    def _check(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            if completion.finish_reason == "abort":
                assert self._timeout is not None or not self._expired
                raise deadline_exceeded(self._timeout or 0) if self._expired else shutting_down()
            if completion.finish_reason == "error":
                kind, _, says = (completion.error or "").partition(": ")
                if kind == ParametersError.__name__:  # a 500 would be sent again, and fail again
                    raise bad_request(says, code="parameters_failed")
                raise APIError(500, f"generation failed: {completion.error}", code="generation_failed")

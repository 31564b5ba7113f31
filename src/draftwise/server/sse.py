"""Server-sent events, and waiting that ends when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwise.server.errors import APIError, from_exception

logger = logging.getLogger("draftwise.server")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # one encoder, not one per chunk
_MARK = "\0text\0"


def event(value: Any, name: str | None = None) -> bytes:
    """One event. JSON has no raw line breaks, so that one ``data:`` line is enough."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(value).encode() + b"\n\n"


class TextEvents:
    """Events that differ in one text: everything else is encoded once, for most chunks of a stream are such.

    Example: ``TextEvents(lambda text: {"a": [text]})("x")`` is ``event({"a": ["x"]})``.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, make: Callable[[str], Any]) -> None:
        """``make``: the value with a text in it, behind all other texts that a client may have chosen."""
        # The last one: an id of a client's choice may hold the mark, too.
        before, mark, after = event(make(_MARK)).rpartition(_encode(_MARK).encode())
        assert mark
        self._before, self._after = before, after

    def __call__(self, text: str) -> bytes:
        return self._before + _encode(text).encode() + self._after


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ClientGone(Exception):
    """The client has gone away."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; if the client disconnects first, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Sends ``chunks`` as they come and calls ``close`` at the end, whatever the end is.

    ``chunks`` is read only as fast as the client takes them. The connection gives up a client that takes nothing more
    (`wire.Wire`). An error after the first chunk becomes an event, ``{"error": ...}`` unless
    ``failed`` makes another one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        close: Callable[[], None],
        failed: Callable[[APIError], bytes] = lambda error: event(error.body()),
    ) -> None:
        """``failed``: the last event of a stream that ends in an error."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        pump = asyncio.ensure_future(self._pump(send))
        try:
            await asyncio.wait({gone, pump}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            self._close()
            await _cancel(gone, pump)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            try:
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                if isinstance(error, OSError):
                    raise
                last = self._failed(self._error(error))
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            logger.info("a client's connection broke; its request was given up")
        finally:
            with contextlib.suppress(Exception):
                await self._chunks.aclose()  # type: ignore[attr-defined]

    def _error(self, error: Exception) -> APIError:
        known = from_exception(error)
        if known.status == 500:
            logger.error("a stream failed: %s", type(error).__name__, exc_info=error)
        return known

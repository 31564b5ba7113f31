"""Answers that stay with their client: server-sent events, and waiting that ends when the client goes away."""

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


def event(value: Any, name: str | None = None) -> bytes:
    """One event. JSON has no raw line breaks, so that one ``data:`` line is enough."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ClientGone(Exception):
    """Nobody reads the answer any more."""


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

    Nothing is read from ``chunks`` while the client has not taken the last one. A client that leaves a chunk unread
    for ``send_timeout`` seconds is given up. An error after the first chunk becomes an event ``{"error": ...}``.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None], send_timeout: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._send_timeout = send_timeout or None

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
                    await self._send(send, chunk)
            except Exception as error:
                if isinstance(error, TimeoutError | OSError):
                    raise
                await self._send(send, event(self._error(error).body()))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):  # the client does not read, or its connection broke
            logger.info("a client stopped reading its stream; the request was given up")
        finally:
            with contextlib.suppress(Exception):
                await self._chunks.aclose()  # type: ignore[attr-defined]

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with asyncio.timeout(self._send_timeout):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    def _error(self, error: Exception) -> APIError:
        known = from_exception(error)
        if known.status == 500:
            logger.error("a stream failed: %s", type(error).__name__, exc_info=error)
        return known

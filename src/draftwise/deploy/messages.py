"""Requests of the server's application that are answered in another process: the two ends of an HTTP exchange."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_WAITING = 64
"""Messages of an answer that may wait to be taken; then the application does."""
_SENT = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")


def portable(scope: Scope) -> dict[str, Any]:
    """The parts of an ASGI scope that another process needs."""
    found = {name: scope[name] for name in _SENT if scope.get(name) is not None}
    return found | {"asgi": {"version": "3.0"}, "root_path": ""}


async def answered(app: Application, scope: Scope, body: bytes) -> AsyncIterator[Message]:
    """The messages with which an application answers a request. Closing this tells it that the client is gone."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING)
    gone = asyncio.Event()
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            if not gone.is_set():
                await messages.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task  # raises what the application raised
    finally:
        gone.set()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def whole_body(receive: Receive) -> bytes:
    """Everything that a client sends; `server.gate` has seen to it that it is not too much. ConnectionError if the
    client goes."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client is gone")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)

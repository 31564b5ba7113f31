"""Uvicorn's protocol with limits on what a connection may send, and for how long.

Bytes are counted here before they are parsed. A refused client gets OpenAI's error body, and for a moment its further
bytes are read and dropped. Closing at once would reset the connection and lose the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError

logger = logging.getLogger("draftwise.server")

_MAX_PIPELINED = 16
"""Requests of one connection that wait for an answer before them; behind these nothing more is taken."""
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20

_IDLE, _HEAD, _BODY = "idle", "head", "body"
"""The part of a message that comes next: nothing has begun, its head, its body."""


def wire_protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol for `uvicorn.Config.http`, with this server's limits."""
    return type("LimitedWire", (Wire,), {"settings": config})


class Wire(HttpToolsProtocol):
    """One connection. What Uvicorn does with it is left alone; callbacks of the parser are watched."""

    settings: ClassVar[ServerConfig]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._part = _IDLE
        self._num_messages = 0
        self._head_size = self._num_headers = 0
        self._announces_body = False
        self._running: RequestResponseCycle | None = None  # what is being answered; `cycle` is the newest
        self._refusal: APIError | None = None
        self._deaf = False  # what still comes is dropped
        self._dropped = 0
        self._watched: tuple[int, str] | None = None  # message and part that the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None  # the client takes nothing
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends. A request that has not come whole is none that runs: once whole, it would be refused."""
        super().shutdown()
        if self._part == _BODY and not self._deaf and not self.transport.is_closing():
            self._refuse(503, "the server is shutting down", "shutting_down")
            self._answer(cast(APIError, self._refusal))

    # --------------------------------------------------------------------------------------------- receiving

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        if self._part == _HEAD:  # the parser holds a long header back until it is complete
            self._grow(len(data))
        if self._refusal is None:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # this server speaks HTTP/1.1 and nothing else: the request is answered as it stands
            except httptools.HttpParserError:
                self._refuse(400, "this is not a valid HTTP/1.1 request", "invalid_http")
        if self._refusal is not None:
            self._answer(self._refusal)
        elif not self._deaf:
            self._watch()

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        self._part = _HEAD
        self._num_messages += 1
        self._head_size = self._num_headers = 0
        self._announces_body = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.settings.max_headers:
            self._refuse(
                431,
                f"the request has over {self.settings.max_headers} headers (--max-headers)",
                "max_headers",
            )
        self._grow(len(name) + len(value) + 4)
        if self._deaf:
            return
        if name.lower() in (b"content-length", b"transfer-encoding") and value != b"0":
            self._announces_body = True
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._deaf:
            names = [name for name, _ in self.headers if name == b"host"]
            if len(names) > 1 or (not names and self.parser.get_http_version() == "1.1"):
                self._refuse(400, "an HTTP/1.1 request has one Host header", "invalid_http")
            elif self.parser.should_upgrade() and self._announces_body:
                # The parser takes what follows an Upgrade for another protocol.
                self._refuse(400, "a request with a body cannot ask for an Upgrade", "invalid_http")
        if self._deaf:
            return
        self._part = _BODY
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.cycle.keep_alive = False  # the last one that is answered
            self._deaf = True
            return
        waiting = len(self.pipeline)
        super().on_headers_complete()
        if len(self.pipeline) == waiting:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            self._part = _IDLE
            super().on_message_complete()

    def _grow(self, count: int) -> None:
        self._head_size += count
        if self._head_size > self.settings.max_header_size:
            limit = self.settings.max_header_size
            self._refuse(
                431, f"the headers are larger than {limit} bytes (--max-header-size)", "max_header_size"
            )

    # ---------------------------------------------------------------------------------------------- refusing

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Take nothing more; the answer follows when the parser has returned."""
        if not self._deaf:
            self._deaf = True
            self._refusal = APIError(status, message, code=code)

    def _answer(self, refusal: APIError) -> None:
        """The connection's last answer; if another one is on its way, that is the last one."""
        self._refusal = None
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or self._part != _BODY or running.response_started:
                self.pipeline.clear()
                running.keep_alive = False
                return
            running.disconnected = True  # a reader of the body learns that the rest will not come
            running.message_event.set()
        body = json.dumps(refusal.body()).encode()
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(_LINGER_SECONDS, self.transport.close)

    def _drop(self, count: int) -> None:
        self._dropped += count
        if self._dropped > _LINGER_BYTES:
            self.transport.abort()

    # ------------------------------------------------------------------------------------------------- time

    def _watch(self) -> None:
        """Let the timer be for what comes next. Whatever came whole, as most does, has none."""
        now = (self._num_messages, self._part)
        if now == self._watched:
            return
        self._watched = now
        if self._part == _IDLE and self._num_messages:  # Uvicorn's own timer is for connections that are kept
            self._set_timer(None, None)
        elif self._part == _BODY:
            self._set_timer(self.settings.body_timeout, self._late)
        else:
            self._set_timer(self.settings.header_timeout, self._late)

    def _set_timer(self, seconds: float | None, action: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if not seconds else self.loop.call_later(seconds, action)

    def _late(self) -> None:
        if self.transport.is_closing() or self._deaf:
            return
        if self.flow.read_paused:  # it is this server that does not read
            self._set_timer(self.settings.body_timeout, self._late)
            return
        answered = self._part == _BODY and self.cycle.response_complete
        if answered or not self._num_messages:
            self.transport.close()
            return
        what, seconds, flag = (
            ("body", self.settings.body_timeout, "body-timeout")
            if self._part == _BODY
            else ("headers", self.settings.header_timeout, "header-timeout")
        )
        self._refuse(408, f"the {what} took longer than {seconds:g} s (--{flag})", flag.replace("-", "_"))
        self._answer(cast(APIError, self._refusal))

    # ---------------------------------------------------------------------------------------------- sending

    def pause_writing(self) -> None:
        super().pause_writing()
        self._give_up_unless_read()

    def resume_writing(self) -> None:
        if self._unread is not None and not self.transport.is_closing():
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if following is not None:
            self._running = following
        if self.transport.is_closing():
            self._give_up_unless_read()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._give_up_unless_read()

    def _give_up_unless_read(self) -> None:
        """Give up a client that does not read its answer for too long."""
        if self._unread is None and self.settings.send_timeout:
            self._unread = self.loop.call_later(self.settings.send_timeout, self._give_up)

    def _give_up(self) -> None:
        logger.info("a client stopped reading its answer; the connection was closed")
        self.transport.abort()

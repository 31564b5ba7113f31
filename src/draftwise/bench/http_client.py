"""A small HTTP/1.1 client for measuring: one connection per request, events as they arrive, no dependency.

A general client's own work per event (parsing into models, decompression, pools) would be part of what is measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from draftwise.errors import ConfigError


class HttpError(Exception):
    """An answer with an error status, or none at all. ``status`` 0: no HTTP answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. ``path``: in front of every request's own, such as "" or "/proxy"."""

    host: str
    port: int
    path: str
    tls: bool
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Target:
        """``http://host:port[/path]``, with or without a final "/v1". Raises ConfigError."""
        try:
            parts = urlsplit(url if "//" in url else "http://" + url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url: {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: expected http://host:port, got {url!r}")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), path, tls, api_key)


class Answer:
    """A response whose body has not been read."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self._headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0] or b"0", 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            return
        left = int(self._headers.get("content-length", -1))
        while left and (piece := await self._reader.read(65536 if left < 0 else min(left, 65536))):
            yield piece
            left -= len(piece) if left > 0 else 0

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[bytes]:
        """``data`` of server-sent events, each as soon as it is complete."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()


@asynccontextmanager
async def request(target: Target, method: str, path: str, body: Any = None) -> AsyncIterator[Answer]:
    """Send a request on a connection of its own. Raises HttpError (status 0) if there is no answer."""
    data = b"" if body is None else json.dumps(body).encode()
    writer: asyncio.StreamWriter | None = None
    try:
        context = ssl.create_default_context() if target.tls else None
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context, limit=1 << 20)
        head = f"{method} {target.path}{path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        if target.api_key is not None:
            head += f"Authorization: Bearer {target.api_key}\r\n"
        writer.write(head.encode() + b"\r\n" + data)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        headers = {
            k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:]) if k
        }
        yield Answer(status, headers, reader)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        raise HttpError(0, f"no answer from {target.host}:{target.port}: {error}") from error
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):  # its socket is closed by the loop, which may end after this
                await writer.wait_closed()


async def get_text(target: Target, path: str) -> str:
    """Raises HttpError unless the answer is 200."""
    async with request(target, "GET", path) as answer:
        text = (await answer.body()).decode("utf-8", "replace")
        if answer.status != 200:
            raise HttpError(answer.status, text[:200])
        return text

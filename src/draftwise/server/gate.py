"""Checks in front of the application: keys, host names, types, sizes, counting. Plain ASGI: nothing is buffered."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError
from draftwise.server.hosts import Hosts

OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ping", "/version", "/metrics"})
"""Served without a key: the pages themselves, what load balancers and Prometheus ask for. So is all of /static/."""


_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20


_SMALL = 1 << 16
"""Bodies up to this size are always accepted, so that a few large ones do not block all others."""


class _Refused(Exception):
    """A body is larger than the server accepts."""

    def __init__(self, error: APIError) -> None:
        super().__init__()
        self.error = error


def _no_memory() -> APIError:
    return APIError(
        429,
        "the server is full: too many large bodies at once (--max-body-memory); try again later",
        code="max_body_memory",
        headers={"Connection": "close", "Retry-After": "1"},
    )


class Gate:
    """Checks the key and host, and the type and size of a body, and calls ``count`` (path, status) for every
    answer."""

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        # A page cannot know a key. Names that were listed are meant to be all there are, with a key, too.
        self._hosts = (
            Hosts(config.host, config.allowed_hosts, ("*",) if config.api_keys else config.allowed_origins)
            if config.allowed_hosts or not config.api_keys
            else None
        )
        self._limit = config.max_body_size
        self._memory = config.max_body_memory
        self._held = 0  # bytes of bodies, of each those over `_SMALL`
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # if no answer was begun: the client went away
        received = held = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def limited_receive() -> Message:
            nonlocal received, held
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    raise _Refused(self._too_large())
                self._held += max(0, received - _SMALL) - held
                held = max(0, received - _SMALL)
                if self._held > self._memory:
                    raise _Refused(_no_memory())
            return message

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await _refuse(refusal, scope["path"], receive, counted_send)
                return
            if scope["method"] == "HEAD":  # what GET answers; the server leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, limited_receive, counted_send)
        except _Refused as refused:
            if status == 499:
                await _refuse(refused.error, scope["path"], receive, counted_send)
        except Exception:
            status = 500 if status == 499 else status  # answered further out
            raise
        finally:
            self._held -= held
            route = scope.get("route")
            # The route's path and not the client's: each path that a client makes up would become a label.
            self._count(getattr(route, "path", "other"), status)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers = dict(scope["headers"])
        path = scope["path"]
        if self._hosts is not None and (refusal := self._hosts.refusal(headers, path)) is not None:
            return refusal
        # A browser asks without a key whether it may ask (CORS).
        if (
            self._digests
            and not (path in OPEN_PATHS or path.startswith("/static/"))
            and scope["method"] != "OPTIONS"
            and not self._known(_key(headers))
        ):
            return APIError(
                401,
                "missing or wrong API key: send Authorization: Bearer KEY, or X-Api-Key: KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        if (length != b"0" or b"transfer-encoding" in headers) and not _is_json(
            headers.get(b"content-type", b"")
        ):
            # Pages may send any other type without asking first, so that this holds for them if all else fails.
            return APIError(
                415,
                "the body must be JSON and say so: send Content-Type: application/json "
                "(curl: -H 'Content-Type: application/json')",
                code="unsupported_media_type",
                headers={"Connection": "close"},
            )
        if length.isdigit() and int(length) > self._limit:
            return self._too_large()
        return None

    def _known(self, key: bytes) -> bool:
        """Compares digests with all keys, so that the time reveals neither a key's length nor a correct prefix."""
        given = hashlib.sha256(key).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"the body is larger than {self._limit} bytes (--max-body-size)",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _key(headers: Mapping[bytes, bytes]) -> bytes:
    """OpenAI's clients send it as a bearer token, Anthropic's in a header of its own."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


async def _refuse(refusal: APIError, path: str, receive: Receive, send: Send) -> None:
    """Answer at once, then read and drop the rest of the body for a moment, so that a client that is still sending
    gets the answer. Closing would reset the connection and lose the answer."""
    answer = refusal.response(path)
    await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    break
                left -= len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b"", "more_body": False})

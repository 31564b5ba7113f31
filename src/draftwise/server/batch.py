"""Files of requests in OpenAI's batch format, answered by the server's own application, without a socket."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

Application = Callable[[Any, Any, Any], Awaitable[None]]


async def answer_line(app: Application, line: str) -> dict[str, Any]:
    """The output line of an input line: ``{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}``.

    An invalid line has an ``error`` and no response; a refused request has a response with its status.
    """
    custom_id: Any = None
    try:
        asked = json.loads(line)
        if not isinstance(asked, dict):
            raise ValueError("a line is a JSON object")
        custom_id = asked.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError("custom_id: expected text")
        if asked.get("method", "POST") != "POST":
            raise ValueError(f"method: only POST, not {asked['method']!r}")
        if asked.get("url") not in URLS:
            raise ValueError(f"url: one of {', '.join(URLS)}, not {asked.get('url')!r}")
        body = asked.get("body")
        if not isinstance(body, dict):
            raise ValueError("body: expected a JSON object")
        if body.get("stream"):
            raise ValueError("stream: not supported in a batch, whose answers are whole")
    except ValueError as error:
        return _output(custom_id, error={"code": "invalid_request", "message": str(error)})
    status, answer = await _post(app, asked["url"], body)
    return _output(custom_id, {"status_code": status, "request_id": uuid.uuid4().hex, "body": answer})


async def answer_all(
    app: Application,
    lines: Iterable[str],
    write: Callable[[dict[str, Any]], None],
    at_once: int,
) -> tuple[int, int]:
    """Answer lines, ``at_once`` of them side by side, and ``write`` each as soon as it is there, in any order, as in
    OpenAI's batches. Returns how many there were and how many failed."""
    rest = iter(lines)
    count = failed = 0

    async def work() -> None:
        nonlocal count, failed
        for line in rest:
            if not line.strip():
                continue
            output = await answer_line(app, line)
            count += 1
            failed += output["error"] is not None or output["response"]["status_code"] != 200
            write(output)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return count, failed


def _output(
    custom_id: Any, response: dict[str, Any] | None = None, error: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


async def _post(app: Application, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One request to an ASGI application: status and the JSON of its answer."""
    data = json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"),
               (b"content-length", str(len(data)).encode())]  # fmt: skip
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 0), "server": ("localhost", 80), "state": {},
    }  # fmt: skip
    given = False
    gone = asyncio.Event()
    status, parts = 500, []

    async def receive() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            await gone.wait()
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    gone.set()
    return status, json.loads(b"".join(parts))

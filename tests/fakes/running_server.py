"""A server in a thread of its own, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from draftwise.server.app import create_app
from draftwise.server.config import ServerConfig
from draftwise.server.engine import ServedEngine
from draftwise.server.operations import Planning
from draftwise.server.run import make_server, serve
from draftwise.server.spans import Spans


def head_of(*headers: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """The head of a request as it goes over the wire, JSON announced."""
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers)
    return "\r\n".join((*lines, "", "")).encode()


class RunningServer:
    """``with RunningServer(engine, max_queue=1) as server: server.url``. ``exit_code`` is there after the end."""

    def __init__(
        self,
        engine: ServedEngine,
        *,
        spans: Spans | None = None,
        planner: Planning | None = None,
        **settings: Any,
    ) -> None:
        if planner is not None:
            settings["planner"] = "of-the-given-one.json"
        self.config = ServerConfig(
            **{"port": 0, "log_level": "warning", "log_interval": 0.0, "model_names": ("tiny",), **settings}
        )
        self.engine = engine
        self.app = create_app(engine, self.config, spans=spans, planner=planner)
        self.context = self.app.state.context
        self.exit_code: int | None = None
        self._server = make_server(self.app, self.config)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            return await serve(self.app, self.config, self._server)

        self.exit_code = asyncio.run(main())

    def call(self, function: Callable[[], object]) -> None:
        """Run something in the server's event loop."""
        self.loop.call_soon_threadsafe(function)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of a request; ``body`` bytes, or anything else as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            json_type = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, path, data, json_type | (headers or {}))
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.005)
        self.port = int(self._server.servers[0].sockets[0].getsockname()[1])
        return self

    def stop(self) -> None:
        """As after a signal."""
        self._server.handle_exit(15, None)

    def join(self, timeout: float = 20) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the server did not end"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

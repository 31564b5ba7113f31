"""Running the server: it drains on SIGTERM, and ends with an error when the engine does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftwise.metrics import statistics_line
from draftwise.server.config import ServerConfig
from draftwise.server.context import Context

logger = logging.getLogger("draftwise.server")

_WATCH_INTERVAL = 0.25
_DEAD_GRACE = 1.0
"""How long a server goes on answering (with 503) after its engine died, so that whoever asks for /health sees it."""


class _Server(uvicorn.Server):
    """Uvicorn stops accepting and waits for what runs; new requests on open connections get a 503 meanwhile."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self._context = context

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._context.admission.draining:
            self._context.admission.draining = True
            logger.info(
                "%s: finishing %d requests", signal.Signals(sig).name, self._context.admission.num_requests
            )
        super().handle_exit(sig, frame)


def make_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    """A server that is not started yet. Setting its ``should_exit`` ends it as a signal does."""
    return _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level=config.log_level,
            access_log=config.access_log,
            lifespan="off",
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
            server_header=False,
        ),
        app.state.context,
    )


async def serve(app: FastAPI, config: ServerConfig, server: uvicorn.Server | None = None) -> int:
    """Serve until a signal comes or the engine dies; the exit code.

    The first SIGTERM or SIGINT lets running requests finish, for ``drain_timeout`` seconds at most; a second SIGINT
    ends them.
    """
    context: Context = app.state.context
    server = server or make_server(app, config)
    watchers = [
        asyncio.ensure_future(_announce(server, config)),
        asyncio.ensure_future(_watch(server, context)),
        asyncio.ensure_future(_log_statistics(context, config.log_interval)),
    ]
    try:
        await server.serve()
    finally:
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    if not context.engine.is_alive:
        return 1
    return 0 if server.started else 1


async def _announce(server: uvicorn.Server, config: ServerConfig) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    scheme = "https" if config.ssl_certfile else "http"
    for listener in server.servers:
        for socket in listener.sockets:
            host, port = socket.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            # For people and for scripts that asked for port 0: on stdout, and the only line there.
            print(f"Draftwise serves {config.model_names[0]} at {scheme}://{shown}:{port}", flush=True)


async def _watch(server: uvicorn.Server, context: Context) -> None:
    while context.engine.is_alive:
        await asyncio.sleep(_WATCH_INTERVAL)
    logger.error("the engine has failed: the server ends")
    await asyncio.sleep(_DEAD_GRACE)
    server.should_exit = True


async def _log_statistics(context: Context, interval: float) -> None:
    if not interval:
        return
    loop = asyncio.get_running_loop()
    before, then = context.engine.stats(), loop.time()
    while True:
        await asyncio.sleep(interval)
        now, time = context.engine.stats(), loop.time()
        line = statistics_line(before, now, time - then)
        if line is not None:
            logger.info(line)
        before, then = now, time


def run(app: FastAPI, config: ServerConfig) -> int:
    """`serve` in an event loop of its own (uvloop where it is installed)."""
    with contextlib.suppress(ImportError):
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(app, config))
    with asyncio.Runner() as plain:
        return plain.run(serve(app, config))

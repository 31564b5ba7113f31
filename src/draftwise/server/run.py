"""Running the server: it drains on SIGTERM, and ends with an error when the engine does.

Requests that still run when the time to drain is over, or at a second signal, are aborted in the engine, so that
their responses end properly. Uvicorn cuts off clients that do not read, a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import functools
import gc
import logging
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from draftwise.metrics import statistics_line
from draftwise.server.config import ServerConfig
from draftwise.server.context import Context
from draftwise.server.engine import ServedFleet
from draftwise.server.sockets import bind
from draftwise.server.wire import wire_protocol

logger = logging.getLogger("draftwise.server")

SWITCH_INTERVAL = 0.001
_TRIM_INTERVAL = 1.0
_WATCH_INTERVAL = 0.25
_DEAD_GRACE = 1.0
"""Seconds for which a server goes on answering (with 503) after its engine died, so that /health shows it."""
_LAST_WORDS = 2.0
"""How long responses of aborted requests may take to end."""


class Server(uvicorn.Server):
    """Uvicorn stops accepting and waits for what runs; new requests on open connections get a 503 meanwhile."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self._context = context
        self.interrupted = False
        self.hurried = False  # a second signal came

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Without Uvicorn's raising of the signal again at the end: a server that has drained ends with code 0."""
        admission = self._context.admission
        if self.should_exit:
            self.hurried = True
            return
        admission.draining = self.should_exit = True
        self.interrupted = sig == signal.SIGINT
        logger.info("%s: finishing %d requests", signal.Signals(sig).name, admission.num_requests)


def make_server(app: FastAPI, config: ServerConfig) -> Server:
    """A server that is not started yet. Setting its ``should_exit`` ends it as a signal does."""
    return Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level=config.log_level,
            log_config=_log_config(),
            access_log=config.access_log,
            http=wire_protocol(config),
            ws="none",
            lifespan="off",
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
            timeout_graceful_shutdown=math.ceil(config.drain_timeout + _LAST_WORDS),
            server_header=False,
        ),
        app.state.context,
    )


def _log_config() -> dict[str, Any]:
    """Uvicorn's, whose access log goes to stdout. There the only line is that of `_announce`: who has read it may never
    read again, and a full pipe would stop the server."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


async def serve(
    app: FastAPI, config: ServerConfig, server: Server | None = None, bound: socket.socket | None = None
) -> int:
    """Serve until a signal comes or the engine dies; the exit code.

    The first SIGTERM or SIGINT lets running requests finish, for ``drain_timeout`` seconds at most; a second one
    aborts them. Code 0 after SIGTERM, 130 after SIGINT, 1 if the engine failed. ``bound``: the socket to listen at
    (None: one is made).
    """
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    context: Context = app.state.context
    if isinstance(context.engine, ServedFleet):
        context.engine.attach()
    server = server or make_server(app, config)
    watchers = [
        asyncio.ensure_future(_announce(server, config)),
        asyncio.ensure_future(_watch(server, context)),
        asyncio.ensure_future(_cut_off(server, context, config.drain_timeout)),
        asyncio.ensure_future(_log_statistics(context, config.log_interval)),
    ]
    if (trim := allocator_trim()) is not None:
        watchers.append(asyncio.ensure_future(context.give_back_memory(trim, _TRIM_INTERVAL)))
    try:
        await server.serve(sockets=[bound or bind(config.host, config.port)])
    finally:
        context.close()
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    if not context.engine.is_alive:
        return 1
    return 130 if server.interrupted else 0


def allocator_trim() -> Callable[[], object] | None:
    """The C library's function that gives free memory back to the system; None: it has none. It takes a few
    milliseconds, in which other threads run. Without it the allocator keeps the memory of large bodies, some 30
    MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else functools.partial(trim, 0)


async def _announce(server: uvicorn.Server, config: ServerConfig) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    scheme = "https" if config.ssl_certfile else "http"
    for listener in server.servers:
        for listening in listener.sockets:
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            # For people and for scripts that asked for port 0: on stdout, and the only line there.
            print(f"Draftwise serves {config.model_names[0]} at {scheme}://{shown}:{port}", flush=True)


async def _watch(server: uvicorn.Server, context: Context) -> None:
    while context.engine.is_alive:
        await asyncio.sleep(_WATCH_INTERVAL)
    logger.error("the engine has failed: the server ends")
    await asyncio.sleep(_DEAD_GRACE)
    server.should_exit = True


async def _cut_off(server: Server, context: Context, drain_timeout: float) -> None:
    """Abort requests that have not ended in time. Clients that do not read are not waited for."""
    while not server.should_exit:
        await asyncio.sleep(_WATCH_INTERVAL)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + drain_timeout
    while not server.hurried and loop.time() < deadline:
        await asyncio.sleep(0.05)
    if aborted := context.engine.abort_all():
        logger.warning("%d requests are aborted: the server ends", aborted)
    await asyncio.sleep(_LAST_WORDS)
    server.force_exit = True


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Uvicorn logs as an error, with a traceback, that it cut off who did not read the end of a response."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


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


def run(app: FastAPI, config: ServerConfig, bound: socket.socket | None = None) -> int:
    """`serve` in an event loop of its own (uvloop where it is installed)."""
    # A connection is an open file, and the usual 1024 are soon taken by a few idle strangers.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    # So long waits whoever wants the interpreter while another thread prepares a request, and the engine wants it some
    # times in every step: with Python's 5 ms, a step of 3 ms took 15.
    sys.setswitchinterval(SWITCH_INTERVAL)
    # What was loaded lives as long as the server: full collections, which stop everybody, need not look at it again.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(ImportError):
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(app, config, bound=bound))
    with asyncio.Runner() as plain:
        return plain.run(serve(app, config, bound=bound))

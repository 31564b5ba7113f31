"""Endpoints for operators: health, version, metrics, and the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, Response

from draftwise import __version__
from draftwise.metrics import Metrics, Source
from draftwise.server.context import Context
from draftwise.server.engine import ServedFleet
from draftwise.server.errors import APIError
from draftwise.server.page import Page

_POOLING = "this server generates text; it has no embeddings, classes or scores"
_SLEEP = (
    "the weights of this engine stay where they are, so that there is nothing to free for a while; stop the server, or "
    "run it with a smaller --kv-cache-memory"
)
_AUDIO = "this server reads and writes text, no audio or images"
_STORED = "this server stores nothing"
_ABSENT: tuple[tuple[str, str], ...] = (
    ("embeddings", _POOLING),
    ("pooling", _POOLING),
    ("classify", _POOLING),
    ("score", _POOLING),
    ("rerank", _POOLING),
    ("sleep", _SLEEP),
    ("wake_up", _SLEEP),
    ("audio", _AUDIO),
    ("images", _AUDIO),
    ("moderations", "this server judges no texts"),
    ("files", _STORED),
    ("batches", _STORED),
    ("assistants", _STORED),
    ("threads", _STORED),
    ("vector_stores", _STORED),
    ("fine_tuning", "this server trains nothing; see draftwise train"),
)


class Planning(Source, Protocol):
    """A planner that runs (`plan.live.PlannerService`)."""

    def as_dict(self) -> dict[str, Any]: ...


def absent_reason(path: str) -> str | None:
    """The reason why an endpoint of other servers is missing; None: the path is unknown.

    Example: "/v1/embeddings" and "/v2/rerank" have a reason, "/v1/embed" has none.
    """
    parts = [part for part in path.split("/") if part]
    if parts and parts[0] in ("v1", "v2"):
        parts = parts[1:]
    return dict(_ABSENT).get(parts[0]) if parts else None


def add_operations(
    app: FastAPI,
    context: Context,
    metrics: Metrics,
    endpoints: Sequence[tuple[str, str]],
    planner: Planning | None = None,
) -> None:
    """Add their routes. ``endpoints``: (methods and path, what it does), for the plain page."""
    page = Page(endpoints)

    @app.get("/health", summary="200 while the engine lives")
    @app.get("/ping", summary="The same")
    @app.post("/ping", summary="The same")
    async def health() -> Response:
        context.admission.check_alive()
        if context.admission.draining:
            raise APIError(503, "the server is shutting down", code="shutting_down")
        if isinstance(context.engine, ServedFleet):
            return JSONResponse({"replicas": context.engine.state()})
        return Response(status_code=200)

    @app.get("/version", summary="Version, promises of this engine, methods")
    async def version() -> JSONResponse:
        promises = context.engine.guarantees
        return JSONResponse(
            {
                "version": __version__,
                "guarantees": {
                    "lossless": promises.lossless,
                    "same_bits": promises.same_bits,
                    "same_seed_same_text": promises.same_seed_same_text,
                    "reasons": list(promises.reasons),
                },
                "methods": ["none", *(d.method for d in context.engine.config.drafters)],
                "default_method": context.engine.config.default_method,
                "num_speculative_tokens": {
                    d.method: d.num_speculative_tokens for d in context.engine.config.drafters
                },
            }
        )

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def prometheus() -> PlainTextResponse:
        return PlainTextResponse(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/load", summary="Requests in progress")
    async def load() -> JSONResponse:
        stats = context.engine.stats()
        return JSONResponse(
            {
                "server_load": context.admission.num_requests,
                "num_requests_running": stats.num_running,
                "num_requests_waiting": stats.num_waiting,
                "kv_cache_usage": stats.num_used_blocks / stats.num_blocks,
            }
        )

    @app.get("/planner", summary="What a planner wants, and why")
    async def plan() -> JSONResponse:
        if planner is None:
            raise APIError(404, "no planner runs beside this engine (--planner PROFILE)", code="no_planner")
        return JSONResponse(planner.as_dict())

    @app.post("/reset_prefix_cache", summary="Forget cached prefixes")
    async def reset_prefix_cache() -> JSONResponse:
        return JSONResponse({"success": context.engine.reset_prefix_cache()})

    @app.get("/is_sleeping", summary="No: this server never does")
    async def is_sleeping() -> JSONResponse:
        return JSONResponse({"is_sleeping": False})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page.html("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return page.html("docs.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        return page.file(name)

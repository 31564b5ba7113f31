"""Starts and drains replicas over HTTP, at vLLM's path."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwise.errors import EngineDeadError
from draftwise.server.context import Context
from draftwise.server.engine import ServedFleet
from draftwise.server.errors import APIError, bad_request
from draftwise.server.protocol import ScaleBody

_MOST = 64


async def scale(context: Context, request: Request, body: ScaleBody) -> Response:
    """``POST /scale_elastic_ep``: answers when new replicas serve; replicas that are not needed drain by
    themselves."""
    if not isinstance(context.engine, ServedFleet):
        raise bad_request("this server has one engine and keeps it (--data-parallel-size)")
    if context.config.planner_mode == "scale":
        raise APIError(
            409, "a planner says how many replicas there are (--planner-mode scale)", code="scaled_by_planner"
        )
    if not 1 <= body.new_data_parallel_size <= _MOST:
        raise bad_request(
            f"new_data_parallel_size is {body.new_data_parallel_size}; it must be from 1 to {_MOST}",
            "new_data_parallel_size",
        )
    try:
        await context.engine.scale(body.new_data_parallel_size)
    except EngineDeadError as error:
        if not context.engine.is_alive:
            raise
        raise APIError(500, f"a replica could not be started: {error}") from None
    return JSONResponse({"replicas": context.engine.state()})

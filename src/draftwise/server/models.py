"""The names that a server answers to: ``/v1/models``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from draftwise.server.context import Context


def add_models(app: FastAPI, context: Context) -> None:
    """Add the routes. Anthropic's clients, which send a version, get the form that they know."""

    @app.get(
        "/v1/models/", include_in_schema=False
    )  # as clients join an address; else it is a model without a name
    @app.get("/v1/models", summary="The names of the model")
    async def models(request: Request) -> JSONResponse:
        names = context.names
        if "anthropic-version" in request.headers:
            cards = [_messages_card(context, name) for name in names]
            ends = {"first_id": names[0], "last_id": names[-1]}
            return JSONResponse({"data": cards, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": [_card(context, name) for name in names]})

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(request: Request, name: str) -> JSONResponse:
        known = context.model_name(name)
        form = _messages_card if "anthropic-version" in request.headers else _card
        return JSONResponse(form(context, known))


def _card(context: Context, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "draftwise",
        "root": "embedded" if context.engine.config.embedded else name,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
    }
    adapter = context.adapters.get(name)
    if adapter is not None:
        card |= {"root": adapter.lora_path, "parent": context.config.model_names[0]}
    return card


def _messages_card(context: Context, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}

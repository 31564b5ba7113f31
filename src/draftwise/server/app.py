"""The application: routes, and the answers to exceptions."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwise import __version__
from draftwise.errors import DraftwiseError
from draftwise.metrics import HttpCounts, Metrics
from draftwise.server import chat, completions, messages, responses
from draftwise.server.adapters import load_adapter, unload_adapter
from draftwise.server.config import ServerConfig
from draftwise.server.context import Context
from draftwise.server.engine import ServedAlone, ServedFleet
from draftwise.server.errors import APIError, bad_request, from_exception
from draftwise.server.gate import Gate
from draftwise.server.limits import listed
from draftwise.server.models import add_models
from draftwise.server.operations import Planning, absent_reason, add_operations
from draftwise.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    CountTokensBody,
    DetokenizeBody,
    LoadAdapterBody,
    MessagesBody,
    ResponsesBody,
    ScaleBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from draftwise.server.scaling import scale
from draftwise.server.spans import Spans
from draftwise.server.sse import ClientGone
from draftwise.server.template_options import checked_options

logger = logging.getLogger("draftwise.server")

ENDPOINTS = (
    ("POST /v1/completions", "continue a prompt"),
    ("POST /v1/chat/completions", "answer a conversation"),
    ("POST /v1/responses", "answer, in the form of the Responses API (text, functions)"),
    ("POST /v1/messages", "answer, in the form of Anthropic's Messages API (text, functions)"),
    ("POST /v1/messages/count_tokens", "how many tokens such a request has"),
    ("GET /v1/models", "the model's names"),
    ("POST /v1/load_lora_adapter", "load an adapter under a name"),
    ("POST /v1/unload_lora_adapter", "forget one"),
    ("POST /tokenize", "text or messages to token ids"),
    ("POST /detokenize", "token ids to text"),
    ("GET /health", "200 while the engine lives, else 503; also /ping"),
    ("GET /version", "version, and which promises hold for this engine"),
    ("GET /metrics", "metrics for Prometheus"),
    ("GET /load", "requests in progress"),
    ("GET /planner", "what a planner wants, and why"),
    ("POST /reset_prefix_cache", "forget cached prefixes"),
    ("POST /scale_elastic_ep", "with several replicas: have more or fewer of them"),
    ("GET /docs", "this interface, to try out"),
)

Handler = Callable[[Context, Request, Any], Awaitable[Response]]


def create_app(
    engine: ServedAlone | ServedFleet,
    config: ServerConfig,
    metrics: Metrics | None = None,
    spans: Spans | None = None,
    planner: Planning | None = None,
) -> FastAPI:
    """The ASGI application over an engine. ``app.state`` has its `Context` and its `Metrics`. ``spans``: the sender
    of traces; the caller closes it. ``planner``: a planner whose decisions ``GET /planner`` shows."""
    context = Context(engine, config, spans)
    metrics = metrics or Metrics(engine, config.model_names[0], config.metrics_prefix)
    # FastAPI's own pages load scripts from elsewhere; "/docs" is ours (`Page`).
    app = _Described(
        title="Draftwise", version=__version__, openapi_url="/openapi.json", docs_url=None, redoc_url=None
    )
    app.state.limits = listed(config, context.limits, engine.max_model_len)
    app.state.context = context
    app.state.metrics = metrics
    app.state.direct = {}
    _add_generation(app, context)
    _add_tokens(app, context)
    add_models(app, context)
    if planner is not None:
        metrics.add(planner)
    add_operations(app, context, metrics, ENDPOINTS, planner)
    _add_errors(app)
    app.add_middleware(Direct, routes=app.state.direct)
    http: HttpCounts = metrics.http
    app.add_middleware(Gate, config=config, count=http.count)
    if config.allowed_origins:  # around the gate: a page must be able to read a refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
        )
    return app


class _Described(FastAPI):
    """Its description has the limits of this server, too."""

    def openapi(self) -> dict[str, Any]:
        return super().openapi() | {"x-limits": self.state.limits}


def _post(app: FastAPI, path: str, kind: type[Body], context: Context, handler: Handler, text: str) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(context, request, await context.parse(kind, request))

    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    schema = _inline(schema, definitions)
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        name=path.strip("/").replace("/", "_"),
        summary=text,
        response_class=JSONResponse,
        responses={code: {"description": what} for code, what in _RESPONSES.items()},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema, "example": _EXAMPLES[path]}},
            }
        },
    )
    app.state.direct[path] = (app.routes[-1], endpoint)


class Direct:
    """Calls the endpoints that generate directly. The framework's route matching and dependencies, which they do not
    need, take half of the time until a body is parsed.

    ``routes``: route and endpoint by path; the routes stay registered, so that the framework describes them.
    """

    def __init__(
        self, app: ASGIApp, routes: Mapping[str, tuple[BaseRoute, Callable[[Request], Awaitable[Response]]]]
    ) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._routes.get(scope["path"])
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], endpoint = found
        try:
            response = await endpoint(Request(scope, receive, send))
        except (APIError, DraftwiseError) as error:
            response = from_exception(error).response(scope["path"])
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=499)
        await response(scope, receive, send)


_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def main(", "max_tokens": 32, "temperature": 0, "return_metrics": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 32,
        "stream": True,
    },
    "/v1/responses": {"input": "Hello", "max_output_tokens": 32},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "adapters/sql"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/scale_elastic_ep": {"new_data_parallel_size": 2},
    "/tokenize": {"prompt": "def main(", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""Example bodies for the page at /docs."""

_RESPONSES: dict[int | str, str] = {
    400: "invalid request",
    401: "missing or wrong API key",
    404: "unknown model",
    413: "body too large",
    429: "the server is full; see Retry-After",
    503: "the engine has failed, the server is shutting down, or the deadline passed",
}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Definitions in the places that refer to them."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return {key: _inline(value, definitions) for key, value in schema.items()}
    return [_inline(part, definitions) for part in schema] if isinstance(schema, list) else schema


def _add_generation(app: FastAPI, context: Context) -> None:
    _post(app, "/v1/completions", CompletionBody, context, completions.completions, "Continue a prompt")
    _post(app, "/v1/chat/completions", ChatBody, context, chat.chat, "Answer a conversation")
    _post(app, "/v1/responses", ResponsesBody, context, responses.responses, "Answer (Responses API)")

    _post(app, "/v1/messages", MessagesBody, context, messages.messages, "Answer (Messages API)")
    _post(
        app,
        "/v1/messages/count_tokens",
        CountTokensBody,
        context,
        messages.count_tokens,
        "Count a prompt's tokens",
    )
    _post(app, "/v1/load_lora_adapter", LoadAdapterBody, context, load_adapter, "Load an adapter")
    _post(app, "/v1/unload_lora_adapter", UnloadAdapterBody, context, unload_adapter, "Forget an adapter")
    _post(app, "/scale_elastic_ep", ScaleBody, context, scale, "Have more or fewer replicas")


def _add_tokens(app: FastAPI, context: Context) -> None:
    async def tokenize(context: Context, request: Request, body: TokenizeBody) -> Response:
        context.model_name(body.model)
        tokenizer = context.need_tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages")

        def work() -> Response:
            ids = _ids_of(context, body)
            answer: dict[str, Any] = {
                "count": len(ids),
                "max_model_len": context.engine.max_model_len,
                "tokens": list(ids),
            }
            if body.return_token_strs:
                answer["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
            return JSONResponse(answer)

        return await context.work(body.size, work)

    async def detokenize(context: Context, request: Request, body: DetokenizeBody) -> Response:
        context.model_name(body.model)
        tokenizer = context.need_tokenizer()
        size = len(tokenizer)
        bad = next((t for t in body.tokens if not 0 <= t < size), None)
        if bad is not None:
            raise bad_request(f"token id {bad} is out of range: the tokenizer has {size} tokens", "tokens")
        text = await context.work(body.size, lambda: tokenizer.decode(body.tokens))
        return JSONResponse({"prompt": text})

    _post(app, "/tokenize", TokenizeBody, context, tokenize, "Text or messages to token ids")
    _post(app, "/detokenize", DetokenizeBody, context, detokenize, "Token ids to text")


def _ids_of(context: Context, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return context.encode(body.prompt, body.add_special_tokens is not False)
    options = checked_options(body.chat_template_kwargs or {})
    if body.continue_final_message:
        options["continue_final_message"] = True
    rendered = context.render_chat(
        chat.plain_messages(body.messages or []),
        tools=body.tools,
        chat_template=body.chat_template,
        template_options=options,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
    )
    ids: list[int] = rendered["prompt_token_ids"]
    return ids


def _add_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return from_exception(error).response(request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):
            return _absent(request.method, request.url.path, error).response(request.url.path)
        known = APIError(error.status_code, str(error.detail), headers=error.headers)
        return known.response(request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def unknown(request: Request, error: Exception) -> Response:
        return APIError(500, "internal error").response(request.url.path)

    app.add_exception_handler(APIError, known)
    app.add_exception_handler(DraftwiseError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unknown)


def _absent(method: str, path: str, error: HTTPException) -> APIError:
    """The answer to an unknown path or method. It lists the paths there are, because a client's base URL may lack /v1
    or have it twice."""
    served = [line.split() for line, _ in ENDPOINTS]
    near = next((p for _, p in served if path.endswith(p) or (path != "/" and p.endswith(path))), None)
    hint = "" if near is None or near == path else f"; did you mean {near}?"
    if (why := absent_reason(path)) is not None:
        hint = f": {why}"
    if error.status_code == 405:
        says = f"{path[:200]} takes {(error.headers or {}).get('Allow', 'another method')}, not {method}"
    else:
        says = f"{method} {path[:200]} is not served here{hint}"
    return APIError(
        error.status_code,
        f"{says}; there are {', '.join(' '.join(one) for one in served)}",
        code="method_not_allowed" if error.status_code == 405 else "unknown_url",
        headers=error.headers,
    )

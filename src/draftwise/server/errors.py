"""Errors as clients expect them: ``{"error": {message, type, param, code}}``, and on the paths of Anthropic's interface
the same inside ``{"type": "error", ...}`` with the names that it has for types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from draftwise.errors import (
    ConfigError,
    ContextLengthError,
    DraftwiseError,
    EngineDeadError,
    LimitError,
    ReplicaLostError,
    RequestError,
)


class APIError(Exception):
    """An answer that is an error. ``param``: the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        # OpenAI's client shows programs the message alone, in which LangChain looks for the code.
        says = f"{self.message} ({self.code})" if self.code == _TOO_LONG else self.message
        return {
            "error": {
                "message": says,
                "type": _TYPES.get(
                    self.status, "server_error" if self.status >= 500 else "invalid_request_error"
                ),
                "param": self.param,
                "code": self.code,
            }
        }

    def messages_body(self) -> dict[str, Any]:
        """The error in the form of Anthropic's interface. Its clients look for the words about a prompt that is too
        long."""
        error = self.body()["error"]
        error["type"] = _MESSAGES_TYPES.get(self.status, error["type"])
        if self.status >= 500:
            error["type"] = "overloaded_error" if self.status == 503 else "api_error"
        if self.code == _TOO_LONG:
            error["message"] = f"prompt is too long: {self.message}"
        return {"type": "error", "error": error}

    def response(self, path: str = "") -> Response:
        """``path``: the request's path, which decides the form of the body."""
        body = self.messages_body() if path.startswith(MESSAGES_PATH) else self.body()
        return Response(
            json.dumps(body),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_MESSAGES_TYPES = {413: "request_too_large", 405: "invalid_request_error"}
MESSAGES_PATH = "/v1/messages"
_TOO_LONG = "context_length_exceeded"  # clients fall back to another model, or send less
_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients try a 503 again unless told not to


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def engine_dead(*, forked: bool = False) -> APIError:
    """``forked``: this process has a copy of another one's engine."""
    says = "the engine has failed; the server is going down"
    if forked:
        says = (
            "the engine runs in the process that this one was forked from: build it in each worker "
            "(gunicorn without --preload)"
        )
    return APIError(503, says, code="engine_dead")


def shutting_down() -> APIError:
    return APIError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def deadline_exceeded(seconds: float) -> APIError:
    return APIError(
        503, f"the request took longer than its {seconds:g} s", code="deadline_exceeded", headers=_NO_RETRY
    )


def from_exception(error: Exception) -> APIError:
    """The answer for an exception of the package; unknown ones are an internal error without details."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, ReplicaLostError):
        return APIError(503, str(error), code="replica_lost", headers={"Retry-After": "0"})
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, LimitError):
        # A prompt with too many characters has too many tokens, too.
        code = _TOO_LONG if error.limit == "max_prompt_chars" else error.limit
        return bad_request(str(error), param=error.field if error.field.isidentifier() else None, code=code)
    if isinstance(error, ContextLengthError):
        return bad_request(str(error), code=_TOO_LONG)
    if isinstance(error, RequestError | ConfigError):
        # "temperature is -1; it must be ..." and "speculation: method ..." name the field first.
        match = re.match(r"([a-z_]+)(?:\[[^\]]*\])?(?: is |: )", str(error))
        return bad_request(str(error), param=match[1] if match else None)
    if isinstance(error, DraftwiseError):
        return APIError(500, str(error))
    return APIError(500, "internal error")

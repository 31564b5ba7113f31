"""Parses and checks bodies within limits. A refused body has cost almost nothing."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from draftwise.config import RequestLimits
from draftwise.engine.limits import check_fields
from draftwise.errors import LimitError
from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError, bad_request
from draftwise.server.fields import UnknownFields, translate
from draftwise.server.protocol import Body
from draftwise.server.shape import Shape, bound, measure

B = TypeVar("B", bound=Body)


class Bodies:
    """Reads the bodies of one server. Used from any thread."""

    def __init__(self, config: ServerConfig, limits: RequestLimits, max_model_len: int) -> None:
        self._limits = limits
        values = config.body_values(max_model_len)
        self._most = Shape(config.max_body_depth, config.max_body_fields, values)
        self._unknown = UnknownFields(refuse=config.unknown_fields == "refuse")

    def parse(self, kind: type[B], data: bytes) -> B:
        """The body of a request. If a name occurs twice, the last value counts.

        Raises APIError (400) that names the field, LimitError."""
        self._check_shape(data)
        try:
            given = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(given, dict):
            raise bad_request("the body must be a JSON object")
        given = translate(given, kind.model_fields)
        given = self._unknown.remove(given, kind.model_fields, kind.REFUSED)
        check_fields(self._limits, given)
        try:
            body = kind.model_validate(given)
        except ValidationError as error:
            raise _refusal(error) from None
        body._size = len(data)
        return body

    def _check_shape(self, data: bytes) -> None:
        if len(data) < _SHORT and bound(data).within(self._most):
            return
        shape = measure(data)
        for what, is_, most, limit in (
            ("levels of nesting", shape.depth, self._most.depth, "max_body_depth"),
            ("fields", shape.fields, self._most.fields, "max_body_fields"),
            ("values", shape.values, self._most.values, "max_body_values"),
        ):
            if is_ > most:
                raise LimitError("the body", f"{is_} {what}", limit, most)


_SHORT = 1 << 16


def _refusal(error: ValidationError) -> APIError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = details[0]
    location = [str(part) for part in first["loc"]]
    if not location:
        return bad_request("the body must be a JSON object")
    if first["type"] == "missing":
        return bad_request(f"{location[0]} is required", param=location[0], code="missing_required_parameter")
    # A union reports one error per alternative; all of them begin with the field.
    same = [e for e in details if e["loc"] and e["loc"][0] == first["loc"][0]]
    message = " or ".join(dict.fromkeys(str(e["msg"]) for e in same[:4]))
    return bad_request(f"{location[0]}: {message}", param=location[0])

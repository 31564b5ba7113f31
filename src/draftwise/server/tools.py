"""Tool calls: those that a client allows, and their form in answers."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwise.errors import LimitError, RequestError
from draftwise.server.errors import bad_request
from draftwise.server.tool_formats import CallPiece, ForcedParser, ToolParser


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The plan for a request's tools. ``shown``: tools the template renders; ``parse``: look for calls in the text;
    ``schema``: what the whole output is constrained to when a call is forced, ``forced``: its name if given."""

    shown: Sequence[Mapping[str, Any]] | None = None
    parse: bool = False
    schema: Mapping[str, Any] | None = None
    forced: str | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)  # of arguments, by name

    def parser(self, kind: type[ToolParser], *, only_one: bool) -> ToolParser | None:
        """The parser of calls in an answer; None: there are no calls. ``kind``: the parser of the model's own
        form."""
        if self.schema is not None:
            return ForcedParser(self.forced)
        return kind(only_one=only_one, schemas=self.schemas) if self.parse else None


def plan_tools(tools: Sequence[Any] | None, choice: Any) -> ToolPlan:
    """Raises APIError (400) for malformed tools and choices."""
    names: dict[str, Any] = {}
    for tool in tools or ():
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise bad_request('tools: a tool is {"type": "function", "function": {"name": ...}}', "tools")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise bad_request("tools: a function needs a name", "tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise bad_request(f"tools: parameters of {name!r} must be a JSON schema", "tools")
        names[name] = parameters or {"type": "object"}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools or (), choice.get("allowed_tools"))
        names = {tool["function"]["name"]: names[tool["function"]["name"]] for tool in tools}
    if not names:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    if choice in (None, "auto"):
        return ToolPlan(shown=tools, parse=True, schemas=names)
    if choice == "required":
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in names.items()
        ]
        return ToolPlan(shown=tools, schema=calls[0] if len(calls) == 1 else {"anyOf": calls})
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(
            'tool_choice: expected {"type": "function", "function": {"name": ...}}', "tool_choice"
        )
    if name not in names:
        raise bad_request(f"tool_choice: no tool is called {name[:80]!r}", "tool_choice")
    return ToolPlan(shown=tools, schema=names[name], forced=name)


def _allowed(tools: Sequence[Any], given: Any) -> tuple[list[Any], str]:
    """(the tools that ``allowed_tools`` leaves, "auto" or "required"). Raises APIError."""
    mode = given.get("mode") if isinstance(given, Mapping) else None
    listed = given.get("tools") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise bad_request("tool_choice: allowed_tools needs mode (auto or required) and tools", "tool_choice")
    wanted = [_name(tool) for tool in listed]
    there = {_name(tool) for tool in tools}
    missing = next((name for name in wanted if name is None or name not in there), None)
    if missing is not None or None in wanted:
        raise bad_request(f"tool_choice: no tool is called {str(missing)[:80]!r}", "tool_choice")
    return [tool for tool in tools if _name(tool) in wanted], mode


def _name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


@contextlib.contextmanager
def forced_call_errors(plan: ToolPlan) -> Iterator[None]:
    """An error about structured output, of which the client asked for none, is one about its forced call."""
    try:
        yield
    except LimitError:
        raise
    except RequestError as error:
        if plan.schema is not None and "structured" in str(error):
            raise bad_request(
                f"tool_choice: a forced call needs structured output: {error}", "tool_choice"
            ) from None
        raise


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def delta_of(piece: CallPiece) -> dict[str, Any]:
    """OpenAI's tool call in a stream: what identifies it comes once, its arguments as they grow."""
    if piece.name is None:
        return {"index": piece.call, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.call, "id": new_call_id(), "type": "function", "function": function}


def whole_calls(pieces: Iterable[CallPiece]) -> list[dict[str, Any]]:
    """OpenAI's tool calls, complete."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append({name: value for name, value in delta_of(piece).items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return calls


class Arguments(dict[str, Any]):
    """Arguments of an earlier call, for a chat template. Clients send them as JSON text; most templates write an object
    with ``| tojson``, others put the text itself together with ``+`` or ``~``, and either gets what it expects."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def template_calls(calls: Any) -> Any:
    """``tool_calls`` of a message with their arguments as `Arguments`; what is not of that form stays as it is."""
    if not isinstance(calls, list):
        return calls
    out = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        text = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(call, Mapping) and isinstance(function, Mapping) and isinstance(text, str):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                call = {**call, "function": {**function, "arguments": Arguments(value, text)}}
        out.append(call)
    return out

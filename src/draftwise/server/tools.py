"""Tool calls: which the client allows, and finding them in the text of a model.

The form understood is the common ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen, and
others); several may follow each other. What does not parse stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwise.server.errors import bad_request

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What the tools of a request mean. ``shown``: tools the template renders; ``parse``: look for calls in the text;
    ``schema``: what the whole output is constrained to when a call is forced, ``forced``: its name if given."""

    shown: Sequence[Mapping[str, Any]] | None = None
    parse: bool = False
    schema: Mapping[str, Any] | None = None
    forced: str | None = None


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
    if not names:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    if choice in (None, "auto"):
        return ToolPlan(shown=tools, parse=True)
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


def call_of(name: str, arguments: Any, index: int | None = None) -> dict[str, Any]:
    """OpenAI's tool call; ``index`` in streams."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call: dict[str, Any] = {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }
    return call if index is None else {"index": index, **call}


def forced_call(plan: ToolPlan, text: str) -> dict[str, Any]:
    """The call that a constrained output is. Cut short by max_tokens it is passed on as it is."""
    if plan.forced is not None:
        return call_of(plan.forced, text)
    try:
        value = json.loads(text)
        return call_of(value["name"], value["arguments"])
    except (ValueError, KeyError, TypeError):
        return call_of("", text)


class ToolParser:
    """Finds calls in a text that comes in pieces.

    Text before the first call is passed on at once, except for what may be the beginning of ``<tool_call>``; a call is
    passed on when it is complete. White space around calls is dropped.

    Example: "Hi <tool", "_call>{...}</tool_call>" gives text "Hi", then one call.
    """

    def __init__(self, *, only_one: bool = False) -> None:
        self._held = ""
        self._inside = False
        self._only_one = only_one
        self.num_calls = 0

    def push(self, piece: str) -> tuple[str, list[tuple[str, Any]]]:
        """(text, [(name, arguments)]) that are certain now."""
        self._held += piece
        text, calls = "", []
        while True:
            if not self._inside:
                at = self._held.find(OPEN)
                if at < 0:
                    keep = self._kept()
                    cut = len(self._held) - keep
                    text += self._held[:cut]
                    self._held = self._held[cut:]
                    break
                text += self._held[:at].rstrip()
                self._held = self._held[at + len(OPEN) :]
                self._inside = True
            at = self._held.find(CLOSE)
            if at < 0:
                break
            inner, self._held = self._held[:at], self._held[at + len(CLOSE) :].lstrip()
            self._inside = False
            call = _parse(inner)
            if call is None:
                text += OPEN + inner + CLOSE
            elif not (self._only_one and self.num_calls):
                self.num_calls += 1
                calls.append(call)
        return text, calls

    def finish(self) -> tuple[str, list[tuple[str, Any]]]:
        """The text ended: a call that lacks only its end mark counts, anything else held back is text."""
        held, self._held = self._held, ""
        if not self._inside:
            return ("" if self.num_calls and not held.strip() else held), []
        call = _parse(held)
        if call is None:
            return OPEN + held, []
        if self._only_one and self.num_calls:
            return "", []
        self.num_calls += 1
        return "", [call]

    def _kept(self) -> int:
        """Characters at the end that may belong to a call: the beginning of its mark and white space before it."""
        held = self._held
        for length in range(min(len(OPEN) - 1, len(held)), 0, -1):
            if OPEN.startswith(held[-length:]):
                break
        else:
            length = 0
        stripped = held[: len(held) - length].rstrip()
        return len(held) - len(stripped)


def _parse(text: str) -> tuple[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], value.get("arguments", value.get("parameters", {}))

"""The items of the Responses API: those of a request as chat messages, those of an answer as its text comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.server.chat import plain_messages
from draftwise.server.context import new_id
from draftwise.server.errors import bad_request
from draftwise.server.reader import AnswerReader, Part
from draftwise.server.reasoning import Thought
from draftwise.server.tool_formats import CallPiece
from draftwise.server.tools import ToolPlan, new_call_id, plan_tools

Event = tuple[str, dict[str, Any]]
"""Type and fields."""


def input_messages(
    instructions: str | None, given: str | Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Instructions and input as chat messages. Raises APIError.

    Calls belong to the assistant's message before them, as in chat completions, and reasoning to the one behind it.
    Example: the items reasoning, message (assistant, "Let me see"), function_call, function_call, function_call_output
    are one message with ``reasoning_content`` and two ``tool_calls``, and one of role "tool".
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by call id
    thoughts = ""  # of the assistant's next message
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            if thoughts and item.get("role") == "assistant":
                messages[-1]["reasoning_content"], thoughts = thoughts, ""
        elif kind == "function_call":
            call_id, name, arguments = (_text(item, field) for field in ("call_id", "name", "arguments"))
            names[call_id] = name
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
                if thoughts:
                    messages[-1]["reasoning_content"], thoughts = thoughts, ""
            function = {"name": name, "arguments": arguments}
            messages[-1].setdefault("tool_calls", []).append(
                {"id": call_id, "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            call_id = _text(item, "call_id")
            if call_id not in names:
                raise bad_request(f"input: no function_call has the call_id {call_id[:80]!r}", "input")
            message = {"role": "tool", "tool_call_id": call_id, "name": names[call_id]}
            messages.append({**message, "content": item.get("output")})
        elif kind == "reasoning":
            thoughts = _thoughts(item)
        elif kind == "item_reference":
            raise bad_request("input: this server stores no items to refer to: send the item itself", "input")
        else:
            raise bad_request(f"input: items of type {str(kind)[:80]!r} are not supported", "input")
    return plain_messages(messages, "input")


def _thoughts(item: Mapping[str, Any]) -> str:
    """Reasoning as text: its content, or else its summary. Raises APIError."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if parts:
            if not isinstance(parts, list) or not all(
                isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts
            ):
                raise bad_request(f"input: {field} of reasoning is a list of parts with text", "input")
            return "\n".join(part["text"] for part in parts)
    return ""


def _text(item: Mapping[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise bad_request(f"input: a {item.get('type')} needs {field} (text)", "input")
    return value


def response_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> ToolPlan:
    """The plan for a request's tools (`plan_tools`). In this interface a function's name stands beside its type, and
    a choice may name several.

    Raises APIError (400).
    """
    functions: list[dict[str, Any]] = []
    for tool in tools or ():
        if tool.get("type") != "function":
            raise bad_request(
                f"tools: type is {str(tool.get('type'))[:80]!r}; only function is supported", "tools"
            )
        function = {k: tool[k] for k in ("name", "description", "parameters") if tool.get(k) is not None}
        functions.append({"type": "function", "function": function})
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        elif kind == "allowed_tools":
            allowed = choice.get("tools")
            if isinstance(allowed, list):
                allowed = [{"function": tool} for tool in allowed]
            choice = {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
        else:
            raise bad_request(
                'tool_choice: expected {"type": "function", "name": ...} or {"type": "allowed_tools", ...}',
                "tool_choice",
            )
    return plan_tools(functions, choice)


class OutputItems:
    """Items of one answer. ``push`` and ``finish`` return the events that tell of what is new; ``output`` holds the
    items that are complete.

    Without tools and reasoning there is one message, open from the start; with them a message begins with its first
    character, and ends where a call begins. Calls tell of their arguments as they grow.
    """

    def __init__(self, reader: AnswerReader | None) -> None:
        """``reader``: finds calls and reasoning (None: there are none)."""
        self.output: list[dict[str, Any]] = []
        self._reader = reader
        self._open: dict[str, Any] | None = None  # the item that grows: reasoning, a message, or a call
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        return self._open_message() if self._reader is None else []

    def push(self, text: str) -> list[Event]:
        return self._push_text(text) if self._reader is None else self._push_found(self._reader.push(text))

    def finish(self, cut: bool) -> list[Event]:
        """The text ended; ``cut``: before it was complete."""
        events: list[Event] = []
        if self._reader is not None:
            events += self._push_found(self._reader.finish())
        if self._open is None and all(item["type"] == "reasoning" for item in self.output):
            events += self._open_message()
        return events + self._close("incomplete" if cut else "completed")

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        if self._open["type"] == "reasoning":
            return self._close_reasoning(status)
        return self._close_message(status) if self._open["type"] == "message" else self._close_call(status)

    # ------------------------------------------------------------------------------------------ reasoning

    def _push_thought(self, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != "reasoning":
            events = self._close("completed")
            item = {
                "id": new_id("rs"),
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            events.append(self._added(item))
            part = {"type": "reasoning_text", "text": ""}
            events.append(
                ("response.content_part.added", {**self._place(), "content_index": 0, "part": part})
            )
        self._pieces.append(text)
        return [
            *events,
            ("response.reasoning_text.delta", {**self._place(), "content_index": 0, "delta": text}),
        ]

    def _close_reasoning(self, status: str) -> list[Event]:
        text, place = "".join(self._pieces), {**self._place(), "content_index": 0}
        part = {"type": "reasoning_text", "text": text}
        return [
            ("response.reasoning_text.done", {**place, "text": text}),
            ("response.content_part.done", {**place, "part": part}),
            self._done(status, content=[part]),
        ]

    # ------------------------------------------------------------------------------------------- messages

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output)}

    def _added(self, item: dict[str, Any]) -> Event:
        self._open, self._pieces = item, []
        return "response.output_item.added", {"output_index": len(self.output), "item": dict(item)}

    def _done(self, status: str, **more: Any) -> Event:
        assert self._open is not None
        item = {**self._open, **more, "status": status}
        self._open = None
        self.output.append(item)
        return "response.output_item.done", {"output_index": len(self.output) - 1, "item": item}

    def _open_message(self) -> list[Event]:
        item = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        return [
            self._added(item),
            ("response.content_part.added", {**self._place(), "content_index": 0, "part": _part("")}),
        ]

    def _push_text(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if self._open is None or self._open["type"] != "message":
            events = self._close("completed") + self._open_message()
        self._pieces.append(text)
        place = {**self._place(), "content_index": 0}
        return [*events, ("response.output_text.delta", {**place, "delta": text, "logprobs": []})]

    def _close_message(self, status: str) -> list[Event]:
        text, place = "".join(self._pieces), {**self._place(), "content_index": 0}
        return [
            ("response.output_text.done", {**place, "text": text, "logprobs": []}),
            ("response.content_part.done", {**place, "part": _part(text)}),
            self._done(status, content=[_part(text)]),
        ]

    # ---------------------------------------------------------------------------------------------- calls

    def _push_found(self, found: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in found:
            if isinstance(part, Thought):
                events += self._push_thought(part.text)
            else:
                events += self._push_text(part) if isinstance(part, str) else self._push_call(part)
        return events

    def _push_call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None:
            events = [*self._close("completed"), self._open_call(piece.name)]
        if piece.arguments:
            self._pieces.append(piece.arguments)
            more = {**self._place(), "delta": piece.arguments}
            events.append(("response.function_call_arguments.delta", more))
        return events

    def _open_call(self, name: str) -> Event:
        call = {"id": new_id("fc"), "type": "function_call", "call_id": new_call_id(), "name": name}
        return self._added({**call, "arguments": "", "status": "in_progress"})

    def _close_call(self, status: str) -> list[Event]:
        assert self._open is not None
        arguments, name = "".join(self._pieces), self._open["name"]
        done = {**self._place(), "name": name, "arguments": arguments}
        return [("response.function_call_arguments.done", done), self._done(status, arguments=arguments)]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""The content blocks of Anthropic's Messages API: those of a request as chat messages, those of an answer as it
comes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.server.errors import APIError, bad_request
from draftwise.server.reader import Part
from draftwise.server.reasoning import Thought
from draftwise.server.tool_formats import CallPiece
from draftwise.server.tools import ToolPlan, plan_tools, template_calls

Event = tuple[str, dict[str, Any]]
"""Type and fields."""


def new_message_id(prefix: str = "msg") -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def _bad(what: str) -> APIError:
    return bad_request(f"messages: {what}", "messages")


def chat_messages(
    system: str | Sequence[Any] | None, given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A request's ``system`` and ``messages`` as chat messages. Raises APIError.

    Results of tools are messages of their own. Example: the user's blocks tool_result, tool_result, text are two
    messages of role "tool" and one of role "user". Messages of one role that follow one another are one, as they are
    there.
    """
    out: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by the id of their call
    if system:
        text = system if isinstance(system, str) else _joined(system, "system")
        out.append({"role": "system", "content": [text]})
    for message in given:
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise _bad(f"role is {str(role)[:80]!r}; it must be user or assistant")
        content = message.get("content")
        if isinstance(content, str):
            _add(out, {"role": role, "content": [content]})
        elif not isinstance(content, list):
            raise _bad("content must be text or a list of blocks")
        elif role == "user":
            _add_user(out, content, names)
        else:
            _add(out, _assistant(content, names))
    for message in out:
        message["content"] = "\n".join(message["content"])
    return out


def _add(out: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Contents are lists of texts until all are known: to join each pair would take long where there are many."""
    last = out[-1] if out else {}
    if last.get("role") == message["role"] and last.keys() == message.keys() == {"role", "content"}:
        last["content"] += message["content"]
    else:
        out.append(message)


def _add_user(out: list[dict[str, Any]], blocks: Sequence[Any], names: Mapping[str, str]) -> None:
    texts: list[str] = []
    for block in blocks:
        if _kind(block) != "tool_result":
            texts.append(_block_text(block, "messages"))
            continue
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in names:
            raise _bad(f"no tool_use has the id {str(call_id)[:80]!r}")
        content = block.get("content")
        text = content if isinstance(content, str) else _joined(content or [], "messages")
        result = {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": [text]}
        out.append({**result, "is_error": True} if block.get("is_error") is True else result)
    if texts:
        _add(out, {"role": "user", "content": texts})


def _assistant(blocks: Sequence[Any], names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise _bad("a thinking block needs thinking (text)")
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            continue  # encrypted: it cannot be read here
        elif kind == "tool_use":
            call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
            if (
                not isinstance(call_id, str)
                or not isinstance(name, str)
                or not isinstance(arguments, Mapping)
            ):
                raise _bad("a tool_use needs id and name (text) and input (an object)")
            names[call_id] = name
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            texts.append(_block_text(block, "messages"))
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = template_calls(calls)
    return message


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _joined(blocks: Any, field: str) -> str:
    if not isinstance(blocks, list):
        raise bad_request(f"{field}: expected text or a list of blocks", field)
    return "\n".join(_block_text(block, field) for block in blocks)


def _block_text(block: Any, field: str) -> str:
    """The text of a text block, or of a document that is text. Raises APIError."""
    kind = _kind(block)
    text = None
    if kind == "text":
        text = block.get("text")
    elif kind == "document" and isinstance(block.get("source"), Mapping):
        source = block["source"]
        if source.get("type") != "text":
            kind = f"document ({str(source.get('type'))[:40]})"
        else:
            text = source.get("data")
    else:
        raise bad_request(f"{field}: blocks of type {str(kind)[:80]!r} are not supported, only text", field)
    if not isinstance(text, str):
        raise bad_request(f"{field}: a block of type {kind!r} needs text", field)
    return text


def message_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None
) -> tuple[ToolPlan, bool]:
    """(what `plan_tools` makes of them, whether at most one call is wanted). Raises APIError."""
    functions: list[dict[str, Any]] = []
    for tool in tools or ():
        if tool.get("type", "custom") not in ("custom", None):
            raise bad_request(
                f"tools: type is {str(tool.get('type'))[:80]!r}; only custom is supported", "tools"
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    if choice is None:
        return plan_tools(functions, None), False
    kind, name = choice.get("type"), choice.get("name")
    modes: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    wanted = modes.get(str(kind))
    if kind == "tool" and isinstance(name, str):
        wanted = {"type": "function", "function": {"name": name}}
    elif wanted is None:
        raise bad_request(
            'tool_choice: expected {"type": "auto" | "any" | "none"} or {"type": "tool", "name": ...}',
            "tool_choice",
        )
    return plan_tools(functions, wanted), choice.get("disable_parallel_tool_use") is True


class MessageBlocks:
    """Blocks of one answer. `push` and `finish` return the events that tell of what is new; ``content`` holds the
    blocks that are complete."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []

    def push(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Thought):
                events += self._grow("thinking", "thinking", part.text)
            elif isinstance(part, CallPiece):
                events += self._call(part)
            else:
                events += self._grow("text", "text", part)
        return events

    def finish(self) -> list[Event]:
        """The answer ended."""
        if self._open is None:
            return []
        block, text = self._open, "".join(self._pieces)
        index = len(self.content)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        self.content.append(block)
        self._open, self._pieces = None, []
        return [("content_block_stop", {"index": index})]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        ended = self.finish()
        self._open = block
        return [*ended, ("content_block_start", {"index": len(self.content), "content_block": dict(block)})]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": len(self.content), "delta": delta}

    def _grow(self, kind: str, field: str, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            events = self._begin({"type": kind, field: "", **more})
        self._pieces.append(text)
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.name is not None:
            block = {"type": "tool_use", "id": new_message_id("toolu"), "name": piece.name, "input": {}}
            events = self._begin(block)
        if piece.arguments:
            self._pieces.append(piece.arguments)
            events.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))
        return events


def _object(text: str) -> Any:
    """Arguments of a call, which have to be an object; what is none, or was cut short, is told as it stands."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}

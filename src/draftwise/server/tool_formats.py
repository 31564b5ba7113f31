"""Finding tool calls in a model's text: one parser per form in which models write them.

A parser takes the text in pieces and passes on what is certain: text at once, except for what may be the beginning of a
call, and a call when it is complete. What does not parse stays text. Names are those of vLLM's ``--tool-call-parser``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from draftwise.errors import ConfigError, suggest

Call = tuple[str, Any]
"""Name and arguments."""
Found = tuple[str, list[Call]]
"""Text and calls, both of which are certain."""


class ToolParser(ABC):
    """Of one answer. ``only_one``: later calls are dropped."""

    special_tokens: ClassVar[bool] = False
    """Whether the marks are special tokens, which must then be in the text."""

    def __init__(self, *, only_one: bool = False) -> None:
        self._held = ""
        self._only_one = only_one
        self.num_calls = 0

    @abstractmethod
    def push(self, piece: str) -> Found:
        """The next piece of text."""

    @abstractmethod
    def finish(self) -> Found:
        """The text ended: what was held back is a call that lacks only its end mark, or text."""

    def _take(self, call: Call) -> list[Call]:
        if self._only_one and self.num_calls:
            return []
        self.num_calls += 1
        return [call]


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several in a row: Hermes, Qwen and others.

    White space around calls is dropped. Example: "Hi <tool", "_call>{...}</tool_call>" gives "Hi", then one call.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, *, only_one: bool = False) -> None:
        super().__init__(only_one=only_one)
        self._inside = False

    def push(self, piece: str) -> Found:
        self._held += piece
        text, calls = "", []
        while True:
            if not self._inside:
                before, found, self._held = _until(self._held, self.OPEN)
                text += before
                if not found:
                    break
                self._inside = True
            at = self._held.find(self.CLOSE)
            if at < 0:
                break
            inner, self._held = self._held[:at], self._held[at + len(self.CLOSE) :].lstrip()
            self._inside = False
            call = _call(_json(inner))
            if call is None:
                text += self.OPEN + inner + self.CLOSE
            else:
                calls += self._take(call)
        return text, calls

    def finish(self) -> Found:
        held, self._held = self._held, ""
        if not self._inside:
            return ("" if self.num_calls and not held.strip() else held), []
        call = _call(_json(held))
        return (self.OPEN + held, []) if call is None else ("", self._take(call))


class Llama3JsonParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several divided by ``;``: Llama 3.1 and later.

    ``<|python_tag|>`` may stand before it. An answer that begins in another way is text to its end, and so is what
    follows an object that is no call.
    """

    TAG = "<|python_tag|>"

    def __init__(self, *, only_one: bool = False) -> None:
        super().__init__(only_one=only_one)
        self._text = False
        self._scan = JsonEnd()

    def push(self, piece: str) -> Found:
        self._held += piece
        calls: list[Call] = []
        while not self._text:
            start = self._start()
            if start is None:
                return "", calls
            if start < 0:
                self._text = True
                break
            end = self._scan.find(self._held, start)
            if end is None:
                return "", calls
            call = _call(_json(self._held[start:end]))
            if call is None:
                self._text = True
                break
            calls += self._take(call)
            self._held = self._held[end:]
            self._scan = JsonEnd()
        text, self._held = self._held, ""
        return text, calls

    def _start(self) -> int | None:
        """Where an object begins; None: not known yet; -1: it is text."""
        # Between calls there are semicolons; before the first there are none.
        skipped = " \n\r\t;" if self.num_calls else " \n\r\t"
        rest = self._held.lstrip(skipped)
        if self.TAG.startswith(rest):
            return None  # nothing at all, or a part of the tag
        rest = rest.removeprefix(self.TAG).lstrip(skipped)
        if not rest:
            return None
        return len(self._held) - len(rest) if rest[0] == "{" else -1

    def finish(self) -> Found:
        held, self._held = self._held, ""
        return ("" if self.num_calls and not held.strip(" \n\r\t;") else held), []


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or, from the 11th tokenizer on,
    ``[TOOL_CALLS]name{...}`` with ``[CALL_ID]id`` and ``[ARGS]`` between name and arguments, once per call."""

    special_tokens = True
    MARK, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def __init__(self, *, only_one: bool = False) -> None:
        super().__init__(only_one=only_one)
        self._inside = False
        self._scan = JsonEnd()
        self._start = -1

    def push(self, piece: str) -> Found:
        self._held += piece
        text, calls = "", []
        while True:
            if not self._inside:
                before, found, self._held = _until(self._held, self.MARK)
                text += before
                if not found:
                    break
                self._inside, self._start, self._scan = True, -1, JsonEnd()
            if self._start < 0:
                self._start = self._json_start()
                if self._start < 0:
                    break
            end = self._scan.find(self._held, self._start)
            if end is None:
                break
            found_calls = self._calls(self._held[: self._start], self._held[self._start : end])
            if found_calls is None:
                text += self.MARK + self._held[:end]
                self._held = self._held[end:]
            else:
                for call in found_calls:
                    calls += self._take(call)
                self._held = self._held[end:].lstrip()
            self._inside = False
        return text, calls

    def _json_start(self) -> int:
        """Where the list or the arguments begin, -1 if that has not come yet.

        Example: ``get_time[ARGS]{"a": 1}`` begins at the brace; the brackets of the marks begin nothing.
        """
        stripped = self._held.lstrip()
        if stripped.startswith("["):
            return len(self._held) - len(stripped)
        return self._held.find("{")

    def _calls(self, before: str, value: str) -> list[Call] | None:
        parsed = _json(value)
        name = before.replace(self.ARGS, "").partition(self.ID)[0].strip()
        if name:
            return [(name, parsed)] if isinstance(parsed, dict) else None
        items = parsed if isinstance(parsed, list) else [parsed]
        calls = [call for item in items if (call := _call(item)) is not None]
        return calls if calls and len(calls) == len(items) else None

    def finish(self) -> Found:
        held, self._held = self._held, ""
        if self._inside:
            return self.MARK + held, []
        return ("" if self.num_calls and not held.strip() else held), []


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "mistral": MistralParser,
}


def parser_class(name: str) -> type[ToolParser]:
    """Raises ConfigError for a name that is not there."""
    if name not in PARSERS:
        names = ", ".join(PARSERS)
        raise ConfigError(f"tool_call_parser: expected one of {names}, got {name!r}{suggest(name, PARSERS)}")
    return PARSERS[name]


class JsonEnd:
    """Finds the end of a JSON object or list in a text that grows. Every character is looked at once."""

    def __init__(self) -> None:
        self._at = -1
        self._depth = 0
        self._string = self._escaped = False

    def find(self, text: str, start: int) -> int | None:
        """The index behind the value that begins at ``start``; None: it has not ended. ``text`` may be longer at the
        next call, and ``start`` is the same.

        Example: in ``{"a": "}"} x`` it is 10: the brace in the string counts for nothing.
        """
        at = max(self._at, start)
        while at < len(text):
            char = text[at]
            at += 1
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped = char == "\\"
                self._string = char != '"'
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at
        self._at = at
        return None


def _until(held: str, mark: str) -> tuple[str, bool, str]:
    """(text before the mark, whether the mark is there, what is left to look at).

    Without the mark, its possible beginning at the end is left, and white space before that; with it, white space
    before it is dropped.
    """
    at = held.find(mark)
    if at >= 0:
        return held[:at].rstrip(), True, held[at + len(mark) :]
    length = next((n for n in range(min(len(mark) - 1, len(held)), 0, -1) if mark.startswith(held[-n:])), 0)
    cut = len(held[: len(held) - length].rstrip())
    return held[:cut], False, held[cut:]


def _json(text: str) -> Any:
    """The value; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], value.get("arguments", value.get("parameters", {}))

"""Reading a tool call that grows: its name first, then its arguments as they come."""

from __future__ import annotations

import json
from typing import Any

_SCALAR = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.")
_SPACE = frozenset(" \n\r\t")
_ARGUMENTS = ("arguments", "parameters")


class JsonScan:
    """Follows the structure of a JSON object or list in a text that grows. Every character is looked at once.

    ``end``: index behind the value, None while it has not ended; ``broken``: index of a character that no JSON has
    there. It sees brackets, strings and what may stand outside of them, not every mistake.
    """

    def __init__(self) -> None:
        self.end: int | None = None
        self.broken: int | None = None
        self._at = 0
        self._depth = 0
        self._string = self._escaped = False

    def scan(self, text: str) -> None:
        """``text``: the value from its first character, and perhaps more; longer at the next call.

        Example: in ``{"a": "}"} x`` the end is 10: the brace in the string counts for nothing.
        """
        at = self._at
        while at < len(text) and self.end is None and self.broken is None:
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._string:
                if char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
                    self._closed(text, at + 1, self._depth)
            elif char == '"':
                self._string = True
                self._opened(char, at, self._depth)
            elif char in "{[":
                self._opened(char, at, self._depth)
                self._depth += 1
            elif char in "}]":
                self._marked(text, at, char)
                self._depth -= 1
                if self._depth == 0:
                    self.end = at + 1
                else:
                    self._closed(text, at + 1, self._depth)
            elif char in ",:":
                self._marked(text, at, char)
            elif char in _SCALAR:
                self._opened(char, at, self._depth)
            elif char not in _SPACE:
                self.broken = at
            at += 1
        self._at = at

    # What a subclass may want to know, of values at some depth.

    def _opened(self, char: str, at: int, depth: int) -> None:
        """A value, or a further character of a number or word, begins at ``at``."""

    def _closed(self, text: str, end: int, depth: int) -> None:
        """A string, list or object ended."""

    def _marked(self, text: str, at: int, char: str) -> None:
        """A comma, colon or closing bracket stands at ``at``, inside the bracket that it closes."""


class CallReader(JsonScan):
    """Reads ``{"name": ..., "arguments": {...}}`` (or "parameters"), or, if the name is given, the arguments alone.

    A call is ``certain`` when its name is known and the first key of its arguments has begun; from then on all that
    follows is its arguments, whether it is good JSON or not. ``over``: nothing more is read; what was read is a call if
    it is certain, and else text.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.raw = ""  # what was read and, of a certain call, not passed on
        self.name = name
        self.certain = False
        self.over = False
        self._alone = name is not None
        self._from: int | None = 0 if self._alone else None  # where the arguments begin
        self._to: int | None = None
        self._sent = 0  # of the arguments, index in `raw`
        self._key: str | None = None
        self._expects = "key"  # at depth 1: key, colon, value, comma
        self._value = 0

    def push(self, text: str) -> tuple[str, str]:
        """(more of the arguments, what stands behind the call)."""
        if self.over:
            return "", text
        self.raw += text
        self.scan(self.raw)
        stop = self.broken if self.broken is not None else self.end
        rest = ""
        if stop is not None:
            self.over = True
            self.raw, rest = self.raw[:stop], self.raw[stop:]
        if self._alone and self.end is not None:
            self._to = self.end
        return self._news(), rest

    def finish(self) -> str:
        """The text ended: more of the arguments, if it is a call."""
        self.over = True
        return self._news()

    def _news(self) -> str:
        whole = self.end is not None
        if self.name is not None and not self.certain:
            if self._from is None:
                self.certain = whole  # a call without arguments
                return "{}" if whole else ""
            inner = self.raw[self._from : self._to]
            if inner[:1] == "{" and inner[1:].lstrip()[:1] in ('"', "}") and inner[1:].strip():
                self.certain = True
                self._sent = self._from
            elif (
                whole and not self._alone
            ):  # arguments that are no object: as they stand, texts without quotes
                self.certain = True
                self._sent = len(self.raw)
                value = _json(inner)
                return value if isinstance(value, str) else inner
        if not self.certain or self._from is None or self._sent >= len(self.raw):
            return ""
        piece = self.raw[self._sent : self._to]
        self._sent = len(self.raw)
        if not self.over:
            self._forget()
        return piece

    def _forget(self) -> None:
        """Let go of what was passed on: keeping it would cost more with every piece."""
        count = len(self.raw)
        self.raw, self._sent = "", 0
        self._at -= count
        self._value -= count
        assert self._from is not None
        self._from -= count
        if self._to is not None:
            self._to = 0  # what follows belongs to the call, but not to its arguments

    # ------------------------------------------------------------------------------------ members of depth 1

    def _opened(self, char: str, at: int, depth: int) -> None:
        if self._alone or depth != 1:
            return
        if self._expects == "key" and char == '"':
            self._value = at
        elif self._expects == "value":
            self._expects = "comma"
            self._value = at
            if self._key in _ARGUMENTS and self._from is None:
                self._from = at
        elif self._expects != "comma" or char not in _SCALAR:
            self.broken = at

    def _closed(self, text: str, end: int, depth: int) -> None:
        if self._alone or depth != 1:
            return
        if self._expects == "key":
            self._key = _json(text[self._value : end])
            self._expects = "colon"
        else:
            self._ended(text, end)

    def _marked(self, text: str, at: int, char: str) -> None:
        if self._alone or self._depth != 1:
            return
        if char == ":":
            self._expects = "value"
        else:
            if self._expects == "comma":
                self._ended(text, at)
            self._expects = "key"

    def _ended(self, text: str, end: int) -> None:
        """A member's value ended; of numbers and words that shows only behind them."""
        if self._key == "name" and self.name is None:
            value = _json(text[self._value : end])
            self.name = value if isinstance(value, str) else None
        elif self._key in _ARGUMENTS and self._from == self._value and self._to is None:
            self._to = end
        self._key = None


def _json(text: str) -> Any:
    """The value; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

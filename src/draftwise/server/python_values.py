"""Python's literals as JSON: arguments of calls that a model writes as Python (`tool_pythonic`)."""

from __future__ import annotations

import json
import math
import unicodedata

import regex

QUOTES = ("'", '"')

_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"',
    "\n": "",
}  # fmt: skip
_ESCAPE = regex.compile(
    r"\\(?:(?P<octal>[0-7]{1,3}+)|x(?P<hex>[0-9a-fA-F]{2})|u(?P<hex>[0-9a-fA-F]{4})|U(?P<hex>[0-9a-fA-F]{8})"
    r"|N\{(?P<name>[^{}\\]{1,80}+)\}|(?P<other>[^0-7xuUN]))",
    regex.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_TOKEN = regex.compile(
    r"\s*+(?:(?P<word>[^\W\d]\w*+)|(?P<number>[-+]?+[\d.][\w.]*+(?:(?<=[eE])[-+]\d++)?)|(?P<mark>.))"
)
_CLOSES = {"]": "]", ")": "]", "}": "}"}


class StringReader:
    """Turns a Python string that grows into the inside of a JSON string.

    Example: ``'it\\'s`` then ``\\x41"'`` gives ``it's`` and ``A\\"``; then it is ``over``.
    """

    def __init__(self) -> None:
        self.over = False
        self._quote: str | None = None

    def push(self, held: str) -> tuple[str, str]:
        """(more of the JSON text, what is left to look at). ``held``: what was left, and more; not empty."""
        if self._quote is None:
            first = held[0]
            if len(held) < 3 and held == first * len(held):
                return "", held  # '' is an empty string, or the beginning of '''
            self._quote = first * 3 if held.startswith(first * 3) else first
            held = held[len(self._quote) :]
        out: list[str] = []
        while held:
            quote, slash = held.find(self._quote), held.find("\\")
            if quote >= 0 and not 0 <= slash < quote:
                out.append(_inside(held[:quote]))
                self.over = True
                return "".join(out), held[quote + len(self._quote) :]
            if slash < 0:  # one or two quotes at the end may be the beginning of three
                kept = len(held) - len(held.rstrip(self._quote[0])) if len(self._quote) == 3 else 0
                out.append(_inside(held[: len(held) - kept]))
                return "".join(out), held[len(held) - kept :]
            out.append(_inside(held[:slash]))
            held = held[slash:]
            text, length = _unescaped(held)
            if not length:
                break
            out.append(_inside(text))
            held = held[length:]
        return "".join(out), held


def _unescaped(held: str) -> tuple[str, int]:
    """The value of the escape at the front, and its length; 0: more text is needed. An unknown one stays as it is."""
    match = _ESCAPE.match(held, partial=True)
    if match is None or match.partial:
        return ("", 0) if match is not None else (held[:2], 2)
    octal, name, other = match["octal"], match["name"], match["other"]
    if octal is not None:
        if len(octal) < 3 and match.end() == len(held):
            return "", 0
        return chr(int(octal, 8)), match.end()
    if name is not None:
        try:
            return unicodedata.lookup(name), match.end()
        except KeyError:
            return match[0], match.end()
    if other is not None:
        return _ESCAPES.get(other, match[0]), match.end()
    code = int(match["hex"], 16)
    return (chr(code) if code < 0x110000 else match[0]), match.end()


def _inside(text: str) -> str:
    """The inside of a JSON string. Half a pair of UTF-16 has no bytes of its own and stays escaped."""
    whole = json.dumps(text, ensure_ascii=any("\ud800" <= char <= "\udfff" for char in text))
    return whole[1:-1]


class ValueEnd:
    """Finds where a value ends that is not a string: at a comma or a bracket that it did not open.

    Example: ``[1, ")"]), x`` ends at index 8. Every character is looked at once.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int:
        """The index of the end in the next piece of text, -1: it goes on."""
        for at, char in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in QUOTES:
                self._quote = char
            elif char in "[({":
                self._depth += 1
            elif char in "])}":
                if self._depth == 0:
                    return at
                self._depth -= 1
            elif char == "," and self._depth == 0:
                return at
        return -1


def json_of(literal: str) -> str:
    """A Python literal as JSON; what is none, or what JSON does not have (sets, infinite numbers), as a text.

    Example: ``{'a': (1, None,), "b": .5}`` gives ``{"a": [1, null], "b": 0.5}``; ``Oslo`` gives ``"Oslo"``.
    """
    try:
        found = _translated(literal)
        json.loads(found)
    except (ValueError, RecursionError):
        return json.dumps(literal.strip(), ensure_ascii=False)
    return found


def _translated(literal: str) -> str:
    out: list[str] = []
    held = literal.strip()
    while held:
        if held[0] in QUOTES:
            reader = StringReader()
            inside, held = reader.push(held + "\n")  # '' is not the beginning of '''
            if not reader.over:
                raise ValueError("a text without an end")
            out.append(f'"{inside}"')
            held = held.strip()
            continue
        match = _TOKEN.match(held)
        held = held[match.end() :].lstrip()
        if match["word"] is not None:
            if match["word"] not in _WORDS:
                raise ValueError("a name")
            out.append(_WORDS[match["word"]])
        elif match["number"] is not None:
            out.append(_number(match["number"]))
        else:
            mark = match["mark"]
            if mark in _CLOSES and out and out[-1] == ", ":
                out.pop()
            out.append({"(": "[", ",": ", ", ":": ": ", **_CLOSES}.get(mark, mark))
    return "".join(out)


def _number(text: str) -> str:
    """Raises ValueError for what is not a finite number."""
    try:
        return str(int(text, 0))
    except ValueError:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return json.dumps(value)

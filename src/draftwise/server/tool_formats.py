"""Finds tool calls in a model's text: one parser per form in which models write them.

A parser takes the text in pieces and passes on what is certain: text at once, except for what may be the beginning of a
call, and calls as they grow. What is no call stays text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from draftwise.server.call_reader import CallReader
from draftwise.server.marks import until


class CallPiece(NamedTuple):
    """More of call number ``call``. ``name``: of a call that begins; ``arguments``: what is new of its JSON text."""

    call: int
    name: str | None
    arguments: str


Found = list[str | CallPiece]
"""Text and calls in their order, all of them certain."""


class ToolParser(ABC):
    """The parser of one answer. ``only_one``: later calls are dropped."""

    special_tokens: ClassVar[bool] = False
    """Whether the marks are special tokens, which must then be in the text."""

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        """``schemas``: of the arguments, by the name of the function; for forms that do not say what is text."""
        self._held = ""
        self._only_one = only_one
        self._schemas = schemas or {}
        self._begun = 0  # calls, dropped ones included
        self._reader: CallReader | None = None

    @property
    def num_calls(self) -> int:
        return min(self._begun, 1) if self._only_one else self._begun

    @abstractmethod
    def push(self, piece: str) -> Found:
        """The next piece of text."""

    @abstractmethod
    def finish(self) -> Found:
        """The text ended: what was held back is a call that lacks only its end, or text."""

    def _read(self, out: Found) -> None:
        """Give held text to the reader, and add what it finds to ``out``."""
        assert self._reader is not None
        known = self._reader.certain
        arguments, self._held = self._reader.push(self._held)
        self._tell(self._reader, known, arguments, out)

    def _end(self, out: Found) -> bool:
        """The text ended while a call was read; whether it is one."""
        assert self._reader is not None
        known = self._reader.certain
        self._tell(self._reader, known, self._reader.finish(), out)
        return self._reader.certain

    def _tell(self, reader: CallReader, known: bool, arguments: str, out: Found) -> None:
        if not reader.certain:
            return
        name = None
        if not known:
            self._begun += 1
            name = reader.name
        if (name is not None or arguments) and not (self._only_one and self._begun > 1):
            out.append(CallPiece(self._begun - 1, name, arguments))


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several in a row: Hermes, Qwen and others.

    White space around calls is dropped. Example: "Hi <tool", '_call>{"name": "f", "arguments": {"a"', ": 1}}" gives
    "Hi", then the call f with '{"a"', then ': 1}'.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._inside = False  # behind the mark
        self._space = ""  # between the mark and the call
        self._behind = False  # a call ended, and nothing but white space came since

    def push(self, piece: str) -> Found:
        self._held += piece
        out: Found = []
        while True:
            if not self._inside:
                if self._behind:
                    self._held = self._held.lstrip()
                    self._behind = not self._held
                before, found, self._held = until(self._held, (self.OPEN,))
                say(out, before)
                if found is None:
                    break
                self._inside, self._space = True, ""
            if self._reader is None:
                stripped = self._held.lstrip()
                self._space += self._held[: len(self._held) - len(stripped)]
                self._held = stripped
                if not stripped:
                    break
                if stripped[0] != "{":
                    say(out, self.OPEN + self._space)
                    self._inside = False
                    continue
                self._reader = CallReader()
            self._read(out)
            if not self._reader.over:
                break
            if not self._reader.certain:
                say(out, self.OPEN + self._space + self._reader.raw)
                self._reader, self._inside = None, False
                continue
            if not self._closed():
                break
            self._reader, self._inside, self._behind = None, False, True
        return out

    def _closed(self) -> bool:
        """Whether the end mark, or what shows that there is none, has come."""
        assert self._reader is not None
        if self._reader.broken is not None:  # up to the mark it is no text either
            at = self._held.find(self.CLOSE)
            if at < 0:
                self._held = self._held[-len(self.CLOSE) + 1 :]
                return False
            self._held = self._held[at:]
        stripped = self._held.lstrip()
        if self.CLOSE.startswith(stripped) and stripped != self.CLOSE:
            return False
        self._held = stripped.removeprefix(self.CLOSE)
        return True

    def finish(self) -> Found:
        out: Found = []
        held, self._held = self._held, ""
        if self._reader is not None:
            if not self._end(out):
                say(out, self.OPEN + self._space + self._reader.raw)
        elif self._inside:
            say(out, self.OPEN + self._space + held)
        elif not self._begun or held.strip():
            say(out, held)
        return out


class Llama3JsonParser(ToolParser):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several divided by ``;``: Llama 3.1 and later.

    ``<|python_tag|>`` may stand before it. An answer that begins in another way is text to its end, and so is what
    follows an object that is no call.
    """

    TAG = "<|python_tag|>"

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._text = False
        self._before = ""  # what stands before the object that is read

    def push(self, piece: str) -> Found:
        self._held += piece
        out: Found = []
        while not self._text:
            if self._reader is None:
                start = self._start()
                if start is None:
                    return out
                if start < 0:
                    self._text = True
                    break
                self._before, self._held = self._held[:start], self._held[start:]
                self._reader = CallReader()
            self._read(out)
            if not self._reader.over:
                return out
            if not self._reader.certain:
                self._held = self._before + self._reader.raw + self._held
                self._text = True
            elif self._reader.broken is not None:
                self._text = True
            self._reader = None
        say(out, self._held)
        self._held = ""
        return out

    def _start(self) -> int | None:
        """Where an object begins; None: not known yet; -1: it is text."""
        # Between calls there are semicolons; before the first there are none.
        skipped = " \n\r\t;" if self._begun else " \n\r\t"
        rest = self._held.lstrip(skipped)
        if self.TAG.startswith(rest):
            return None  # nothing at all, or a part of the tag
        rest = rest.removeprefix(self.TAG).lstrip(skipped)
        if not rest:
            return None
        return len(self._held) - len(rest) if rest[0] == "{" else -1

    def finish(self) -> Found:
        out: Found = []
        held, self._held = self._held, ""
        if self._reader is not None:
            if not self._end(out):
                say(out, self._before + self._reader.raw)
        elif not self._begun or held.strip(" \n\r\t;"):
            say(out, held)
        return out


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or, from the 11th tokenizer on,
    ``[TOOL_CALLS]name{...}`` with ``[CALL_ID]id`` and ``[ARGS]`` between name and arguments, once per call."""

    special_tokens = True
    MARK: ClassVar[str] = "[TOOL_CALLS]"
    ARGS, ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._inside = False  # behind the mark
        self._list = False  # in a list of calls
        self._behind = False  # a call ended, and nothing but white space came since
        self._before = ""  # what stands between the mark, or the call before, and the call that is read

    def push(self, piece: str) -> Found:
        self._held += piece
        out: Found = []
        while True:
            if self._behind:
                self._held = self._held.lstrip()
                self._behind = not self._held
            if not self._inside:
                before, found, self._held = until(self._held, (self.MARK,))
                say(out, before)
                if found is None:
                    break
                self._inside, self._list, self._before = True, False, self.MARK
            if self._reader is None:
                begins = self._begin()
                if begins is None:
                    break
                if not begins:  # the list ended, or this is none
                    say(out, self._before)
                    self._before, self._inside = "", False
                    continue
            self._read(out)
            assert self._reader is not None
            if not self._reader.over:
                break
            if not self._reader.certain:
                say(out, self._before + self._reader.raw)
            self._behind = self._reader.certain
            self._inside = self._list and self._reader.certain and self._reader.broken is None
            self._reader, self._before = None, ""
        return out

    def _begin(self) -> bool | None:
        """Begin to read a call; None: it has not come yet; False: there is none, and ``_before`` is text.

        Example: ``get_time[ARGS]{"a": 1}`` begins at the brace; the brackets of the marks begin nothing.
        """
        if not self._list and self._held.lstrip().startswith("["):
            self._list = True
            self._shift(self._held.index("[") + 1)
        if self._list:
            rest = self._held.lstrip(" \n\r\t,")
            if not rest:
                return None
            self._shift(len(self._held) - len(rest) + (rest[0] == "]"))
            if rest[0] == "]" and self._before[:1] != "[":
                self._before = ""
            if rest[0] != "{":
                return False
            self._reader = CallReader()
            return True
        at = self._held.find("{")
        if at < 0:
            return None
        name = self._held[:at].replace(self.ARGS, "").partition(self.ID)[0].strip()
        self._shift(at)
        self._reader = CallReader(name or None)
        return True

    def _shift(self, count: int) -> None:
        self._before += self._held[:count]
        self._held = self._held[count:]

    def finish(self) -> Found:
        out: Found = []
        held, self._held = self._held, ""
        if self._reader is not None:
            if not self._end(out):
                say(out, self._before + self._reader.raw)
        elif self._inside and self._before:
            say(out, self._before + held)
        elif not self._begun or held.strip():
            say(out, held)
        return out


class ForcedParser(ToolParser):
    """The whole text is a call: its arguments if the ``name`` is given, else ``{"name": ..., "arguments": ...}``.

    Cut short before its name is known it is a call without a name, with what there is as its arguments.
    """

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name
        if name is None:
            self._reader = CallReader()

    def push(self, piece: str) -> Found:
        out: Found = []
        if self._reader is not None:
            self._held += piece
            self._read(out)
        elif piece:
            out.append(CallPiece(0, None if self._begun else self._name, piece))
            self._begun = 1
        return out

    def finish(self) -> Found:
        out: Found = []
        if self._reader is not None:
            self._end(out)
        if not self._begun:
            raw = "" if self._reader is None else self._reader.raw
            out.append(CallPiece(0, self._name or "", raw))
            self._begun = 1
        return out


def say(out: Found, text: str) -> None:
    """Pass on text, if there is any."""
    if text:
        out.append(text)

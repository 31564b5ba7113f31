"""Tool calls with their name and JSON between marks: DeepSeek, Kimi, GPT-OSS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from draftwise.server.call_reader import CallReader
from draftwise.server.marks import until
from draftwise.server.tool_formats import Found, ToolParser, say

_LONGEST_HEAD = 512
"""Characters between the mark of a call and its arguments."""


class SectionParser(ToolParser):
    """``CALL head SEP {...} END``, several in a row, perhaps between ``OPEN`` and ``CLOSE``.

    A head that has no ``SEP`` before its first brace, or no name, begins no call: it stays text.
    """

    special_tokens = True
    OPEN: ClassVar[str | None] = None
    CLOSE: ClassVar[str | None] = None
    CALL: ClassVar[str]
    SEP: ClassVar[str]
    ENDS: ClassVar[tuple[str, ...]]

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._part = "text"  # text, section (behind OPEN), head (behind CALL), call (its arguments), behind
        self._before = (
            ""  # what stands between the text and the arguments, to be given back if there is no call
        )
        self._begins = tuple(mark for mark in (self.OPEN, self.CALL) if mark)
        self._follows = tuple(mark for mark in (*self.ENDS, self.CLOSE) if mark)

    def name_of(self, head: str) -> str:
        """The function's name; empty: there is none."""
        return head.partition(self.SEP)[0].strip()

    def push(self, piece: str) -> Found:
        self._held += piece
        out: Found = []
        while getattr(self, f"_in_{self._part}")(out):
            pass
        return out

    # Each of these reads on in its part, and says whether another one can go on.

    def _in_text(self, out: Found) -> bool:
        before, mark, self._held = until(self._held, self._begins)
        say(out, before)
        if mark is None:
            return False
        self._before = mark
        self._part = "head" if mark == self.CALL else "section"
        return True

    def _in_section(self, out: Found) -> bool:
        held = self._held.lstrip()
        if held.startswith(self.CALL):
            self._before += self._held[: len(self._held) - len(held)] + self.CALL
            self._held, self._part = held[len(self.CALL) :], "head"
            return True
        return False if self.CALL.startswith(held) else self._no_call(out)

    def _in_head(self, out: Found) -> bool:
        at = self._held.find("{")
        head = self._held if at < 0 else self._held[:at]
        if len(head) > _LONGEST_HEAD:
            return self._no_call(out)
        # Another call, or what stands behind one, shows that this is none, whether a brace has come or not.
        if any(mark in head for mark in (self.CALL, *self._follows)):
            return self._no_call(out)
        if at < 0:
            return False
        name = self.name_of(head) if self.SEP in head else ""
        if not name:
            return self._no_call(out)
        self._before += head
        self._held, self._part = self._held[at:], "call"
        self._reader = CallReader(name)
        return True

    def _no_call(self, out: Found) -> bool:
        """Treat the text read so far as text, not as a call."""
        say(out, self._before)
        self._before, self._part = "", "text"
        return True

    def _in_call(self, out: Found) -> bool:
        self._read(out)
        assert self._reader is not None
        if not self._reader.over:
            return False
        if not self._reader.certain:
            say(out, self._before + self._reader.raw)
        self._part = "behind" if self._reader.certain else "text"
        self._reader, self._before = None, ""
        return True

    def _in_behind(self, out: Found) -> bool:
        """Drop the ends of calls and sections, white space, and the end of a code block."""
        held = self._held = self._held.lstrip(" \r\n\t`")
        for mark in self._follows:
            if held.startswith(mark):
                self._held = held[len(mark) :]
                return True
        if not held or any(mark.startswith(held) for mark in (*self._follows, *self._begins)):
            return False
        self._part = "text"
        return True

    def finish(self) -> Found:
        out: Found = []
        held, self._held = self._held, ""
        if self._reader is not None:
            if not self._end(out):
                say(out, self._before + self._reader.raw)
        elif self._part in ("section", "head"):
            say(out, self._before + held)
        elif self._part == "text" and (not self._begun or held.strip()):
            say(out, held)
        return out


class DeepSeekParser(SectionParser):
    """V3 and R1: ``type<sep>NAME``, then the arguments in a code block; V3.1 and later: ``NAME<sep>{...}``."""

    OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    ENDS = ("<｜tool▁call▁end｜>",)

    def name_of(self, head: str) -> str:
        first, _, second = head.partition(self.SEP)
        second = re.sub(r"```(json)?\s*$", "", second).strip()
        return second or first.strip()


class KimiParser(SectionParser):
    """Kimi K2: ``functions.NAME:0``, the number counts the calls."""

    OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, SEP = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    ENDS = ("<|tool_call_end|>",)

    def name_of(self, head: str) -> str:
        name = re.sub(r":\d+$", "", super().name_of(head))
        return name.removeprefix("functions.")


class HarmonyParser(SectionParser):
    """GPT-OSS: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``."""

    CALL, SEP = "<|channel|>commentary to=", "<|message|>"
    ENDS = ("<|call|>", "<|end|>", "<|start|>assistant")

    def name_of(self, head: str) -> str:
        words = super().name_of(head).replace("<", " ").split()
        return words[0].removeprefix("functions.") if words else ""

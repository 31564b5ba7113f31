"""Tool calls written as Python: Llama 4, ToolACE, Olmo 3.

Clients want JSON. An argument that is a string goes on as it comes; of any other value the end is waited for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import regex

from draftwise.server.marks import until
from draftwise.server.python_values import QUOTES, StringReader, ValueEnd, json_of
from draftwise.server.tool_formats import CallPiece, Found, ToolParser, say

_LONGEST_HEAD = 1024
"""Characters that are looked at again and again until a call has begun."""

# name( with the first argument's name or the closing bracket behind it: prose such as "f(x)" begins no call.
_CALL = r"\s*+([^\W\d][\w.\-]*+)\s*+\((?=\s*+(?:[^\W\d]\w*+\s*+=|\)))"


class PythonicParser(ToolParser):
    """``[get_weather(city='Oslo', days=3), get_time()]`` as the whole answer: Llama 4, ToolACE and others.

    ``<|python_start|>`` and ``<|python_end|>`` may stand around it. An answer that begins in another way is text to
    its end. Arguments without names are not taken.
    """

    FIRST: ClassVar[Any] = regex.compile(r"\s*+(?:<\|python_start\|>\s*+)?\[" + _CALL)
    NEXT: ClassVar[Any] = regex.compile(r"\s*+," + _CALL)
    END: ClassVar[Any] = regex.compile(r"\s*+,?\s*+\]")
    CLOSE: ClassVar[str] = "<|python_end|>"
    """May follow the end."""
    KEY = regex.compile(r"\s*+,?\s*+([^\W\d]\w*+)\s*+=\s*+(?=\S)")
    LAST = regex.compile(r"\s*+,?\s*+\)")

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._part = "start"  # start, members, string, value, between, behind, after, text
        self._separator = ""
        self._string = StringReader()
        self._value: list[str] = []
        self._ends = ValueEnd()

    def push(self, piece: str) -> Found:
        self._held += piece
        out: Found = []
        while self._held and getattr(self, f"_in_{self._part}")(out):
            pass
        return out

    def _match(self, *patterns: Any) -> tuple[Any, Any]:
        """(pattern, match) of the first that matches; (None, True): one of them may yet; (None, None): none does."""
        waits = False
        for pattern in patterns:
            found = pattern.match(self._held, endpos=_LONGEST_HEAD, partial=True)
            if found is not None and not found.partial:
                self._held = self._held[found.end() :]
                return pattern, found
            waits = waits or found is not None
        return None, True if waits and len(self._held) <= _LONGEST_HEAD else None

    def _tell_arguments(self, out: Found, arguments: str, name: str | None = None) -> None:
        if not (self._only_one and self._begun > 1):
            out.append(CallPiece(self._begun - 1, name, arguments))

    def _open_call(self, name: str, out: Found) -> None:
        self._begun += 1
        self._tell_arguments(out, "{", name)
        self._part, self._separator = "members", ""

    def _in_start(self, out: Found) -> bool:
        pattern, match = self._match(self.FIRST)
        if pattern is None:
            if match is None:
                self._part = "text"
            return match is None
        self._open_call(match[1], out)
        return True

    def _in_members(self, out: Found) -> bool:
        pattern, match = self._match(self.KEY, self.LAST)
        if pattern is None:
            if match is None:  # neither: the call ends here, and what follows is text
                self._tell_arguments(out, "}")
                self._part = "text"
            return match is None
        if pattern is self.LAST:
            self._tell_arguments(out, "}")
            self._part = "between"
            return True
        is_string = self._held[0] in QUOTES
        key = json.dumps(match[1], ensure_ascii=False)
        self._tell_arguments(out, f"{self._separator}{key}: " + ('"' if is_string else ""))
        self._separator = ", "
        if is_string:
            self._part, self._string = "string", StringReader()
        else:
            self._part, self._value, self._ends = "value", [], ValueEnd()
        return True

    def _in_string(self, out: Found) -> bool:
        more, self._held = self._string.push(self._held)
        if self._string.over:
            more, self._part = more + '"', "members"
        if more:
            self._tell_arguments(out, more)
        return self._string.over

    def _in_value(self, out: Found) -> bool:
        at = self._ends.find(self._held)
        cut = at if at >= 0 else len(self._held)
        self._value.append(self._held[:cut])
        self._held = self._held[cut:]
        if at < 0:
            return False
        self._tell_arguments(out, json_of("".join(self._value)))
        self._part = "members"
        return True

    def _in_between(self, out: Found) -> bool:
        pattern, match = self._match(self.NEXT, self.END)
        if pattern is None:
            if match is None:
                self._part = "text"
            return match is None
        if pattern is self.NEXT:
            self._open_call(match[1], out)
        else:
            self._part = "behind"
        return True

    def _in_behind(self, out: Found) -> bool:
        self._held = self._held.lstrip()
        if self.CLOSE.startswith(self._held) and self._held != self.CLOSE:
            return False
        self._held, self._part = self._held.removeprefix(self.CLOSE), "after"
        return True

    def _in_after(self, out: Found) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._part = "text"
        return bool(self._held)

    def _in_text(self, out: Found) -> bool:
        # Behind a call, white space at the end is dropped; it shows at the end what that is.
        cut = len(self._held.rstrip()) if self._begun else len(self._held)
        say(out, self._held[:cut])
        self._held = self._held[cut:]
        return False

    def finish(self) -> Found:
        out: Found = []
        held, self._held = self._held, ""
        if self._part == "value":  # cut short: its arguments are, too
            self._tell_arguments(out, "".join(self._value))
        elif self._part in ("start", "text") and (not self._begun or held.strip()):
            say(out, held)
        return out


class OlmoParser(PythonicParser):
    """``<function_calls>`` a call per line, without brackets around them, ``</function_calls>``: Olmo 3."""

    OPEN = "<function_calls>"
    FIRST = regex.compile(_CALL)
    NEXT = regex.compile(r"\s*+,?" + _CALL)
    CLOSE = "</function_calls>"
    END = regex.compile(r"\s*+(?=</)")

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._opened = False

    def _in_start(self, out: Found) -> bool:
        if not self._opened:
            before, mark, self._held = until(self._held, (self.OPEN,))
            say(out, before)
            self._opened = mark is not None
            return self._opened
        if super()._in_start(out):
            if self._part == "text":
                say(out, self.OPEN)
            return True
        return False

    def finish(self) -> Found:
        if self._opened and self._part == "start":
            self._held = self.OPEN + self._held
        return super().finish()

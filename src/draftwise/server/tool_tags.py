"""Tool calls whose arguments stand between tags, each by itself: GLM, Qwen 3 Coder, MiniMax.

Clients want JSON. A value of which the function's schema says that it is text goes on as it comes, quoted; any other
one is waited for: JSON that the schema allows is taken as it stands, all else is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import regex

from draftwise.server.marks import begun, until
from draftwise.server.tool_formats import CallPiece, Found, ToolParser, say

_LONGEST_TAG = 1024
"""Characters that are looked at again and again until a tag is complete."""

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class TagsParser(ToolParser):
    """``OPEN head (key value VALUE_END)* END``. Patterns are matched at the front of what is left."""

    OPEN: ClassVar[str]
    HEAD: ClassVar[Any]
    """Up to the first key or the end; group 1: the function's name."""
    KEY: ClassVar[Any]
    """Up to the value; group 1: the argument's name."""
    VALUE_END: ClassVar[str]
    END: ClassVar[Any]
    NEXT: ClassVar[Any] = None
    """Where another call follows without ``OPEN``; None: nowhere."""

    def __init__(self, *, only_one: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        super().__init__(only_one=only_one, schemas=schemas)
        self._part = "text"  # text, head, members, value, behind
        self._properties: Mapping[str, Any] = {}  # of the function that is called
        self._separator = ""
        self._value: list[str] | None = (
            None  # pieces of a value that is waited for; None: it goes on as it comes
        )
        self._at_start = False  # of a value
        self._ended_line = ""  # a line's end that may be the value's last

    def push(self, piece: str) -> Found:
        self._held += piece
        out: Found = []
        while getattr(self, f"_in_{self._part}")(out):
            pass
        return out

    def _tell_arguments(self, out: Found, arguments: str, name: str | None = None) -> None:
        if not (self._only_one and self._begun > 1):
            out.append(CallPiece(self._begun - 1, name, arguments))

    def _match(self, *patterns: Any) -> tuple[Any, Any]:
        """(pattern, match) of the first that matches; (None, True): one of them may yet; (None, None): none does."""
        waits = False
        for pattern in patterns:
            found = pattern.match(self._held, endpos=_LONGEST_TAG, partial=True)
            if found is not None and not found.partial:
                return pattern, found
            waits = waits or found is not None
        return None, True if waits and len(self._held) <= _LONGEST_TAG else None

    def _in_text(self, out: Found) -> bool:
        before, mark, self._held = until(self._held, (self.OPEN,))
        say(out, before)
        self._part = "text" if mark is None else "head"
        return mark is not None

    def _in_head(self, out: Found) -> bool:
        pattern, match = self._match(self.HEAD)
        if pattern is None:
            if match is None:
                say(out, self.OPEN)
                self._part = "text"
            return match is None
        self._held = self._held[match.end() :]
        self._open_call(match[1], out)
        return True

    def _open_call(self, name: str, out: Found) -> None:
        self._begun += 1
        self._tell_arguments(out, "{", name)
        schema = self._schemas.get(name)
        found = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = found if isinstance(found, Mapping) else {}
        self._part, self._separator = "members", ""

    def _in_members(self, out: Found) -> bool:
        pattern, match = self._match(self.KEY, self.END)
        if pattern is None:
            if match is None:  # neither: the call ends here, and what follows is text
                self._tell_arguments(out, "}")
                self._part = "text"
            return match is None
        self._held = self._held[match.end() :]
        if pattern is self.END:
            self._tell_arguments(out, "}")
            self._part = "behind"
            return True
        self._open_value(match[1].strip(), out)
        return True

    def _open_value(self, key: str, out: Found) -> None:
        text = _types(self._properties.get(key)) == {"string"}
        self._tell_arguments(out, f"{self._separator}{_dumps(key)}: " + ('"' if text else ""))
        self._separator = ", "
        self._allowed = _types(self._properties.get(key))
        self._value = None if text else []
        self._part, self._at_start, self._ended_line = "value", True, ""

    def _in_value(self, out: Found) -> bool:
        """A line's end at either end of a value belongs to its tags."""
        at = self._held.find(self.VALUE_END)
        cut = at if at >= 0 else len(self._held) - begun(self._held, (self.VALUE_END,))
        text, self._held = self._held[:cut], self._held[cut:]
        if self._at_start and text:
            text, self._at_start = text.removeprefix("\n"), False
        text = self._ended_line + text
        self._ended_line = ""
        if text.endswith("\n"):
            text, self._ended_line = text[:-1], "\n"
        if self._value is not None:
            self._value.append(text)
        elif text:
            self._tell_arguments(out, _dumps(text)[1:-1])
        if at < 0:
            return False
        self._held = self._held[len(self.VALUE_END) :]
        self._close_value(out)
        return True

    def _close_value(self, out: Found) -> None:
        self._tell_arguments(
            out, '"' if self._value is None else _json_of("".join(self._value), self._allowed)
        )
        self._value, self._part = None, "members"

    def _in_behind(self, out: Found) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self.NEXT is not None:
            pattern, match = self._match(self.NEXT, self.HEAD)
            if pattern is None and match:
                return False
            if pattern is self.HEAD:
                self._held = self._held[match.end() :]
                self._open_call(match[1], out)
                return True
            if pattern is self.NEXT:
                self._held = self._held[match.end() :]
        self._part = "text"
        return True

    def finish(self) -> Found:
        out: Found = []
        ends = self._part == "members" and self._held.strip() and self.END.match(self._held, partial=True)
        held, self._held = self._held, ""
        if ends:
            self._tell_arguments(out, "}")
        elif self._part == "value":  # cut short: its arguments are, too
            text = self._ended_line + held
            self._tell_arguments(
                out, _dumps(text)[1:-1] if self._value is None else "".join(self._value) + text
            )
        elif self._part == "head":
            say(out, self.OPEN + held)
        elif self._part == "text" and (not self._begun or held.strip()):
            say(out, held)
        return out


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The types that a schema allows; none: it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = [_types(part) for part in schema[name]]
            return set().union(*parts) if all(parts) else set()
    values = schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    return set()


def _json_of(text: str, allowed: set[str]) -> str:
    """A value as JSON: as it stands if it is some that is allowed, else as text.

    Example: "5" is ``5``, but ``"5"`` where only text or a list is allowed; "Oslo" is ``"Oslo"``.
    """
    stripped = text.strip()
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return _dumps(text)
    kinds = {name for name, types in _TYPES.items() if isinstance(value, types)}
    if isinstance(value, bool):
        kinds = {"boolean"}
    return stripped if not allowed or kinds & allowed else _dumps(text)


class GlmParser(TagsParser):
    """GLM 4.5 to 4.7: ``<tool_call>NAME <arg_key>k</arg_key> <arg_value>v</arg_value> </tool_call>``."""

    OPEN = "<tool_call>"
    HEAD = regex.compile(r"\s*+([^\s<>{}]++)\s*+(?=<arg_key>|</tool_call>)")
    KEY = regex.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
    VALUE_END = "</arg_value>"
    END = regex.compile(r"\s*+</tool_call>")


class QwenCoderParser(TagsParser):
    """Qwen 3 Coder: ``<tool_call> <function=NAME> <parameter=k> v </parameter> </function> </tool_call>``."""

    OPEN = "<tool_call>"
    HEAD = regex.compile(r"\s*+<function=([^<>\s]++)>\s*+(?=<parameter=|</function>)")
    KEY = regex.compile(r"\s*+<parameter=([^<>]++)>")
    VALUE_END = "</parameter>"
    END = regex.compile(r"\s*+</function>\s*+</tool_call>")


class MiniMaxParser(TagsParser):
    """MiniMax M2: ``<minimax:tool_call> <invoke name="NAME"> <parameter name="k">v</parameter> </invoke>
    </minimax:tool_call>``, several ``invoke`` in one."""

    OPEN = "<minimax:tool_call>"
    HEAD = regex.compile(r'\s*+<invoke name="([^"<>]++)">\s*+(?=<parameter |</invoke>)')
    KEY = regex.compile(r'\s*+<parameter name="([^"<>]++)">')
    VALUE_END = "</parameter>"
    END = regex.compile(r"\s*+</invoke>")
    NEXT = regex.compile(r"\s*+</minimax:tool_call>")

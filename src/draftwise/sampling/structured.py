"""`StructuredOutputs`: the form that an output must have. Plain data without torch or a grammar library."""

from __future__ import annotations

import json as _json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftwise.errors import RequestError, shown, suggest

GrammarKind = Literal["json", "regex", "choice", "grammar"]

_SURROGATE = re.compile("[\ud800-\udfff]")  # half a pair of UTF-16, which has no bytes
_MOST_MARKS, _LONGEST_MARK = 8, 64
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of the output: exactly one of ``json``, ``regex``, ``choice``, ``grammar``, ``json_object``.

    Names and meanings are those of vLLM. ``json``: a JSON schema, as an object, a boolean or their JSON text
    (stored as text). ``regex``: Rust syntax without look-around, matched against the whole output; digits of ``\\d``
    are 0-9. ``choice``: the output is one of these strings. ``grammar``: context-free, in Lark or GBNF syntax.
    ``json_object``: any JSON object. ``disable_any_whitespace``: JSON without optional whitespace: shorter, and
    more of it is forced. ``whitespace_pattern``: a regex for a run of optional whitespace in JSON; by default at
    most 40 characters, for models are known to go on with whitespace for ever where a grammar lets them.

    ``after``: one or several texts; the grammar holds behind the first that occurs. ``"</think>"`` lets a model
    reason freely before it answers, and the output cannot end before. ``opened_by``: ``after`` applies only if the
    output begins with this text, such as ``"<think>"``; any other output follows the grammar from its start.
    ``within``: the most tokens before that text; then the output goes on with the first of ``after``. With ``within``
    the grammar may be left out, and the answer is free.

    Raises `RequestError` naming the field. Whether a schema, regex or grammar can be compiled is found out when
    the request is admitted.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after: tuple[str, ...] | None = None
    opened_by: str | None = None
    within: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if self.json_object is False:  # as good as not given
            object.__setattr__(self, "json_object", None)
            given.remove("json_object")
        if len(given) != 1 and (given or self.within is None):
            found = f"got {' and '.join(given)}" if given else "got none"
            raise RequestError(f"structured_outputs needs exactly one of {', '.join(_KINDS)}; {found}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _invalid(name, value, "a non-empty string")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise _invalid(name, value, "true or false")
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and self.kind != "json":
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            raise RequestError(f"structured_outputs: {name} goes with json or json_object only")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError("structured_outputs: disable_any_whitespace contradicts whitespace_pattern")
        self._check_marks()

    def _check_marks(self) -> None:
        given: Any = self.after
        if given is not None:
            after = (given,) if isinstance(given, str) else given
            if not isinstance(after, Iterable) or isinstance(after, (bytes, Mapping)):
                raise _invalid("after", after, "a text or a list of texts")
            after = tuple(after)
            if not 0 < len(after) <= _MOST_MARKS or not all(map(_is_mark, after)):
                valid = f"1 to {_MOST_MARKS} texts of 1 to {_LONGEST_MARK} characters"
                raise _invalid("after", after, valid)
            object.__setattr__(self, "after", after)
        if self.opened_by is not None:
            if not _is_mark(self.opened_by):
                raise _invalid("opened_by", self.opened_by, f"a text of 1 to {_LONGEST_MARK} characters")
            if self.after is None:
                raise RequestError("structured_outputs: opened_by needs after")
        if self.within is not None:
            if not isinstance(self.within, int) or isinstance(self.within, bool) or self.within < 0:
                raise _invalid("within", self.within, "a number of tokens, 0 or more")
            if self.after is None:
                raise RequestError("structured_outputs: within needs after")

    @property
    def is_free(self) -> bool:
        """Whether ``within`` is the only requirement."""
        return all(getattr(self, name) is None for name in _KINDS)

    @property
    def inner(self) -> StructuredOutputs:
        """The grammar alone, without what may stand before it."""
        return self if self.after is None else replace(self, after=None, opened_by=None, within=None)

    @property
    def kind(self) -> GrammarKind:
        """The kind of the grammar; ``json_object`` is a JSON schema."""
        if self.json is not None or self.json_object:
            return "json"
        if self.regex is not None:
            return "regex"
        return "choice" if self.choice is not None else "grammar"

    @property
    def schema(self) -> str:
        """The JSON schema, as JSON text."""
        assert self.kind == "json"
        return self.json if isinstance(self.json, str) else '{"type":"object"}'

    @property
    def size(self) -> int:
        """The number of its characters."""
        given = (
            self.schema if self.kind == "json" else None,
            self.regex,
            self.grammar,
            self.whitespace_pattern,
        )
        return sum(len(text) for text in (*given, *(self.choice or ())) if text is not None)

    @classmethod
    def from_value(cls, value: Any) -> StructuredOutputs:
        """Build from user input: an instance, or a mapping of its fields. Raises `RequestError`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f'structured_outputs is {shown(value)}; it must be a mapping such as {{"json": {{...}}}}, '
                "or StructuredOutputs"
            )
        for name in value:
            if name not in cls.__dataclass_fields__:
                raise RequestError(
                    f"structured_outputs: unknown field {shown(name)}{suggest(str(name), cls.__dataclass_fields__)}"
                )
        return cls(**value)


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_MARK and not _SURROGATE.search(value)


def _schema_text(value: Any) -> str:
    """JSON text of a schema; its properties keep their order, which is the order of the output."""
    if isinstance(value, str):
        try:
            value = _json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs: json is not JSON text: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise RequestError(
            f"structured_outputs: a JSON schema is an object or a boolean, not {type(value).__name__}"
        )
    if value is False:
        raise RequestError("structured_outputs: the JSON schema false allows nothing")
    if value is True:
        value = {}  # the same, as an object
    try:
        return _json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs: json is not a JSON schema: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _invalid("choice", value, "a list of strings")
    choices = tuple(value)
    if not choices or not all(isinstance(c, str) and c for c in choices):
        raise _invalid("choice", choices, "a list of one or more non-empty strings")
    return choices


def _invalid(name: str, value: Any, valid: str) -> RequestError:
    return RequestError(f"structured_outputs: {name} is {shown(value)}; it must be {valid}")

"""Checks requests against `RequestLimits`. Only sizes are checked, so a refusal costs almost nothing.

The server asks with the values of a body before it makes `SamplingParams` of them; the engine asks again for every
request. Values of a wrong type are skipped here; the code that reads them reports the error.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from draftwise.config.limits import RequestLimits
from draftwise.errors import LimitError, RequestError, shown
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.structured import StructuredOutputs

_COUNTS = (
    ("stop", "strings", "max_stop_strings"),
    ("stop_token_ids", "token ids", "max_stop_token_ids"),
    ("bad_words", "words", "max_bad_words"),
    ("logit_bias", "entries", "max_logit_bias"),
    ("allowed_token_ids", "token ids", "max_allowed_token_ids"),
)
_LENGTHS = (("stop", "max_stop_chars"), ("bad_words", "max_bad_words_chars"))
_STRUCTURED = "structured_outputs"


def check_params(limits: RequestLimits, params: SamplingParams, *, walk: bool = True) -> None:
    """``walk``: also check the depth and the enums of a schema, which takes some 50 ms for a large one. Raises
    `LimitError`."""
    names = ("n", _STRUCTURED, *(name for name, _, _ in _COUNTS))
    given = {name: getattr(params, name) for name in names}
    spec = params.structured_outputs
    if not walk and spec is not None and isinstance(spec.json, str):
        _check_length(limits, f"{_STRUCTURED}: json", (spec.json,), "max_schema_chars")
        given[_STRUCTURED] = None
    check_fields(limits, given)


def check_fields(limits: RequestLimits, given: Mapping[str, Any]) -> None:
    """Check fields of `SamplingParams` as a user wrote them (lists, mappings, JSON); other fields do not matter.

    Raises `LimitError`, or `RequestError` for a JSON schema that is no JSON text.
    """
    n = given.get("n")
    if isinstance(n, int) and n > limits.max_n:
        raise LimitError("n", f"{_shown(n)} samples", "max_n", limits.max_n)
    for name, what, limit in _COUNTS:
        value = given.get(name)
        if not isinstance(value, str):
            _check_count(limits, name, value, what, limit)
    for name, limit in _LENGTHS:
        value = given.get(name)
        _check_length(limits, name, (value,) if isinstance(value, str) else value, limit)
    if given.get(_STRUCTURED) is not None:
        check_structured(limits, given[_STRUCTURED])


def check_structured(limits: RequestLimits, value: Any, name: str = _STRUCTURED) -> None:
    """Check the sizes of a structured output: `StructuredOutputs`, or a mapping of its fields. ``name``: the field to
    name in errors.

    Raises `LimitError`, or `RequestError` for a JSON schema that is no JSON text.
    """
    if isinstance(value, StructuredOutputs):
        value = {field: getattr(value, field) for field in StructuredOutputs.__dataclass_fields__}
    if not isinstance(value, Mapping):
        return
    choice = value.get("choice")
    if not isinstance(choice, str):
        _check_count(limits, f"{name}: choice", choice, "strings", "max_choices")
        _check_length(limits, f"{name}: choice", choice, "max_choice_chars")
    for field, limit in (
        ("regex", "max_regex_chars"),
        ("whitespace_pattern", "max_regex_chars"),
        ("grammar", "max_grammar_chars"),
        ("grammar", "max_gbnf_chars"),
    ):
        text = value.get(field)
        if isinstance(text, str) and (limit != "max_gbnf_chars" or "::=" in text):
            _check_length(limits, f"{name}: {field}", (text,), limit)
    check_schema(limits, value.get("json"), f"{name}: json")


def check_schema(limits: RequestLimits, schema: Any, name: str) -> None:
    """Check a JSON schema, as an object or as JSON text: characters, depth, enum values.

    Raises `LimitError`, or `RequestError` for what is no JSON text.
    """
    if isinstance(schema, str):
        _check_length(limits, name, (schema,), "max_schema_chars")
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise RequestError(f"{name}: is not JSON text: {error}") from None
        except RecursionError:
            raise _too_deep(limits, name) from None
    # Each part weighs at least the character or two that it has in JSON: the walk ends soon where there is too much.
    chars = num_enums = 0
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        part, depth = stack.pop()
        chars += 2
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping | list | tuple):
            if depth > limits.max_schema_depth:
                raise _too_deep(limits, name)
            _refuse_chars(limits, name, chars + 2 * len(part))
            if isinstance(part, Mapping):
                chars += sum(len(key) + 2 for key in part if isinstance(key, str))
                enum = part.get("enum")
                if isinstance(enum, list | tuple):
                    num_enums += len(enum)
                stack.extend((value, depth + 1) for value in part.values())
            else:
                stack.extend((value, depth + 1) for value in part)
        if num_enums > limits.max_enum_values:
            raise LimitError(name, f"{num_enums} enum values", "max_enum_values", limits.max_enum_values)
        _refuse_chars(limits, name, chars)


def check_prompt(limits: RequestLimits, text: str, max_model_len: int, name: str = "prompt") -> None:
    """Check a text before it is tokenized. Raises `LimitError`."""
    _refuse_long_prompt(limits, len(text), max_model_len, name)


def check_messages(
    limits: RequestLimits,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    max_model_len: int,
) -> None:
    """Check a conversation before its template is rendered: the number of messages, and their characters and those of
    the tools, which all stand in the prompt. Raises `LimitError`."""
    if len(messages) > limits.max_messages:
        raise LimitError("messages", f"{len(messages)} messages", "max_messages", limits.max_messages)
    if tools is not None and len(tools) > limits.max_tools:
        raise LimitError("tools", f"{len(tools)} tools", "max_tools", limits.max_tools)
    allowed = limits.prompt_chars(max_model_len)
    chars = 0
    stack: list[Any] = [list(messages), list(tools or ())]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            chars += len(part)
            stack.extend(part.values())
        elif isinstance(part, list | tuple):
            chars += len(part)
            stack.extend(part)
        if chars > allowed:
            _refuse_long_prompt(limits, chars, max_model_len, "messages")


def _refuse_long_prompt(limits: RequestLimits, chars: int, max_model_len: int, name: str) -> None:
    allowed = limits.prompt_chars(max_model_len)
    if chars > allowed:
        more = f"; this model's maximum context length is {max_model_len} tokens"
        raise LimitError(name, f"{chars} characters", "max_prompt_chars", allowed, more)


def _check_count(limits: RequestLimits, name: str, value: Any, what: str, limit: str) -> None:
    if isinstance(value, Sized) and len(value) > (allowed := getattr(limits, limit)):
        raise LimitError(name, f"{len(value)} {what}", limit, allowed)


def _check_length(limits: RequestLimits, name: str, value: Any, limit: str) -> None:
    if not isinstance(value, Sequence):
        return
    total = sum(len(part) for part in value if isinstance(part, str))
    if total > (allowed := getattr(limits, limit)):
        raise LimitError(name, f"{total} characters", limit, allowed)


def _refuse_chars(limits: RequestLimits, name: str, chars: int) -> None:
    if chars > limits.max_schema_chars:
        given = f"over {limits.max_schema_chars} characters"
        raise LimitError(name, given, "max_schema_chars", limits.max_schema_chars)


def _too_deep(limits: RequestLimits, name: str) -> LimitError:
    given = f"over {limits.max_schema_depth} levels of nesting"
    return LimitError(name, given, "max_schema_depth", limits.max_schema_depth)


def _shown(number: int) -> str:
    """An integer as a short text: Python cannot print one of a hundred thousand digits."""
    return str(number) if number.bit_length() < 64 else "over 2**63"


def check_portable(params: SamplingParams) -> None:
    """Check that a request's functions can be sent to other processes. Raises RequestError."""
    for function in params.logits_processors:
        try:
            data = pickle.dumps(function)
        except Exception as error:
            raise RequestError(
                f"logits_processors: {shown(function)} cannot be sent to ranks: {error}"
            ) from None
        if b"__main__" in data:
            raise RequestError(
                f"logits_processors: {shown(function)} is in __main__, which ranks cannot import; put it into a module"
            )

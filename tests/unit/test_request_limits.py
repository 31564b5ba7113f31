"""`RequestLimits`: each limit lets through what is within it, and refuses one more by name before any work is done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwise.config import LIMIT_NAMES, RequestLimits, resolve_engine_config
from draftwise.engine.limits import check_fields, check_messages, check_params, check_prompt
from draftwise.errors import ConfigError, LimitError, RequestError
from draftwise.sampling.params import SamplingParams

LENGTH = 100
"""Of the model, in tokens."""


def nested(depth: int) -> dict[str, Any]:
    """A schema whose JSON text is nested so deep."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def fields_with(limit: str, size: int) -> dict[str, Any]:
    """Fields that use up ``size`` of a limit, with a limit of 10 in mind."""
    structured: dict[str, Any] = {
        "max_choices": {"choice": [str(i) for i in range(size)]},
        "max_choice_chars": {"choice": ["ab", "c" * (size - 2)]},
        "max_regex_chars": {"regex": "a" * size},
        "max_grammar_chars": {"grammar": "a" * size},
        "max_gbnf_chars": {"grammar": "root ::=" + "a" * (size - 8)},
        "max_schema_chars": {"json": json.dumps("a" * (size - 2))},
        "max_schema_depth": {"json": nested(size)},
        "max_enum_values": {"json": {"not": {"enum": [1, 2]}, "enum": list(range(size - 2))}},
    }
    if limit in structured:
        return {"structured_outputs": structured[limit]}
    fields: dict[str, dict[str, Any]] = {
        "max_n": {"n": size},
        "max_stop_strings": {"stop": ["a"] * size},
        "max_stop_chars": {"stop": ["ab", "c" * (size - 2)]},
        "max_stop_token_ids": {"stop_token_ids": list(range(size))},
        "max_bad_words": {"bad_words": ["a"] * size},
        "max_bad_words_chars": {"bad_words": ["ab", "c" * (size - 2)]},
        "max_logit_bias": {"logit_bias": {str(i): 1 for i in range(size)}},
        "max_allowed_token_ids": {"allowed_token_ids": list(range(size))},
    }
    return fields[limit]


OF_CHATS = ("max_prompt_chars", "max_messages", "max_tools")
OF_FIELDS = [n for n in LIMIT_NAMES if n not in (*OF_CHATS, "max_grammar_seconds")]


@pytest.mark.parametrize("limit", OF_FIELDS)
def test_one_more_than_allowed_is_refused_by_name(limit: str) -> None:
    limits = RequestLimits(**{limit: 10})
    check_fields(limits, fields_with(limit, 10))
    with pytest.raises(LimitError, match=rf"at most 10 \({limit}\)") as error:
        check_fields(limits, fields_with(limit, 11))
    assert error.value.limit == limit
    assert str(error.value).startswith(next(iter(fields_with(limit, 11))))


@pytest.mark.parametrize("limit", [n for n in OF_FIELDS if n != "max_schema_chars"])
def test_parameters_are_checked_as_raw_fields_are(limit: str) -> None:
    limits = RequestLimits(**{limit: 10})
    check_params(limits, SamplingParams(**fields_with(limit, 10)))
    with pytest.raises(LimitError, match=limit):
        check_params(limits, SamplingParams(**fields_with(limit, 11)))


def test_a_single_string_is_one_stop_string() -> None:
    limits = RequestLimits(max_stop_strings=1, max_stop_chars=5)
    check_fields(limits, {"stop": "abcde"})
    with pytest.raises(LimitError, match=r"stop: 6 characters; at most 5 \(max_stop_chars\)"):
        check_fields(limits, {"stop": "abcdef"})


def test_values_of_a_wrong_type_are_left_to_whoever_reads_them() -> None:
    check_fields(
        RequestLimits(),
        {
            "n": "many",
            "stop": 7,
            "bad_words": None,
            "logit_bias": "x",
            "stop_token_ids": 1.5,
            "structured_outputs": "x",
            "unknown": object(),
        },
    )
    check_fields(RequestLimits(), {"structured_outputs": {"choice": "one", "regex": 5, "json": 3}})


def test_an_integer_of_many_digits_is_refused_without_printing_it() -> None:
    with pytest.raises(LimitError, match=r"over 2\*\*63 samples; at most 1024 \(max_n\)"):
        check_fields(RequestLimits(), {"n": 10**10_000})


def test_schemas_as_text_are_checked_as_objects_are() -> None:
    limits = RequestLimits(max_schema_depth=20)
    check_fields(limits, {"structured_outputs": {"json": json.dumps(nested(20))}})
    for depth in (21, 500, 100_000):  # the last one is too deep for the parser, too
        text = '{"not":' * (depth - 1) + "{}" + "}" * (depth - 1)
        with pytest.raises(LimitError, match=r"max_schema_(depth|chars)"):
            check_fields(limits, {"structured_outputs": {"json": text}})
    with pytest.raises(RequestError, match="not JSON text"):
        check_fields(limits, {"structured_outputs": {"json": "{"}})


def test_characters_of_a_schema_are_those_of_keys_and_values() -> None:
    limits = RequestLimits(max_schema_chars=100)
    for schema in ({"a" * 101: 1}, {"const": "a" * 101}, {"enum": [0] * 101}, [[]] * 101):
        with pytest.raises(LimitError, match="max_schema_chars"):
            check_fields(limits, {"structured_outputs": {"json": schema}})


def test_long_prompts_are_refused_before_they_are_tokenized() -> None:
    check_prompt(RequestLimits(max_prompt_chars=10), "a" * 10, LENGTH)
    with pytest.raises(
        LimitError, match=r"prompt: 11 characters; at most 10 \(max_prompt_chars\).*context length"
    ):
        check_prompt(RequestLimits(max_prompt_chars=10), "a" * 11, LENGTH)
    check_prompt(RequestLimits(), "a" * 16 * 5000, 5000)
    with pytest.raises(LimitError, match="80001 characters; at most 80000"):
        check_prompt(RequestLimits(), "a" * (16 * 5000 + 1), 5000)
    check_prompt(RequestLimits(), "a" * 65536, 1)


def test_long_conversations_are_refused_before_they_are_rendered() -> None:
    limits = RequestLimits(max_prompt_chars=100, max_messages=3, max_tools=2)
    message = {"role": "user", "content": "x" * 20}
    check_messages(limits, [message] * 3, None, LENGTH)
    with pytest.raises(LimitError, match=r"messages: 4 messages; at most 3 \(max_messages\)"):
        check_messages(limits, [message] * 4, None, LENGTH)
    with pytest.raises(LimitError, match=r"tools: 3 tools; at most 2 \(max_tools\)"):
        check_messages(limits, [message], [{}] * 3, LENGTH)
    with pytest.raises(LimitError, match="max_prompt_chars"):
        check_messages(
            limits, [{"role": "user", "content": [{"type": "text", "text": "x" * 101}]}], None, LENGTH
        )
    with pytest.raises(LimitError, match="max_prompt_chars"):
        check_messages(limits, [message], [{"function": {"description": "x" * 90}}], LENGTH)


def test_limits_are_an_option_of_the_engine() -> None:
    limits = resolve_engine_config(device="cpu", model="M").request_limits
    assert limits == RequestLimits()
    given = '{"max_choices": "100k", "max_grammar_seconds": 0.5}'
    limits = resolve_engine_config(device="cpu", model="M", request_limits=given).request_limits
    assert (limits.max_choices, limits.max_grammar_seconds, limits.max_n) == (100_000, 0.5, 1024)
    assert resolve_engine_config(device="cpu", model="M", request_limits=limits).request_limits is limits
    for wrong, words in (
        ({"max_choice": 3}, "did you mean 'max_choices'"),
        ({"max_n": 0}, "max_n: expected a whole number >= 1"),
        ({"max_n": True}, "max_n: expected"),
        ({"max_grammar_seconds": 0}, "max_grammar_seconds: expected"),
        ({"max_schema_depth": 10_000}, "max_schema_depth: expected an integer in 1..400"),
        ([1], "request_limits: expected a mapping"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_engine_config(device="cpu", model="M", request_limits=wrong)


def test_what_clients_of_other_servers_send_is_within_the_defaults() -> None:
    check_params(
        RequestLimits(),
        SamplingParams(
            n=128,
            stop=["\n\n", "User:", "<|im_end|>", "```"] * 4,
            logit_bias=dict.fromkeys(range(1024), -100),
            bad_words=["word"] * 500,
            allowed_token_ids=list(range(128_000)),
            stop_token_ids=list(range(2000)),
            structured_outputs={"json": {"enum": [f"value {i}" for i in range(1000)]}},
        ),
    )
    check_params(
        RequestLimits(), SamplingParams(structured_outputs={"choice": [str(i) for i in range(10_000)]})
    )

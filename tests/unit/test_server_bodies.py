"""From bytes to bodies: what is too much, what other servers call by another name, what nobody knows."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftwise.config import RequestLimits
from draftwise.errors import ConfigError, LimitError
from draftwise.server import shape
from draftwise.server.body import Bodies
from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError
from draftwise.server.fields import NO_EFFECT
from draftwise.server.protocol import Body, ChatBody, CompletionBody, ResponsesBody, TokenizeBody
from draftwise.server.shape import Shape, bound, measure


def bodies(limits: RequestLimits | None = None, max_model_len: int = 1000, **settings: Any) -> Bodies:
    return Bodies(ServerConfig(**settings), limits or RequestLimits(), max_model_len)


def parse(kind: type[Body], given: Any, **settings: Any) -> Any:
    data = given if isinstance(given, bytes) else json.dumps(given).encode()
    return bodies(**settings).parse(kind, data)


def refused(kind: type[Body], given: Any, **settings: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse(kind, given, **settings)
    assert caught.value.status == 400
    return caught.value


# --------------------------------------------------------------------------------------------------- shape


def oracle(value: Any) -> Shape:
    """The shape of a parsed value; an empty list or object has a bracket and no comma."""
    if isinstance(value, dict):
        parts = [oracle(v) for v in value.values()]
        fields = len(value)
    elif isinstance(value, list):
        parts, fields = [oracle(v) for v in value], 0
    else:
        return Shape(0, 0, 0)
    return Shape(
        1 + max((p.depth for p in parts), default=0),
        fields + sum(p.fields for p in parts),
        1 + max(0, len(parts) - 1) + sum(p.values for p in parts),
    )


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 3)
    if kind < 2:
        return "".join(rng.choice('ab"\\,:[]{} \n€') for _ in range(rng.randrange(8)))
    if kind == 2:
        return rng.choice([1, -2.5, None, True])
    if kind < 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {
        f"{i}{rng.choice(['', chr(34), chr(92)])}": random_value(rng, depth - 1)
        for i in range(rng.randrange(4))
    }


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_the_shape_of_random_json(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "_CHUNK", chunk)
    rng = random.Random(chunk)
    for _ in range(200):
        value = random_value(rng, 4)
        data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        assert measure(data) == oracle(value), data
        assert oracle(value).within(bound(data))


def test_backslashes_over_the_borders_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "_CHUNK", 4)
    for count in range(20):
        data = b'["' + b"\\" * count + b'",[1,2]]'
        # Behind an odd number the quote belongs to the string, which then has no end.
        assert measure(data).depth == (1 if count % 2 else 2), count


def test_any_bytes_have_a_shape() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 100, 5000):
        assert measure(rng.integers(0, 256, size, np.uint8).tobytes()).fields >= 0
    assert measure(b"[" * 3_000_000).depth == 3_000_000
    assert measure(b"]" * 10 + b"[").depth == 0


# -------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (b'{"prompt": ' + b"[" * 5_000_000, "max_body_depth"),
        (b'{"prompt": ' + b"[" * 129 + b"]" * 129 + b"}", "max_body_depth"),
        (b'{"speculation": ' * 129 + b"1" + b"}" * 129, "max_body_depth"),
        (b'{"prompt": "x"' + b"".join(b',"f%d":1' % i for i in range(100_000)) + b"}", "max_body_fields"),
        (b'{"messages": [' + b'{"role": "user", "content": "x"},' * 20_000 + b"{}]}", "max_body_fields"),
        (b'{"prompt": [' + b"1," * 1_000_000 + b"1]}", "max_body_values"),
        (b'{"prompt": [' + b'"a",' * 1_000_000 + b'"a"]}', "max_body_values"),
        (b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}", "max_body_values"),
        (b'{"messages": [' + b"[]" * 1_000_000, "max_body_values"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_parsed(
    data: bytes, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("draftwise.server.body.from_json", fail)
    for kind in (CompletionBody, ChatBody):
        with pytest.raises(LimitError, match=limit) as caught:
            parse(kind, data)
        assert caught.value.limit == limit and len(str(caught.value)) < 200


def test_punctuation_in_a_text_is_no_structure() -> None:
    text = '{[":,\\' * 200_000
    assert parse(CompletionBody, {"prompt": text}).prompt == text


def test_limits_are_options() -> None:
    deep = {"prompt": "x", "speculation": [[[1]]]}
    with pytest.raises(LimitError, match=r"the body: 4 levels of nesting; at most 3 \(max_body_depth\)"):
        parse(CompletionBody, deep, max_body_depth=3)
    with pytest.raises(LimitError, match=r"2 fields; at most 1 \(max_body_fields\)"):
        parse(CompletionBody, deep, max_body_fields=1)
    ids = {"prompt": list(range(100))}
    with pytest.raises(LimitError, match=r"101 values; at most 50 \(max_body_values\)"):
        parse(CompletionBody, ids, max_body_values=50)
    # Token ids of a prompt as long as the model takes, and as many again, always have room.
    assert len(parse(CompletionBody, {"prompt": [1] * 300_000}, max_model_len=200_000).prompt) == 300_000
    for wrong in ({"max_body_depth": 0}, {"max_body_depth": 191}, {"max_body_fields": 0}, {"max_body_values": 0},
                  {"unknown_fields": "ignore"}, {"max_body_memory": 0}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ServerConfig(**wrong)


def test_request_limits_hold_before_the_fields_are_looked_at() -> None:
    small = RequestLimits(max_stop_strings=2, max_n=4)
    with pytest.raises(LimitError, match="max_stop_strings"):
        parse(CompletionBody, {"prompt": "x", "stop": ["a", "b", 3], "temperature": "warm"}, limits=small)
    with pytest.raises(LimitError, match="max_n"):
        parse(ChatBody, {"messages": [], "n": 5}, limits=small)


def test_one_fault_of_a_list_is_reported_and_not_a_million() -> None:
    for given in (["a", 1] * 50_000, [[1], "a"] * 50_000, [1, "a"] * 50_000, [1.5] * 100_000):
        assert len(refused(CompletionBody, {"prompt": given}).message) < 400
    assert len(refused(ChatBody, {"messages": [1] * 200_000}).message) < 100


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "seed": ' + b"1" * 100_000 + b"}",
        b'{"prompt": "x", "seed": -' + b"1" * 1_000_000 + b"}",
        b'{"prompt": "x"} {"prompt": "y"}',
        b'{"prompt": "x",}',
        b'{"prompt": "\x00"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"",
    ],
)
def test_what_is_no_json(data: bytes) -> None:
    error = refused(CompletionBody, data)
    assert error.code == "invalid_json" and len(error.message) < 200


def test_of_a_name_that_is_there_twice_the_last_counts() -> None:
    assert parse(CompletionBody, b'{"prompt": "x", "n": 1, "prompt": "y"}').prompt == "y"


# -------------------------------------------------------------------------------------------------- fields


def test_fields_without_effect_are_taken_and_unknown_ones_refused() -> None:
    body = parse(CompletionBody, {"prompt": "x", "user": "u", "metadata": {}, "cache_prompt": True})
    assert body.prompt == "x" and {"user", "metadata"} <= NO_EFFECT
    error = refused(CompletionBody, {"prompt": "x", "user": "u", "top_q": 1})
    assert (
        error.param == "top_q" and error.code == "unknown_parameter" and "did you mean 'top_" in error.message
    )
    # Clients send fields that are not supported here empty.
    assert parse(ChatBody, {"messages": [], "functions": None, "audio": None}).messages == []
    assert "audio is not supported" in refused(ChatBody, {"messages": [], "audio": {"voice": "x"}}).message


def test_a_name_of_a_megabyte_is_not_compared_with_others() -> None:
    assert len(refused(CompletionBody, {"prompt": "x", "y" * 1_000_000: 1}).message) < 300


def test_unknown_fields_may_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    reader = bodies(unknown_fields="warn")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            body = reader.parse(CompletionBody, b'{"prompt": "x", "temprature": 1, "b\\n": 2}')
            assert body.prompt == "x" and body.temperature is None
        told = [r.getMessage() for r in caplog.records]
        assert told == [
            "unknown field 'temprature' of a request is ignored; did you mean 'temperature'?",
            "unknown field 'b\\n' of a request is ignored",
        ]
        # A stranger cannot fill the log.
        many = {"prompt": "x", **{f"f{i}": i for i in range(5000)}}
        reader.parse(CompletionBody, json.dumps(many).encode())
        assert len(caplog.records) <= 100
    # What is known and not there is refused all the same.
    with pytest.raises(APIError, match="audio is not supported"):
        reader.parse(ChatBody, b'{"messages": [], "audio": {"voice": "x"}}')


CASES: list[tuple[dict[str, Any], Callable[[Any], Any], Any]] = [
    ({"n_predict": 7}, lambda b: b.max_tokens, 7),
    ({"n_predict": -1}, lambda b: b.max_tokens, None),
    ({"enable_thinking": False}, lambda b: b.chat_template_kwargs, {"enable_thinking": False}),
    (
        {"enable_thinking": True, "chat_template_kwargs": {"a": 1}},
        lambda b: b.chat_template_kwargs,
        {"a": 1, "enable_thinking": True},
    ),
    ({"guided_json": {"type": "object"}}, lambda b: b.structured_outputs, {"json": {"type": "object"}}),
    ({"guided_regex": "a+"}, lambda b: b.structured_outputs, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, lambda b: b.structured_outputs, {"choice": ["a", "b"]}),
    ({"guided_grammar": "x"}, lambda b: b.structured_outputs, {"grammar": "x"}),
    ({"guided_json": None, "guided_decoding_backend": "xgrammar"}, lambda b: b.structured_outputs, None),
    ({"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}, lambda b: b.n, None),
    ({"vllm_xargs": {}}, lambda b: b.n, None),
]


@pytest.mark.parametrize(("given", "read", "expected"), CASES)
def test_fields_of_other_servers_mean_ours(
    given: dict[str, Any], read: Callable[[Any], Any], expected: Any
) -> None:
    assert read(parse(ChatBody, {"messages": [], **given})) == expected


def test_fields_of_other_servers_that_cannot_be_done_are_refused_by_name() -> None:
    for name, value in (("use_beam_search", True), ("early_stopping", True), ("vllm_xargs", {"a": 1})):
        error = refused(ChatBody, {"messages": [], name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
    for given in (
        {"n_predict": 7, "max_tokens": 8},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": True}},
        {"guided_json": {}, "structured_outputs": {"json": {}}},
    ):
        assert "mean the same" in refused(ChatBody, {"messages": [], **given}).message
    assert refused(ChatBody, {"messages": [], "enable_thinking": True, "chat_template_kwargs": 5}).param == (
        "chat_template_kwargs"
    )
    # They are of bodies that generate, and unknown elsewhere.
    for name in ("n_predict", "guided_json", "use_beam_search"):
        assert refused(TokenizeBody, {"prompt": "x", name: None}).code == "unknown_parameter"
    assert refused(ResponsesBody, {"input": "x", "n_predict": 1}).code == "unknown_parameter"

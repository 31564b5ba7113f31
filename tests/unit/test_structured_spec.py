"""What users write as structured_outputs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from draftwise.errors import RequestError
from draftwise.sampling.structured import StructuredOutputs


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"json": {"type": "integer"}}, "json"),
        ({"json": '{"type": "integer"}'}, "json"),
        ({"json": True}, "json"),
        ({"json_object": True}, "json"),
        ({"json_object": True, "json": None, "disable_any_whitespace": True}, "json"),
        ({"json": {}, "whitespace_pattern": " ?"}, "json"),
        ({"json_object": False, "regex": "a+"}, "regex"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
def test_valid(value: dict[str, Any], kind: str) -> None:
    spec = StructuredOutputs.from_value(value)
    assert spec.kind == kind
    assert StructuredOutputs.from_value(spec) is spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    hash(spec)


def test_a_schema_is_kept_as_text_in_its_own_order() -> None:
    spec = StructuredOutputs(json={"properties": {"b": {}, "a": {"const": "ü"}}})
    assert spec.schema == '{"properties":{"b":{},"a":{"const":"ü"}}}'
    assert StructuredOutputs(json='{ "properties": {"b": {}, "a": {"const": "ü"}} }') == spec
    assert StructuredOutputs(json_object=True).schema == '{"type":"object"}'
    assert StructuredOutputs(json=True).schema == "{}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, ["exactly one of json, regex, choice, grammar, json_object", "none"]),
        ({"json_object": False}, ["exactly one", "none"]),
        ({"regex": "a", "choice": ["b"]}, ["exactly one", "regex and choice"]),
        ({"rgex": "a"}, ["unknown field 'rgex'", "did you mean 'regex'"]),
        ({"json": "{"}, ["json is not JSON text"]),
        ({"json": "[1]"}, ["object or a boolean", "list"]),
        ({"json": {"a": {1, 2}}}, ["json is not a JSON schema", "set"]),
        ({"json": False}, ["false allows nothing"]),
        ({"json": 5}, ["object or a boolean", "int"]),
        ({"regex": ""}, ["regex", "non-empty"]),
        ({"regex": 7}, ["regex is 7"]),
        ({"grammar": ["a"]}, ["grammar"]),
        ({"choice": []}, ["choice", "one or more"]),
        ({"choice": "yes"}, ["choice", "a list of strings"]),
        ({"choice": ["yes", ""]}, ["choice"]),
        ({"choice": [1]}, ["choice"]),
        ({"json_object": "yes"}, ["json_object", "true or false"]),
        ({"regex": "a", "disable_any_whitespace": True}, ["disable_any_whitespace goes with json"]),
        ({"choice": ["a"], "whitespace_pattern": " "}, ["whitespace_pattern goes with json"]),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, ["contradicts"]),
        ({"json": {}, "disable_any_whitespace": 1}, ["disable_any_whitespace", "true or false"]),
        ("json", ["mapping"]),
        (["json"], ["mapping"]),
    ],
)
def test_invalid_is_named(value: Any, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputs.from_value(value)
    for word in ("structured_outputs", *words):
        assert word in str(caught.value)

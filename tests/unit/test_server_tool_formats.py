"""Forms of tool calls: found however the text is cut, and what is none stays text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.errors import ConfigError
from draftwise.server.tool_formats import PARSERS, JsonEnd, parser_class

CUTS = st.lists(st.integers(0, 500), max_size=12)
ONE = [("f", {"a": '}\\"]'})]
TWO = [*ONE, ("g", {"b": [1, {}]})]
F, G = '{"a": "}\\\\\\"]"}', '{"b": [1, {}]}'
FOUND = [
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {F}}}</tool_call>', "", ONE),
    ("llama3_json", f'{{"name": "f", "parameters": {F}}}', "", ONE),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "f", "parameters": {F}}}; {{"name": "g", "parameters": {G}}}\n',
        "",
        TWO,
    ),
    ("llama4_json", f' \n{{"name": "f", "arguments": {F}}};', "", ONE),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {G}}}]',
        "",
        TWO,
    ),
    ("mistral", f"Now \n[TOOL_CALLS]f{F}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{G}", "Now", TWO),
    ("mistral", f"[TOOL_CALLS]f[ARGS] {F} ", "", ONE),
]
TEXT = [
    ("hermes", "a <tool_call>x</tool_call> b"),
    ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
    ("llama3_json", '{"answer": 1} and so on {"name": "f"}'),
    ("llama3_json", '{"name": "f", "parameters": {'),
    ("llama3_json", "<|python"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", "{broken}"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", '[TOOL_CALLS][{"name": "f"'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{broken}"),
    ("mistral", "a [TOOL_CAL"),
]


def fed(name: str, text: str, cuts: list[int], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    parser = parser_class(name)(**options)
    shown, calls = "", []
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    for piece in [*(parser.push(text[low:high]) for low, high in pairwise(edges)), parser.finish()]:
        shown, calls = shown + piece[0], calls + piece[1]
    assert parser.num_calls == len(calls)
    return shown, calls


@pytest.mark.parametrize(("name", "text", "before", "calls"), FOUND)
@given(cuts=CUTS)
def test_calls_do_not_depend_on_the_cuts(
    name: str, text: str, before: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    shown, found = fed(name, text, cuts)
    assert (shown.strip(), found) == (before, calls)
    every_character = list(range(len(text)))
    assert fed(name, text, every_character)[1] == calls
    assert fed(name, text, cuts, only_one=True)[1] == calls[:1]


@pytest.mark.parametrize(("name", "text"), TEXT)
@given(cuts=CUTS)
def test_what_is_no_call_stays_text(name: str, text: str, cuts: list[int]) -> None:
    shown, calls = fed(name, text, cuts)
    assert calls == [] and "".join(shown.split()) == "".join(text.split())


@given(st.sampled_from(sorted(PARSERS)), st.text(alphabet='[TOL_CAS]{}"<|>;x \n\\', max_size=40), CUTS)
def test_no_text_is_lost(name: str, text: str, cuts: list[int]) -> None:
    shown, calls = fed(name, text, cuts)
    assert calls or "".join(shown.split()) == "".join(text.split())


def test_text_is_passed_on_at_once() -> None:
    for name in ("hermes", "mistral"):
        assert parser_class(name)().push("Well, [it") == ("Well, [it", [])
    parser = parser_class("llama3_json")()
    assert parser.push("W") == ("W", []) and parser.push('{"name": "f"}') == ('{"name": "f"}', [])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(
    st.text(), v)).filter(lambda v: isinstance(v, list | dict)), st.text(), CUTS)  # fmt: skip
def test_ends_of_json(value: Any, rest: str, cuts: list[int]) -> None:
    import json

    text = json.dumps(value)
    end = JsonEnd()
    for cut in sorted({cut % len(text) for cut in cuts}):
        assert end.find("  " + text[:cut], 2) is None
    assert end.find("  " + text + rest, 2) == len(text) + 2


def test_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3_json'"):
        parser_class("llama3-json")

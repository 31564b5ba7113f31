"""Forms of tool calls: found however the text is cut, and what is none stays text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.errors import ConfigError
from draftwise.server.call_reader import CallReader, JsonScan
from draftwise.server.tool_formats import CallPiece, ForcedParser, Found, ToolParser
from draftwise.server.tool_parsers import PARSERS, parser_class

CUTS = st.lists(st.integers(0, 500), max_size=12)
F, G = '{"a": "}\\\\\\"]"}', '{"b": [1, {}]}'
ONE = [("f", F)]
TWO = [*ONE, ("g", G)]
TAGGED = [("f", '{"a": "x"}'), ("g", "{}")]
DS, DSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DC, DSEP, DE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def glm(**values: str) -> str:
    return "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>" for k, v in values.items())


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
    ("granite", f'<|tool_call|>[{{"name": "f", "arguments": {F}}}]', "", ONE),
    ("phi4_mini_json", f'functools[{{"name": "f", "arguments": {F}}}]', "", ONE),
    ("deepseek_v31", f"Hm\n{DS}{DC}f{DSEP}{F}{DE}{DC}g{DSEP}{G}{DE}{DSE}", "Hm", TWO),
    ("deepseek_v3", f"{DS}{DC}function{DSEP}f\n```json\n{F}\n```{DE}{DSE}", "", ONE),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{F}<|tool_call_end|><|tool_call_begin|>functions.g:1 <|tool_call_argument_begin|>{G}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        TWO,
    ),
    ("openai", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{F}<|call|>", "", ONE),
    (
        "openai",
        f"<|channel|>commentary to=functions.f<|message|>{F}<|call|><|start|>assistant"
        f"<|channel|>commentary to=functions.g <|message|>{G}",
        "",
        TWO,
    ),
    ("glm45", f"So\n<tool_call>f\n{glm(a='x')}\n</tool_call>\n<tool_call>g</tool_call>", "So", TAGGED),
    ("glm47", f"<tool_call>f{glm(a='x')}</tool_call><tool_call>g</tool_call>", "", TAGGED),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=g></function></tool_call>",
        "",
        TAGGED,
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "",
        TAGGED,
    ),
    ("pythonic", "[f(a='x'), g()]", "", TAGGED),
    ("pythonic", ' \n[ f( a = "x", ) , g( ) , ] \n', "", TAGGED),
    ("llama4_pythonic", "<|python_start|>[f(a='''x'''),g()]<|python_end|>", "", TAGGED),
    ("pythonic", "[f(a='x'), g()] So", "So", TAGGED),
    (
        "pythonic",
        "[a.b-c(n=-1.5, l=[1, (2,), {'k': None}], t=True)]",
        "",
        [("a.b-c", '{"n": -1.5, "l": [1, [2], {"k": null}], "t": true}')],
    ),
    ("olmo3", "Well\n<function_calls>\nf(a='x')\ng()\n</function_calls>", "Well", TAGGED),
    ("olmo3", "<function_calls>f(a='x'), g()</function_calls>", "", TAGGED),
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
    ("deepseek_v31", f"{DS} none"),
    ("deepseek_v31", f"{DS}{DC}f {{}}"),
    ("deepseek_v31", f"{DS}{DC}f{DE} text"),
    ("deepseek_v31", f"{DC}{DSEP}{{}}"),
    ("deepseek_v31", f"{DS}{DC}f{DSEP}[1]"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("openai", "<|channel|>final<|message|>yes"),
    ("openai", "<|channel|>commentary to=functions.f yes"),
    ("openai", "<|channel|>commentary to=" + "f" * 600),
    ("glm45", "a <tool_call>{x} b"),
    ("glm45", "<tool_call>"),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
    ("qwen3_coder", "<tool_call><fun"),
    ("minimax_m2", "<minimax:tool_call>no</minimax:tool_call>"),
    ("pythonic", "So: [f(a=1)]"),
    ("pythonic", "[f(x)] is the list of values of f"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[f"),
    ("pythonic", "[" + "f" * 1100),
    ("llama4_pythonic", "<|python_start|>print(1)"),
    ("olmo3", "<function_calls>none</function_calls>"),
    ("olmo3", "a <function_calls>"),
    ("olmo3", "a <function_ca"),
]


TEXTS = st.one_of(
    st.text(alphabet='[TOL_CAS]{}"<|>;x \n\\', max_size=40),
    st.lists(
        st.sampled_from(
            [DS, DSE, DC, DSEP, DE, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
             "</arg_value>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|channel|>", "f", "{",
             "}", "<|message|>", "commentary to=", "<minimax:tool_call>", '<invoke name="f">', "</invoke>", " ",
             "[", "f(", "a=", "'", ")", ",", "]", "<function_calls>", "</function_calls>", "<|python_start|>"]
        ),
        max_size=10,
    ).map("".join),
)  # fmt: skip


def pieces_of(parser: ToolParser, text: str, cuts: list[int]) -> Found:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    found: Found = []
    for low, high in pairwise(edges):
        found += parser.push(text[low:high])
    return found + parser.finish()


def put_together(found: Found) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls with their whole arguments); a call begins once, and its pieces come in order."""
    calls: list[tuple[str, str]] = []
    for part in found:
        if isinstance(part, str):
            continue
        if part.name is not None:
            assert part.call == len(calls)
            calls.append((part.name, ""))
        assert part.call == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return "".join(part for part in found if isinstance(part, str)), calls


def fed(name: str, text: str, cuts: list[int], **options: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = parser_class(name)(**options)
    shown, calls = put_together(pieces_of(parser, text, cuts))
    assert parser.num_calls == len(calls)
    return shown, calls


@pytest.mark.parametrize(("name", "text", "before", "calls"), FOUND)
@settings(max_examples=25)  # of each of 25 texts; and cut at every character
@given(cuts=CUTS)
def test_calls_do_not_depend_on_the_cuts(
    name: str, text: str, before: str, calls: list[tuple[str, str]], cuts: list[int]
) -> None:
    shown, found = fed(name, text, cuts)
    assert (shown.strip(), found) == (before, calls)
    every_character = list(range(len(text)))
    assert fed(name, text, every_character)[1] == calls
    assert fed(name, text, cuts, only_one=True)[1] == calls[:1]


@pytest.mark.parametrize(("name", "text"), TEXT)
@settings(max_examples=25)  # of each of 34 texts
@given(cuts=CUTS)
def test_what_is_no_call_stays_text(name: str, text: str, cuts: list[int]) -> None:
    shown, calls = fed(name, text, cuts)
    assert calls == [] and "".join(shown.split()) == "".join(text.split())


@given(st.sampled_from(sorted(PARSERS)), TEXTS, CUTS)
def test_no_text_is_lost(name: str, text: str, cuts: list[int]) -> None:
    shown, calls = fed(name, text, cuts)
    assert calls or "".join(shown.split()) == "".join(text.split())


def test_text_is_passed_on_at_once() -> None:
    for name in ("hermes", "mistral"):
        assert parser_class(name)().push("Well, [it") == ["Well, [it"]
    parser = parser_class("llama3_json")()
    assert parser.push("W") == ["W"] and parser.push('{"name": "f"}') == ['{"name": "f"}']


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": ', "}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("required", '{"name": "f", "arguments": ', "}"),
        ("named", "", ""),
    ],
)
def test_arguments_come_as_they_grow(name: str, before: str, after: str) -> None:
    arguments = '{"text": "' + "word " * 50 + '", "n": [1, {"b": null}]}'
    parsers = {"required": lambda: ForcedParser(None), "named": lambda: ForcedParser("f")}
    parser = parsers[name]() if name in parsers else parser_class(name)()
    assert put_together(parser.push(before)) == ("", [])
    told = 0
    for i, char in enumerate(arguments):
        for part in parser.push(char):
            assert isinstance(part, CallPiece) and (part.name == "f") == (told == 0)
            told += len(part.arguments)
        assert told == (i + 1 if i or name == "named" else 0)  # the first brace waits for a key
    end = [part for part in [*parser.push(after), *parser.finish()] if part]
    assert end == [] and parser.num_calls == 1


def test_arguments_that_were_passed_on_are_forgotten() -> None:
    reader = CallReader()
    reader.push('{"name": "f", "arguments": {"a": "')
    assert reader.certain
    for _ in range(100):
        assert reader.push("x" * 100) == ("x" * 100, "") and len(reader.raw) < 100
    assert reader.push('", "name": "g"}, "arguments": {"b": 1}, "name": "h"} rest') == (
        '", "name": "g"}',
        " rest",
    )
    assert reader.name == "f" and reader.over


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        ('{"id": "x", "name": "f", "more": [{"name": "g"}], "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        ('{"name": "f", "arguments": [1, 2]}', [("f", "[1, 2]")]),
        ('{"name": "f", "arguments": null}', [("f", "null")]),
        ('{"name": "f", "arguments": { }}', [("f", "{ }")]),
        ('{"na\\u006de": "\\u0066", "arguments": {"a": "</tool_call>"}}', [("f", '{"a": "</tool_call>"}')]),
        ('{"name": 5, "arguments": {"a": 1}}', []),
        ('{"arguments": {"a": 1}}', []),
        ('{"name": "f" "arguments": {"a": 1}}', []),
        ("{name: 'f', arguments: {}}", []),
        ('["name", "f"]', []),
    ],
)
@given(cuts=CUTS)
def test_calls_in_every_order(text: str, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    whole = f"a<tool_call>{text}</tool_call>b"
    shown, found = fed("hermes", whole, cuts)
    assert found == calls and shown == ("ab" if calls else whole)


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        # Cut short: what there is, as OpenAI does.
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "b"}', "", [("f", '{"a": "b"}')]),
        ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
        # No JSON after all: the call ends there, and the text goes on behind its mark.
        ('<tool_call>{"name": "f", "arguments": {"a": (1)}}</tool_call> x', "x", [("f", '{"a": ')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', "x", [("f", '{"a": 1')]),
        # Without an end mark.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}} x', "x", [("f", '{"a": 1}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
    ],
)
@given(cuts=CUTS)
def test_calls_that_break_off(text: str, shown: str, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    assert fed("hermes", text, cuts) == (shown, calls)


def test_text_and_calls_keep_their_order() -> None:
    text = 'a<tool_call>{"name": "f"}</tool_call>b<tool_call>{"name": "g"}</tool_call>c'
    found = pieces_of(parser_class("hermes")(), text, [])
    assert [part if isinstance(part, str) else part.name for part in found] == ["a", "f", "b", "g", "c"]


@given(CUTS)
def test_forced_calls(cuts: list[int]) -> None:
    text = f'{{"name":"f","arguments":{F}}}'
    assert put_together(pieces_of(ForcedParser(None), text, cuts)) == ("", [("f", F)])
    assert put_together(pieces_of(ForcedParser("f"), F, cuts)) == ("", [("f", F)])
    assert put_together(pieces_of(ForcedParser("f"), "", cuts)) == ("", [("f", "")])
    for short in range(len('{"name":"f"')):
        assert put_together(pieces_of(ForcedParser(None), text[:short], cuts)) == ("", [("", text[:short])])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
).filter(lambda v: isinstance(v, list | dict))


@pytest.mark.parametrize("examples", [35, pytest.param(100, marks=pytest.mark.slow)])
def test_ends_of_json(examples: int) -> None:
    given(VALUES, st.text(), CUTS)(settings(max_examples=examples)(ends_of_json))()


def ends_of_json(value: Any, rest: str, cuts: list[int]) -> None:
    text = json.dumps(value)
    scan = JsonScan()
    for cut in sorted({cut % len(text) for cut in cuts}):
        scan.scan(text[:cut])
        assert scan.end is scan.broken is None
    scan.scan(text + rest)
    assert scan.end == len(text) and scan.broken is None


def test_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3_json'"):
        parser_class("llama3-json")


def test_values_between_tags_have_the_types_of_the_schema() -> None:
    properties = {
        "text": {"type": "string"},
        "both": {"type": ["string", "null"]},
        "many": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "list": {"type": "array"},
        "flag": {"type": "boolean"},
        "pick": {"enum": ["1", "2"]},
        "count": {"type": "integer"},
    }
    values = {
        "text": "5", "both": "null", "many": "7", "list": '[1, "a"]', "flag": "true", "pick": "1", "count": "five",
        "other": '{"a": 1}', "free": 'say "hi"\\n',
    }  # fmt: skip
    text = f"<tool_call>f\n{glm(**values)}\n</tool_call>"
    schemas = {"f": {"type": "object", "properties": properties}}
    for cuts in ([], list(range(len(text)))):
        ((name, arguments),) = fed("glm45", text, cuts, schemas=schemas)[1]
        assert name == "f"
        assert json.loads(arguments) == {
            "text": "5", "both": None, "many": 7, "list": [1, "a"], "flag": True, "pick": "1", "count": "five",
            "other": {"a": 1}, "free": 'say "hi"\\n',
        }  # fmt: skip


def test_text_between_tags_goes_on_as_it_comes() -> None:
    schemas = {"f": {"properties": {"a": {"type": "string"}}}}
    parser = parser_class("qwen3_coder")(schemas=schemas)
    assert parser.push("<tool_call>\n<function=f>\n<parameter=a>\n") == [
        CallPiece(0, "f", "{"),
        CallPiece(0, None, '"a": "'),
    ]
    assert parser.push('one "two"\n') == [CallPiece(0, None, 'one \\"two\\"')]
    assert parser.push("three") == [CallPiece(0, None, "\\nthree")]
    assert parser.push("\n</parameter>\n</function>") == [CallPiece(0, None, '"')]
    assert parser.finish() == [CallPiece(0, None, "}")]


def test_a_call_between_tags_that_is_cut_short() -> None:
    parser = parser_class("glm45")()
    found = parser.push("<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2") + parser.finish()
    assert put_together(found) == ("", [("f", '{"a": [1, 2')])
    parser = parser_class("glm45")()
    found = parser.push("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>oops") + parser.finish()
    assert put_together(found) == ("oops", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (
            r"'it\'s \x41\u00e9\U0001F600\101\n\q \N{BULLET}'",
            "it's A\xe9\U0001f600A\n\\q \N{BULLET}",
        ),
        ("'a\\\nb'", "ab"),
        (r"'\xzz \N{no such name}'", r"\xzz \N{no such name}"),
        ("\"say 'hi'\"", "say 'hi'"),
        ('"""two \'a\' "b" \'\'\nlines"""', "two 'a' \"b\" ''\nlines"),
        ("''", ""),
        ('""', ""),
        (r"'\ud83d\ude00'", "\U0001f600"),
        ("None", None),
        ("[1, 2.5, .5, -3, +4, 0x10, 1_000, 1e-3]", [1, 2.5, 0.5, -3, 4, 16, 1000, 0.001]),
        ("{'a': (True, False), 'b': {}, \"c, ]\": '),'}", {"a": [True, False], "b": {}, "c, ]": "),"}),
        ("{1, 2}", "{1, 2}"),
        ("1e999", "1e999"),
        ("{1: 2}", "{1: 2}"),
        ("Oslo", "Oslo"),
    ],
)
def test_values_of_pythonic_calls(literal: str, value: Any) -> None:
    text = f"[f(a={literal}, b=1)]"
    whole = fed("pythonic", text, [])[1]
    assert fed("pythonic", text, list(range(len(text))))[1] == whole
    assert json.loads(whole[0][1]) == {"a": value, "b": 1}


def test_a_value_that_is_no_literal_ends_the_call() -> None:
    assert fed("pythonic", "[f(a='a' + 'b')]", []) == (" + 'b')]", [("f", '{"a": "a"}')])


def test_deep_values_are_text() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    ((_, arguments),) = fed("pythonic", f"[f(a={deep})]", [])[1]
    assert json.loads(arguments) == {"a": deep}


def test_strings_of_pythonic_calls_come_as_they_grow() -> None:
    parser = parser_class("pythonic")()
    assert put_together([*parser.push("[f(text='w"), *parser.push("ord ")])[1] == [("f", '{"text": "word ')]
    for _ in range(50):
        assert [part[2] for part in parser.push("word ") if isinstance(part, CallPiece)] == ["word "]
    found = [*parser.push("', n=3)]"), *parser.finish()]
    assert "".join(part.arguments for part in found if isinstance(part, CallPiece)) == '", "n": 3}'
    assert fed("pythonic", "[f(a='b", [])[1] == [("f", '{"a": "b')]

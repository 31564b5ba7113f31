"""Reasoning and answer: divided in the same way however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.errors import ConfigError
from draftwise.sampling.params import SamplingParams
from draftwise.server.reader import AnswerReader, Reading, joined
from draftwise.server.reasoning import REASONING_PARSERS, Start, reasoning_class
from draftwise.server.tool_parsers import parser_class

CUTS = st.lists(st.integers(0, 500), max_size=12)
HARMONY = (
    "<|channel|>analysis<|message|>Hm <b>?<|end|><|start|>assistant<|channel|>commentary<|message|>First. <|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes <|no|>"
)
CASES: list[tuple[str, Start, str, str, str]] = [
    ("qwen3", "unknown", "<think>\nHm <b>\n</think>\n\nYes", "Hm <b>", "Yes"),
    ("qwen3", "unknown", "Yes <think>no</think>", "", "Yes <think>no</think>"),
    ("qwen3", "unknown", " \n<think>cut", "cut", ""),
    ("qwen3", "unknown", "<think></think>Yes", "", "Yes"),
    ("qwen3", "unknown", "<thin", "", "<thin"),
    ("qwen3", "open", "Hm</think>Yes", "Hm", "Yes"),
    ("qwen3", "closed", "<think> is a tag", "", "<think> is a tag"),
    ("deepseek_r1", "unknown", "Hm\n</think>\nYes </think>", "Hm", "Yes </think>"),
    ("deepseek_r1", "unknown", "<think>Hm</think>Yes", "Hm", "Yes"),
    ("deepseek_r1", "unknown", "never ends </thin", "never ends </thin", ""),
    ("mistral", "unknown", "[THINK]Hm[/THINK]Yes", "Hm", "Yes"),
    ("seed_oss", "unknown", "<seed:think>Hm</seed:think>Yes", "Hm", "Yes"),
    ("granite", "unknown", "Here is my thought process: Hm Here's my response: Yes", "Hm", "Yes"),
    ("granite", "unknown", "Here is a thing", "", "Here is a thing"),
    ("openai_gptoss", "unknown", HARMONY, "Hm <b>?", "First. Yes <|no|>"),
    ("openai_gptoss", "unknown", "plain", "", "plain"),
    (
        "openai_gptoss",
        "open",
        "Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
        "Hm",
        "Yes",
    ),
    ("openai_gptoss", "closed", "Yes", "", "Yes"),
    ("openai_gptoss", "unknown", "<|channel|>analysis<|message|>Hm<|en", "Hm<|en", ""),
]


def read(
    name: str, start: Start, text: str, cuts: list[int], tools: str | None = None
) -> tuple[str, str, list[str]]:
    reader = AnswerReader(reasoning_class(name)(start), None if tools is None else parser_class(tools)())
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    parts = [part for low, high in pairwise(edges) for part in reader.push(text[low:high])]
    thoughts, answer, calls = joined([*parts, *reader.finish()])
    whole = [""] * (1 + max((call.call for call in calls), default=-1))
    for call in calls:
        whole[call.call] += f"{call.name or ''}{call.arguments}"
    return thoughts, answer, whole


@pytest.mark.parametrize(("name", "start", "text", "thoughts", "answer"), CASES)
@given(cuts=CUTS)
def test_the_division_does_not_depend_on_the_cuts(
    name: str, start: Start, text: str, thoughts: str, answer: str, cuts: list[int]
) -> None:
    assert read(name, start, text, cuts) == (thoughts, answer, [])
    assert read(name, start, text, list(range(len(text)))) == (thoughts, answer, [])


@given(st.sampled_from(sorted(REASONING_PARSERS)), st.text(alphabet="<|>/thinkmesag[] \n", max_size=60), CUTS)
def test_nothing_is_lost(name: str, text: str, cuts: list[int]) -> None:
    """Of texts without marks, which these are but for rare chance."""
    thoughts, answer, _ = read(name, "unknown", text, cuts)
    kind = reasoning_class(name)
    if not any(mark in text for mark in kind.marks) and not any(
        m.startswith(text.strip()) for m in kind.marks
    ):
        assert "".join((thoughts + answer).split()) == "".join(text.split())


def test_calls_behind_reasoning() -> None:
    text = '<think>{"name": "x"}</think>So <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert read("qwen3", "unknown", text, [3, 40], "hermes") == ('{"name": "x"}', "So", ['f{"a": 1}'])
    harmony = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    other = '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"b": 2}<|call|>'
    for cuts in ([], list(range(300))):
        assert read("openai_gptoss", "unknown", harmony + other, cuts, "openai") == (
            "Hm", "", ['f{"a": 1}', 'g{"b": 2}'],
        )  # fmt: skip
    thinking_of_it = "<think>I call <tool_call>{}</tool_call>"
    assert read("qwen3", "unknown", thinking_of_it, [], "hermes")[2] == []


def test_thoughts_are_passed_on_at_once() -> None:
    reader = AnswerReader(reasoning_class("qwen3")(), None)
    assert joined(reader.push("<think>I th"))[0] == "I th"
    assert joined(reader.push("ink < 5"))[0] == "ink < 5"
    assert joined(reader.push("</think>Y"))[1] == "Y"


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "start"),
    [
        ("qwen3", "<assistant>", None, "unknown"),
        ("qwen3", "<assistant><think>\n", None, "open"),
        ("qwen3", "<assistant><think>\n\n</think>\n\n", None, "closed"),
        ("qwen3", "what is <think>?<assistant>", None, "unknown"),
        ("qwen3", "<assistant><think>Hm", "<think>Hm", "open"),
        ("qwen3", "<assistant>Yes", "Yes", "closed"),
        ("qwen3", "<assistant>", "", "unknown"),
        ("deepseek_r1", "<assistant><think>a</think>b", "<think>a</think>b", "closed"),
        ("openai_gptoss", "<|start|>assistant", None, "unknown"),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", None, "open"),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", None, "closed"),
    ],
)
def test_what_a_prompt_says(name: str, prompt: str, continued: str | None, start: Start) -> None:
    assert reasoning_class(name).start_of(prompt, continued) == start


@pytest.mark.parametrize(
    ("name", "start", "after", "opened_by"),
    [
        ("qwen3", "unknown", ("</think>",), "<think>"),
        ("qwen3", "open", ("</think>",), None),
        ("qwen3", "closed", None, None),
        ("deepseek_r1", "unknown", ("</think>",), None),
        ("openai_gptoss", "unknown", ("<|channel|>final<|message|>",), None),
        ("openai_gptoss", "closed", None, None),
    ],
)
def test_where_a_grammar_begins(
    name: str, start: Start, after: tuple[str, ...] | None, opened_by: str | None
) -> None:
    reading = Reading(reasoning_class(name), start)
    spec = reading.params(SamplingParams(structured_outputs={"regex": "a+"})).structured_outputs  # type: ignore[arg-type]
    assert spec is not None and (spec.after, spec.opened_by) == (after, opened_by)
    own = SamplingParams(structured_outputs={"regex": "a+", "after": "so:"})  # type: ignore[arg-type]
    assert reading.params(own) is own, "what the request says itself holds"
    plain = SamplingParams()
    assert reading.params(plain) is plain


def test_tokens_of_reasoning() -> None:
    tokens = ["<think>", "Hm", " so", "</think>", "Yes", "."]
    reading = Reading(reasoning_class("qwen3"))
    assert reading.count(range(6), tokens.__getitem__) == 4
    assert reading.count(range(2), tokens.__getitem__) == 2
    assert reading.count([4, 5], tokens.__getitem__) == 0
    assert Reading().count(range(6), tokens.__getitem__) == 0


def test_unknown_parsers_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        reasoning_class("qwen")


def test_a_header_that_never_ends_is_text() -> None:
    text = "<|channel|>analysis" + "x" * 2000
    thoughts, answer, _ = read("openai_gptoss", "unknown", text, list(range(0, 2000, 50)))
    assert (thoughts, answer) == ("", text)


def test_tokens_are_counted_as_they_come() -> None:
    asked: list[int] = []
    tokens = ["<think>", "Hm", "</think>", "Yes", "."]

    def text(token: int) -> str:
        asked.append(token)
        return tokens[token]

    counter = Reading(reasoning_class("qwen3")).counter(text)
    counter.add([0, 1])
    assert counter.count == 2
    counter.add([2, 3])
    counter.add([4])
    assert counter.count == 3 and asked == [0, 1, 2], "nothing is looked at behind the end of reasoning"

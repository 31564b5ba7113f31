"""What a parser of tool calls finds does not depend on how the text is cut, whatever the text is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_server_tool_formats import CUTS, DC, DE, DSEP, FOUND, ONE, TEXT, F, fed

TO = "<|channel|>commentary to="
WORDS: dict[str, list[list[str]]] = {}
"""The texts of each parser as marks, words and single characters."""
for _name, _text, *_ in [*FOUND, *TEXT]:
    if len(_text) < 500:
        WORDS.setdefault(_name, []).append(re.findall(r"<[^<>]+>|\[[A-Z_]+\]|\w+|.", _text, re.DOTALL))


def texts_of(name: str) -> st.SearchStrategy[tuple[str, str]]:
    """A parser, and pieces of its texts one behind the other."""
    piece = st.tuples(st.sampled_from(WORDS[name]), st.integers(0, 25), st.integers(1, 25)).map(
        lambda of: "".join(of[0][of[1] :][: of[2]])
    )
    return st.tuples(st.just(name), st.lists(piece, min_size=1, max_size=6).map("".join))


@settings(max_examples=500)
@given(st.sampled_from(sorted(WORDS)).flatmap(texts_of), CUTS)
def test_nothing_depends_on_the_cuts(case: tuple[str, str], cuts: list[int]) -> None:
    name, text = case
    whole = fed(name, text, [])
    assert fed(name, text, list(range(len(text)))) == whole and fed(name, text, cuts) == whole


@pytest.mark.parametrize(
    ("name", "text", "shown", "calls"),
    [
        # Marks between that of a call and its arguments: the first one begins no call.
        ("deepseek_v31", f"{DC}x{DC}f{DSEP}{F}{DE}", f"{DC}x", ONE),
        ("deepseek_v31", f"{DC}x{DE}{DC}f{DSEP}{F}{DE}", f"{DC}x{DE}", ONE),
        ("openai", f"{TO}f<|message|><|call|>{{}}", f"{TO}f<|message|><|call|>{{}}", []),
        # White space behind calls is dropped, and at the end of the text; behind what is none it stays.
        ("llama4_pythonic", "<|python_start|>[f()]<|python_end|> \nSo \n", "So", [("f", "{}")]),
        ("olmo3", "<function_calls>f()</function_calls>\nSo ", "So", [("f", "{}")]),
        ("pythonic", "[f(a=] \n", "]", [("f", '{"a": ""}')]),
        ("mistral", f"[TOOL_CALLS]f{F}\n So", "So", ONE),
        ("mistral", "[TOOL_CALLS]{x} So", "[TOOL_CALLS]{x} So", []),
        # Names of a thousand characters are none.
        ("glm45", f"<tool_call>{'f' * 1100}</tool_call>", f"<tool_call>{'f' * 1100}</tool_call>", []),
        ("pythonic", f"[{'f' * 1100}()]", f"[{'f' * 1100}()]", []),
    ],
)
def test_one_piece_and_many(name: str, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    for cuts in ([], list(range(len(text)))):
        assert fed(name, text, cuts) == (shown, calls)

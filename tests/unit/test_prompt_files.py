"""Prompts of the user's own: the lines of known benchmarks, and lines that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_cli_bench import FakeLLM

from draftwise.bench.accept import OVERALL, accept
from draftwise.bench.prompt_files import read_prompt_file
from draftwise.errors import ConfigError


class Letters:
    """A token is a character."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(char) for char in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def read(
    path: Path, *lines: Any, template: str | None = None, **options: Any
) -> tuple[dict[str, list[str]], int]:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    options = {"room": 100, **options}
    workloads, left_out = read_prompt_file(path, Letters(template), **options)
    return {w.name: ["".join(map(chr, ids)) for ids in w.prompts] for w in workloads}, left_out


SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}
GSM8K = {"question": "How many?", "answer": "4 #### 4"}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f(x):\n",
    "entry_point": "f",
    "canonical_solution": "    pass",
}
SHARE_GPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
MESSAGES = {
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
    "category": "chat",
}


def test_known_forms(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = (SPEC_BENCH, "", GSM8K, HUMAN_EVAL, SHARE_GPT, MESSAGES, {**SPEC_BENCH, "turns": ["More."]})
    assert read(path, *lines) == (
        {"writing": ["Write.", "More."], "mine": ["How many?", "def f(x):\n", "Hi"], "chat": ["U"]},
        0,
    )
    chat, _ = read(path, *lines, template="t")
    assert chat == {
        "writing": ["<user>Write.<assistant>", "<user>More.<assistant>"],
        "mine": ["<user>How many?<assistant>", "def f(x):\n", "<user>Hi<assistant>"],
        "chat": ["<system>S<user>U<assistant>"],
    }


def test_some_of_each_category(tmp_path: Path) -> None:
    lines = [{"prompt": f"{kind}{i}", "category": kind} for i in range(9) for kind in "ab"]
    some, _ = read(tmp_path / "x.jsonl", *lines, per_category=3, seed=1)
    assert [len(prompts) for prompts in some.values()] == [3, 3]
    assert all(prompts == sorted(prompts) and prompts[0][0] == kind for kind, prompts in some.items())
    again, _ = read(tmp_path / "x.jsonl", *lines, per_category=3, seed=1)
    other, _ = read(tmp_path / "x.jsonl", *lines, per_category=3, seed=2)
    assert some == again != other


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    assert read(tmp_path / "x.jsonl", {"prompt": "a" * 9}, {"prompt": "b" * 10}, room=10) == (
        {"x": ["a" * 9]},
        1,
    )
    with pytest.raises(ConfigError, match="no prompt is shorter than 10 tokens"):
        read(tmp_path / "x.jsonl", {"prompt": "b" * 10}, room=10)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object"),
        ("[" * 100_000, "line 2 is not a JSON object"),
        ({"answer": "x"}, "line 2 has no prompt; expected one of turns, question"),
        ({"turns": []}, "line 2 has no prompt"),
        ({"turns": [5]}, "line 2 has no prompt"),
        ({"prompt": 5}, "line 2 has no prompt"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2 has no prompt"),
        ({"messages": [5]}, "line 2 has no prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "line 2 has no prompt"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "x.jsonl", {"prompt": "ok"}, line)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no prompt in it"):
        read(tmp_path / "x.jsonl", "")
    with pytest.raises(ConfigError, match=r"--prompts .*none\.jsonl"):
        read_prompt_file(tmp_path / "none.jsonl", Letters(), 10)
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="bad"):
        read_prompt_file(tmp_path / "bad.jsonl", Letters(), 10)


def test_a_table_of_categories_ends_with_all_prompts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": c, "category": c}) for c in "aab"))
    workloads, _ = read_prompt_file(path, Letters(), 10)
    rows = accept(
        FakeLLM(ignore_eos=False), workloads, methods=["ngram", "suffix"], output_tokens=4, ignore_eos=False
    )  # type: ignore[arg-type]
    assert [(r.workload, r.method) for r in rows] == [
        (name, method) for name in ("a", "b", OVERALL) for method in ("ngram", "suffix")
    ]
    assert [r.num_drafts for r in rows[::2]] == [4, 2, 6]

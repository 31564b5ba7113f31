"""Commands that talk: conversations with their commands, completing text, tokens, files of requests."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from draftwise.cli import main

SMALL = ["--max-model-len", "256", "--num-kv-blocks", "64"]
GREEDY = ["--temperature", "0", "--max-tokens", "4", "--ignore-eos"]


def talk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lines: str, *command: str
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main.main([*command, *SMALL, *GREEDY]) == 0
    return capsys.readouterr()


def one(capsys: pytest.CaptureFixture[str], prompt: str) -> str:
    assert main.main(["generate", prompt, "--json", *SMALL, *GREEDY]) == 0
    return str(json.loads(capsys.readouterr().out)["outputs"][0]["text"])


def test_commands_of_a_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = one(capsys, "import os")
    lines = [
        "/stats off",
        "import os",
        "/undo",
        "import os",
        "/retry",
        "/clear",
        "/retry",
        "import os",
        "/help",
    ]
    lines += ["/settings", "/qui", "/set top_p 7", "/quit"]
    out, err = talk(capsys, monkeypatch, "\n".join(lines) + "\n", "chat")
    assert out.count(first + "\n") == 4, "once, after /undo, after /retry, after /clear"
    assert "there is no message yet" in err and "did you mean '/quit'" in err and "top_p is 7" in err
    assert "4 tokens in" not in err, "/stats off"
    assert "max_tokens = 4" in out and "/system TEXT" in out and 'begin with """' in out


def test_what_is_set_holds_and_several_lines_are_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = one(capsys, "class A:\n    def f(self):\n        return")
    block = '"""\nclass A:\n    def f(self):\n        return\n"""\n'
    slashes = "class A:\\\n    def f(self):\\\n        return\n"
    out, err = talk(
        capsys, monkeypatch, f"{block}/clear\n{slashes}/clear\n/set max_tokens 2\n{slashes}", "chat"
    )
    assert out.count(wanted) == 2 and err.count("4 tokens in") == 2 and err.count("2 tokens in") == 1


def test_completing_has_no_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = one(capsys, "import os")
    out, err = talk(capsys, monkeypatch, "import os\nimport os\n", "complete")
    assert out == f"{wanted}\n" * 2 and err.count("4 tokens in") == 2


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_one_text_can_be_given_by_vllms_name(capsys: pytest.CaptureFixture[str], command: str) -> None:
    texts = []
    for given in (["import os"], ["--quick", "import os"], ["-q", "import os"]):
        assert main.main([command, *given, "--max-tokens", "4", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].strip() and texts == texts[:1] * 3
    assert main.main([command, "import os", "--quick", "import re"]) == 2
    assert "--quick: the text is given twice" in capsys.readouterr().err


def test_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tokenize", "def main(", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["count"] == len(found["token_ids"]) > 1
    assert main.main(["tokenize", "--decode", *map(str, found["token_ids"])]) == 0
    assert capsys.readouterr().out == "def main(\n"
    assert main.main(["tokenize", "def main("]) == 0
    assert f"{found['count']} tokens, 9 characters" in capsys.readouterr().out
    assert main.main(["tokenize", "--decode", "99999999"]) == 2
    assert "is not a token of this tokenizer" in capsys.readouterr().err
    assert main.main(["tokenize"]) == 2
    assert "give texts" in capsys.readouterr().err


def test_a_file_of_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wanted = one(capsys, "import os")
    body = {"model": "draftwise-demo", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": "import os"}},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
         "body": body | {"messages": [{"role": "user", "content": "import os"}]}},
        {"custom_id": "refused", "url": "/v1/completions", "body": body | {"prompt": "x", "temperature": -1}},
        {"custom_id": "nowhere", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "stream", "url": "/v1/completions", "body": body | {"prompt": "x", "stream": True}},
        {"custom_id": "", "url": "/v1/completions", "body": {}},
    ]  # fmt: skip
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join([*map(json.dumps, lines), "no json", ""]))
    command = ["run-batch", "-i", str(asked), "-o", str(answered), *SMALL]
    assert main.main(command) == 1
    assert "7 requests answered, 5 of them with an error" in capsys.readouterr().err
    found = {answer["custom_id"]: answer for answer in map(json.loads, answered.read_text().splitlines())}
    assert found["text"]["response"]["body"]["choices"][0]["text"] == wanted
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == wanted
    assert found["text"]["response"]["status_code"] == 200 and found["text"]["error"] is None
    assert found["refused"]["response"]["status_code"] == 400
    assert "temperature" in found["refused"]["response"]["body"]["error"]["message"]
    assert "url: one of" in found["nowhere"]["error"]["message"] and found["nowhere"]["response"] is None
    assert "stream" in found["stream"]["error"]["message"] and "custom_id" in found[""]["error"]["message"]
    asked.write_text(json.dumps(lines[0]))
    assert main.main(command) == 0
    capsys.readouterr()
    if Path("/dev/full").exists():
        assert main.main(["run-batch", "-i", str(asked), "-o", "/dev/full", *SMALL]) == 1
        assert "draftwise: --output-file /dev/full: No space left on device" in capsys.readouterr().err
    for wrong in (["-i", str(tmp_path / "none"), "-o", "-"], ["-i", str(answered.parent), "-o", "-"]):
        assert main.main(["run-batch", *wrong, *SMALL]) == 2


def test_the_line_that_the_help_shows_is_answered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["run-batch", "--help"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    asked = tmp_path / "in.jsonl"
    asked.write_text(line)
    assert main.main(["run-batch", "-i", str(asked), "-o", str(tmp_path / "out.jsonl"), *SMALL]) == 0


@pytest.mark.parametrize("command", [["complete"], ["complete", "-"]])
def test_stdin_that_is_not_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ok \xff\n"), encoding="utf-8"))
    assert main.main([*command, *SMALL]) == 2
    assert "stdin: not UTF-8 text" in capsys.readouterr().err

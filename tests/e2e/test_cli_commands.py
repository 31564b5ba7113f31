"""The commands on the embedded models: output, streaming, exit codes of a real process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise.cli import main
from draftwise.config.embedded import embedded_path

DRAFTWISE = [sys.executable, "-m", "draftwise"]
# A shell that runs the tests in the background has them ignore Ctrl-C, and all that they start.
INTERRUPTIBLE = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, sys.argv[1:])
"""
SMALL = ["--num-threads", "1", "--kv-cache-memory", "64MiB"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Cores are shared; what a command sets for its process must not stay set for other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main.main([*arguments, *SMALL]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def assert_narrow(text: str) -> None:
    """A terminal of 80 columns folds no line."""
    assert [line for line in text.splitlines() if len(line) > 80] == []


def generate_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    out, _ = run(capsys, "generate", "--json", *arguments)
    return [json.loads(line) for line in out.splitlines()]


def test_generate_streams_text_then_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "generate", "def main(", "--temperature", "0", "--max-tokens", "24")
    assert len(out.strip()) > 0
    assert err.count("\n") == 1
    for word in ("24 tokens", "tokens/s", "mean acceptance length", "mtp"):
        assert word in err
    (same,) = generate_json(capsys, "def main(", "--temperature", "0", "--max-tokens", "24")
    assert same["outputs"][0]["text"] + "\n" == out
    echoed, _ = run(capsys, "generate", "def main(", "--temperature", "0", "--max-tokens", "24", "--echo")
    assert echoed == "def main(" + out


def test_methods_give_the_same_greedy_text(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["import os\nimport sys\n\n\ndef", "--temperature", "0", "--max-tokens", "32"]
    texts = {}
    for method in ("none", "ngram", "draft_model"):
        (result,) = generate_json(capsys, *common, "--speculative-method", method)
        texts[method] = result["outputs"][0]["text"]
        steps = result["metrics"]["speculation"]["steps_by_method"]
        assert set(steps) <= {"none", method}
    assert texts["ngram"] == texts["none"] and texts["draft_model"] == texts["none"]


def test_generate_file_with_a_bad_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [{"prompt": "def a("}, {"prompt_token_ids": [10**6]}, {"prompt_token_ids": [5, 6, 7]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out, err = run(
        capsys,
        "generate",
        "--file",
        str(tmp_path / "p.jsonl"),
        "--json",
        "--max-tokens",
        "4",
        "--ignore-eos",
        code=2,
    )
    results = [json.loads(line) for line in out.splitlines()]
    assert [r["index"] for r in results] == [0, 1, 2]
    assert "1000000" in results[1]["error"] and "1000000" in err
    assert [len(results[i]["outputs"][0]["token_ids"]) for i in (0, 2)] == [4, 4]
    assert results[0]["metrics"]["ttft"] > 0


def test_generate_samples_and_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["class A", "--n", "2", "--seed", "3", "--max-tokens", "6", "--logprobs", "2", "--ignore-eos"]
    (first,) = generate_json(capsys, *arguments)
    (again,) = generate_json(capsys, *arguments)
    assert [o["text"] for o in first["outputs"]] == [o["text"] for o in again["outputs"]]
    assert first["outputs"][0]["token_ids"] != first["outputs"][1]["token_ids"]
    positions = first["outputs"][0]["logprobs"]
    assert len(positions) == 6 and all(2 <= len(p) <= 3 and p[0]["logprob"] <= 0 for p in positions)


def test_generate_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--max-tokens", "8", "--temperature", "0", "--json"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f(x):\n"), encoding="utf-8"))
    out, _ = run(capsys, "generate", "-", *arguments)
    assert json.loads(out)["prompt"] == "def f(x):\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", ""], "empty"),
        (["generate", "x" * 60_000], "max_model_len"),
        (["generate", "x", "--speculation", '{"method": "eagle"}'], "eagle"),
        (["generate", "x", "--speculation", '{"mthod": "ngram"}'], "method"),
    ],
)
def test_bad_requests_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    out, err = run(capsys, *arguments, code=2)
    assert word in err and err.count("\n") == 1 and out == ""


def test_a_folder_that_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, err = run(capsys, "generate", "x", "--model", str(tmp_path), code=2)
    assert err.count("\n") == 1 and str(tmp_path) in err


def test_chat_works_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    text, err = run(capsys, "chat", "def add(a, b):\n", "--max-tokens", "8", "--temperature", "0")
    (same,) = generate_json(capsys, "def add(a, b):", "--max-tokens", "8", "--temperature", "0")
    assert text == same["outputs"][0]["text"] + "\n" and "8 tokens" in err


def test_chat_on_a_base_model_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(embedded_path("target"), base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    _, err = run(capsys, "chat", "hello", "--model", str(base), code=2)
    assert err.count("\n") == 1, err
    assert "no chat template" in err and "draftwise generate" in err and "--chat-template" in err


TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_chat_with_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--chat-template", TEMPLATE, "--max-tokens", "8", "--temperature", "0"]
    text, err = run(capsys, "chat", "add two numbers", "--system", "be brief", *common)
    assert "8 tokens" in err
    out, _ = run(capsys, "chat", "add two numbers", "--system", "be brief", "--json", *common)
    answer = json.loads(out)
    assert answer["prompt"] == "# system: be brief\n# user: add two numbers\n"
    assert answer["outputs"][0]["text"] + "\n" == text


def test_a_conversation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n/clear\ntwo\n/quit\nnever\n"))
    _, err = run(capsys, "chat", "--chat-template", TEMPLATE, "--max-tokens", "4", "--ignore-eos")
    assert err.count("4 tokens in") == 2


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "env", "--json")[0])
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["engine"]["default_method"] == "mtp"
    assert facts["guarantees"]["lossless"] is True
    assert facts["kernels"].startswith(("native", "torch"))
    text, _ = run(
        capsys, "env", "--speculative-config", '{"method": "ngram", "rejection_sample_method": "typical"}'
    )
    assert "lossless              no" in text


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "demo", "--json", "--rounds", "1", "--max-tokens", "16")[0])
    assert [m["method"] for m in facts["methods"]] == ["none", "mtp", "draft_model", "ngram", "suffix"]
    assert all(m["equal_tokens"] for m in facts["methods"])
    text, _ = run(capsys, "demo", "--rounds", "1", "--max-tokens", "16")
    assert "def main():" in text and "plain" in text and "yes" in text
    assert facts["text"].strip()[:8] in text
    assert_narrow(text)


def test_bench_latency(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompts", "2", "--rounds", "1", "--output-tokens", "12", "--prompt-tokens", "48"]
    facts = json.loads(run(capsys, "bench", "latency", "--json", *small)[0])
    rows = facts["results"]
    assert [(r["temperature"], r["method"]) for r in rows] == [
        (t, m) for t in (0.0, 0.8) for m in ("none", "mtp", "draft_model", "ngram", "suffix")
    ]
    assert all(r["tokens_per_second"] > 0 and r["num_samples"] == 2 for r in rows)
    assert rows[0]["speedup"] is None and rows[1]["speedup"] > 0
    assert all(r["equal_tokens"] for r in rows[:5])
    assert facts["environment"]["packages"] and facts["settings"]["rounds"] == 1
    table, note = run(capsys, "bench", "latency", *small, "--methods", "ngram", "--temperatures", "0")
    assert "plain" in table and "ngram" in table and "draft_model" not in table
    assert "2/2" in table and "kernels: " in note
    assert_narrow(table)


def test_bench_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--rounds", "1", "--output-tokens", "8", "--prompt-tokens", "32", "--concurrency", "1", "4"]
    rows = json.loads(run(capsys, "bench", "throughput", "--json", *small)[0])["results"]
    assert [(r["concurrency"], r["method"]) for r in rows] == [
        (n, m) for n in (1, 4) for m in ("none", "mtp", "draft_model", "ngram", "suffix")
    ]
    assert rows[0]["scaling"] == 1 and all(row["scaling"] > 0 for row in rows)
    table = run(capsys, "bench", "throughput", *small, "--methods", "none")[0]
    assert "requests" in table
    assert_narrow(table)


def test_bench_accept(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompts", "1", "--output-tokens", "16", "--prompt-tokens", "64"]
    chosen = ["--methods", "mtp", "ngram", "suffix"]
    rows = json.loads(run(capsys, "bench", "accept", "--json", *small, *chosen)[0])["results"]
    assert [(r["workload"], r["method"]) for r in rows] == [
        (w, m)
        for w in ("code", "edit", "copy", "random")
        for m in ("mtp", "mtp/tree", "ngram", "suffix", "suffix/tree")
    ]
    for row in rows:
        if row["num_drafts"]:
            accepted = row["acceptance_per_position"]
            assert row["mean_acceptance_length"] == pytest.approx(1 + sum(accepted))
            assert list(accepted) == sorted(accepted, reverse=True)
    everything = run(capsys, "bench", "accept", *small, "--workloads", "copy")[0]
    assert_narrow(everything)
    assert all(name in everything for name in ("copy", "draft_model", "eagle3", "medusa", "mtp", "hybrid"))


# A real process.


def test_interrupting_a_process() -> None:
    arguments = [
        "generate",
        "def main(",
        "--max-tokens",
        "1000",
        "--ignore-eos",
        "--temperature",
        "0",
        *SMALL,
    ]
    for _ in range(3):  # on a busy machine it may have ended before the signal came
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, *DRAFTWISE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)  # it streams: interrupt it in mid-flight
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert b"Traceback" not in err
        if process.returncode != 0:
            break
    assert process.returncode == 130, err


def test_interrupting_a_conversation() -> None:
    """On a terminal: Ctrl-C in an answer gives the prompt back, at the prompt it clears the line, and twice it ends
    with 130."""
    terminal, inner = pty.openpty()
    on_terminal = "import os; os.login_tty(0)\n" + INTERRUPTIBLE
    arguments = ["chat", "--chat-template", TEMPLATE, "--max-tokens", "900", "--ignore-eos", *SMALL]
    process = subprocess.Popen([sys.executable, "-c", on_terminal, *DRAFTWISE, *arguments], stdin=inner)
    os.close(inner)
    seen = b""

    def read_until(ending: bytes) -> None:
        nonlocal seen
        while not seen.endswith(ending):
            assert select.select([terminal], [], [], 60)[0], seen
            seen += os.read(terminal, 4096)

    read_until(b"> ")
    os.write(terminal, b"hello\n")
    read_until(b"hello\r\n")
    seen += os.read(terminal, 1)  # the answer has begun
    os.write(terminal, b"\x03")
    read_until(b"\r\n> ")
    assert b"Traceback" not in seen
    time.sleep(0.5)
    os.write(terminal, b"half a line\x03")
    read_until(b"ends)\r\n> ")
    assert process.poll() is None
    for _ in range(3):  # one that comes before input() listens is lost: press again after a while
        time.sleep(0.5)
        os.write(terminal, b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    os.close(terminal)
    assert process.wait(timeout=10) == 130, seen


def test_a_reader_that_goes_away() -> None:
    arguments = ["generate", "def main(", "--max-tokens", "400", "--ignore-eos", "--temperature", "0", *SMALL]
    process = subprocess.Popen([*DRAFTWISE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == 1
    assert b"Traceback" not in err and b"BrokenPipe" not in err, err


def test_a_first_token_loads_no_more_than_it_needs() -> None:
    """What makes a command slow to begin: torch's compiler, Transformers' models, the server. Benchmark:
    benchmarks/startup.py."""
    code = (
        "import sys; from draftwise.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "def main(", "--max-tokens", "1", *SMALL],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout
    loaded = set(done.stderr.split())
    assert "draftwise.engine.async_llm" in loaded  # the list is that of the modules
    slow = (
        "torch._dynamo",
        "torch._inductor",
        "transformers.models",
        "transformers.generation",
        "uvicorn",
        "ray",
        "sympy",
    )
    assert not {name for name in loaded if name.startswith(slow)}


def test_embedded_models_are_there() -> None:
    for part in ("target", "draft"):
        assert (Path(embedded_path(part)) / "model.safetensors").is_file()

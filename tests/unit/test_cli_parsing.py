"""Command lines: spellings, errors of one line, exit codes; nothing here loads a model."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwise.cli import generate, main
from draftwise.cli.errors import UsageError
from draftwise.cli.generate import read_prompts
from draftwise.cli.options import engine_kwargs, sampling_params
from draftwise.config import resolve_engine_config


def parse(*arguments: str) -> argparse.Namespace:
    parser = main.build_parser("generate")
    return parser.parse_args(main.normalise(["generate", *arguments], generate.BOOLEANS))


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with code 2 and one line on stderr; return the line."""
    assert main.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("draftwise: ")
    return captured.err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--max_num_seqs", "4"], ["--max-num-seqs", "4"]),
        (["--max_num_seqs=4"], ["--max-num-seqs=4"]),
        (["--enforce-eager", "text"], ["--enforce-eager=true", "text"]),
        (["--enforce_eager", "False", "text"], ["--enforce-eager=false", "text"]),
        (["--no-enable_prefix_caching"], ["--enable-prefix-caching=false"]),
        (["--no-such-thing"], ["--no-such-thing"]),
        (["--", "--a_b"], ["--", "--a_b"]),
        (["-", "plain_text", "--stop", "a_b"], ["-", "plain_text", "--stop", "a_b"]),
        (["--stop=a_b\nc_d"], ["--stop=a_b\nc_d"]),
    ],
)
def test_spellings(given: list[str], expected: list[str]) -> None:
    assert main.normalise(given, generate.BOOLEANS) == expected


def test_flags_become_keywords() -> None:
    args = parse(
        "--model", "M", "--max_num_batched_tokens", "5000", "--speculative_config", '{"method": "ngram"}',
        "--no-enable-prefix-caching", "--trust-remote-code", "--engine-seed", "7", "--seed", "3", "text",
    )  # fmt: skip
    assert args.prompts == ["text"]
    assert engine_kwargs(args) == {
        "model": "M",
        "max_num_batched_tokens": "5000",
        "enable_prefix_caching": "false",
        "trust_remote_code": "true",
        "seed": "7",
        "speculative_config": [{"method": "ngram"}],
    }
    assert sampling_params(args).seed == 3


def test_old_speculative_flags() -> None:
    args = parse("--model", "M", "--speculative-model", "D", "--num-speculative-tokens", "5")
    (spec,) = resolve_engine_config(**engine_kwargs(args), device="cpu").speculative
    assert (spec.method, spec.num_speculative_tokens) == ("draft_model", 5)


def test_method_none_switches_speculation_off() -> None:
    assert (
        resolve_engine_config(
            **engine_kwargs(parse("--speculative-method", "none")), device="cpu"
        ).speculative
        == ()
    )
    off = parse("--speculative-config", '{"method": "none"}')
    assert resolve_engine_config(**engine_kwargs(off), device="cpu").default_method == "none"


def test_several_drafters() -> None:
    args = parse("--speculative-config", '{"method": "ngram"}', "--speculative-config", '{"model": "D"}')
    config = resolve_engine_config(**engine_kwargs(args), model="M", device="cpu")
    assert [spec.method for spec in config.speculative] == ["ngram", "draft_model"]


def test_every_sampling_flag_arrives() -> None:
    params = sampling_params(
        parse(
            "--max-tokens", "9", "--min-tokens", "2", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "7",
            "--min-p", "0.1", "--n", "2", "--stop", "a", "--stop", "b", "--stop-token-ids", "1,2", "--ignore-eos",
            "--include-stop-str-in-output", "--presence-penalty", "0.1", "--frequency-penalty", "-0.1",
            "--repetition-penalty", "1.1", "--logit-bias", '{"5": 1.5}', "--bad-words", "bad", "--allowed-token-ids",
            "[1, 5]", "--logprobs", "3", "--prompt-logprobs", "1", "--no-skip-special-tokens", "--detokenize", "True",
            "--speculation", '{"method": "ngram"}',
        )
    )  # fmt: skip
    assert params.max_tokens == 9 and params.min_tokens == 2 and params.temperature == 0.5 and params.n == 2
    assert (params.top_p, params.top_k, params.min_p) == (0.9, 7, 0.1)
    assert params.stop == ("a", "b") and params.stop_token_ids == (1, 2)
    assert params.ignore_eos and params.include_stop_str_in_output and params.detokenize
    assert not params.skip_special_tokens
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, -0.1, 1.1)
    assert (
        params.logit_bias == {5: 1.5} and params.bad_words == ("bad",) and params.allowed_token_ids == (1, 5)
    )
    assert (params.logprobs, params.prompt_logprobs) == (3, 1)
    assert params.speculation == {"method": "ngram"}


def test_unset_sampling_flags_keep_the_defaults() -> None:
    from draftwise.sampling.params import SamplingParams

    assert sampling_params(parse("text")) == SamplingParams(max_tokens=128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["genrate"], ["genrate", "generate"]),
        (["generate"], ["no prompt"]),
        (["generate", "x", "--max-token", "3"], ["--max-token", "did you mean '--max-tokens'"]),
        (["bench", "throughput", "--prompts", "3"], ["--prompts", "see draftwise bench throughput --help"]),
        (["bench", "latency", "--promts", "3"], ["did you mean '--prompts'"]),
        (["generate", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens"]),
        (["generate", "x", "--temperature", "-1"], ["temperature"]),
        (["generate", "x", "--logit-bias", "5"], ["--logit-bias"]),
        (["generate", "x", "--speculative-config", "{"], ["--speculative-config", "JSON"]),
        (["generate", "x", "--speculative-config", '{"method": "ngarm"}'], ["ngarm", "ngram"]),
        (["generate", "x", "--speculative-config", '{"method": "hydra"}'], ["hydra", "not supported yet"]),
        (["generate", "x", "--tensor-parallel-size", "3"], ["tensor_parallel_size", "3"]),
        (["generate", "x", "--quantization", "awq"], ["quantization", "awq"]),
        (["generate", "x", "--dtype", "int3"], ["dtype", "int3"]),
        (["generate", "--file", "/no/such/file"], ["/no/such/file"]),
        (["generate", "x", "--model", "/no/such/model"], ["/no/such/model"]),
        (["generate", "x", "--structured-outputs", "{}"], ["structured_outputs"]),
        (["chat", "--json"], ["--json"]),
        (["chat", "hello", "--n", "2"], ["--n"]),
        (["chat", "hello", "--chat-template", "NO_TEXT"], ["--chat-template", "UTF-8"]),
        (["chat", "hello", "--chat-template", "{{ 1 }"], ["--chat-template: not valid Jinja (line 1)"]),
        (["tokenize", "x", "--add-special-tokens=maybe"], ["--add-special-tokens", "maybe"]),
        (["tokenize", "x", "--trust-remote-code=yes"], ["--trust-remote-code", "yes"]),
        (["demo", "--rounds", "-1"], ["--rounds"]),
        (["bench"], ["KIND"]),
        (["bench", "latncy"], ["latncy"]),
        (["bench", "latency", "--rounds", "0"], ["--rounds"]),
        (["bench", "latency", "--prompt-tokens", "3"], ["--prompt-tokens"]),
        (["bench", "latency", "--temperatures", "0", "hot"], ["hot"]),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "no-text").write_bytes(b"\xff")
    line = failing(capsys, *(str(tmp_path / "no-text") if a == "NO_TEXT" else a for a in arguments))
    for word in words:
        assert word in line


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in main.COMMANDS:
        assert name in text
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("draftwise ")
    assert main.main([]) == 2
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [[name] for name in main.COMMANDS] + [["bench", "latency"], ["train", "demo"]]
)
def test_every_command_has_help_without_torch(command: list[str]) -> None:
    code = (
        "import sys; from draftwise.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_interruption_is_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "run", raising(KeyboardInterrupt()))
    assert main.main(["generate", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_a_dead_engine_is_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from draftwise import EngineDeadError

    monkeypatch.setattr(generate, "run", raising(EngineDeadError("the engine\nfailed")))
    assert main.main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "draftwise: the engine failed\n"


def test_prompts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one prompt\nof two lines\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        '{"prompt": "x\\u2028y"}\n\n{"prompt_token_ids": [1, 2]}\n', encoding="utf-8"
    )
    found = read_prompts(["first"], [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])
    assert found == [
        "first",
        "one prompt\nof two lines\n",
        {"prompt": "x\u2028y"},
        {"prompt_token_ids": [1, 2]},
    ]


@pytest.mark.parametrize("line", ["{", '"text"', "{}", '{"text": "x"}'])
def test_bad_json_lines_name_the_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n' + line, encoding="utf-8")
    with pytest.raises(UsageError, match="line 2"):
        read_prompts([], [str(tmp_path / "b.jsonl")])


def test_prompt_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    with pytest.raises(UsageError, match="UTF-8"):
        read_prompts([], [str(tmp_path / "a.txt")])


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """U+2028 and others may stand in a JSON string as they are; str.splitlines would cut there."""
    from draftwise.bench.prompt_files import read_prompt_file
    from draftwise.cli.profile import _read_prompts
    from draftwise.plan.traces import read_trace

    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "x\u2028y\x85z"}\n', encoding="utf-8")
    assert _read_prompts(file) == ["x\u2028y\x85z"]
    file.write_text('{"time": 0, "isl": 1, "osl": 1, "kind": "x\u2028y"}\r\n', encoding="utf-8")
    assert read_trace(file).kinds == ["x\u2028y"]

    class Letters:
        def encode(self, text: str, **_: object) -> list[int]:
            return [ord(letter) for letter in text]

    file.write_text('{"prompt": "x\u2028y"}\n' * 2, encoding="utf-8")
    (workload,), left_out = read_prompt_file(file, Letters(), 99)
    assert workload.prompts == ((ord("x"), 0x2028, ord("y")),) * 2 and left_out == 0


@pytest.mark.parametrize("command", [["tokenize", "-"], ["run-batch", "-i", "-", "-o", "-"]])
def test_stdin_that_is_not_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok \xff"), encoding="utf-8"))
    assert "stdin: not UTF-8 text" in failing(capsys, *command)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(20, "Not a directory", "a/b")]
)
def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError
) -> None:
    monkeypatch.setattr(generate, "run", raising(error))
    assert main.main(["generate", "x"]) == 1
    name = f"{error.filename}: " if error.filename else ""
    assert capsys.readouterr().err == f"draftwise: {name}{error.strerror}\n"


def test_closed_streams() -> None:
    """Python has None in place of streams that were closed before it began."""
    code = "import sys; sys.stdin = sys.stdout = sys.stderr = None\n"
    code += "from draftwise.cli.main import main; code = main(sys.argv[1:]); import os; os._exit(code)"
    for command, expected in ((["completions", "bash"], 0), (["tokenize", "-"], 0), (["genrate"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (expected, "")

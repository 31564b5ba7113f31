"""Help in groups, completions of the shells, and how commands are suggested."""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess

import pytest

from draftwise.cli import main
from draftwise.cli.completions import script, words_of
from draftwise.cli.errors import UsageError
from draftwise.cli.help import help_text, innermost, wanted
from draftwise.errors import suggest


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        "tool", usage="tool [options]", description="What it does.", epilog="At last."
    )
    found.add_argument("--plain", help="its own")
    large = found.add_argument_group("engine (many)")
    for i in range(20):
        large.add_argument(f"--option-{i}", help=f"number {i}" if i else "the first of all")
    large.add_argument("--hidden", help=argparse.SUPPRESS)
    return found


def test_large_groups_are_a_line_until_they_are_asked_for() -> None:
    short = help_text(parser(), "")
    assert "--plain" in short and "What it does." in short and "At last." in short
    assert "--option-4 and 15 more (--help=engine)" in " ".join(short.split()) and "--option-5" not in short
    engine = help_text(parser(), "engine")
    assert all(f"--option-{i}" in engine for i in range(20)) and "--plain" not in engine
    everything = help_text(parser(), "all")
    assert "--option-19" in everything and "--plain" in everything
    found = help_text(parser(), "first")
    assert "--option-0 " in found and "--option-1 " not in found
    assert "--option-7" in help_text(parser(), "option_7")
    assert "--hidden" not in short + engine + everything
    with pytest.raises(UsageError, match=r"--help=hidden: no group .*\(groups: options, engine, all\)"):
        help_text(parser(), "hidden")


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("bench", "bench KIND [options]"), ("train", "train WHAT [options]"), ("profile", "profile [MODEL] [options]"),
        ("simulate", "simulate [options]"),
    ],
)  # fmt: skip
def test_usage_says_what_a_command_wants(command: str, usage: str) -> None:
    assert help_text(innermost(main.build_parser(command), [command]), "").startswith(
        f"usage: draftwise {usage}\n"
    )


@pytest.mark.parametrize(
    ("words", "own", "folded"),
    [
        (["train", "eagle3"], "--data", None), (["train", "demo-heads"], "--heads", None),
        (["bench", "serve"], "--request-rate", None), (["profile"], "--concurrency", "--help=engine"),
    ],
)  # fmt: skip
def test_a_command_shows_its_own_options_even_if_they_are_many(
    words: list[str], own: str, folded: str | None
) -> None:
    short = help_text(innermost(main.build_parser(words[0]), words), "")
    assert f"{own} " in short, "not only the name of a group"
    assert folded in short if folded else "more options:" not in short


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["generate", "-h"], ""), (["generate", "--help"], ""), (["serve", "--help=engine"], "engine"),
        (["generate", "text"], None), (["generate", "--", "--help"], None),
    ],
)  # fmt: skip
def test_what_is_asked(arguments: list[str], what: str | None) -> None:
    assert wanted(arguments) == what


def test_help_of_a_kind_is_that_of_its_parser() -> None:
    found = innermost(main.build_parser("bench"), ["bench", "latency", "--help"])
    assert found.prog.endswith("bench latency")
    assert innermost(main.build_parser("bench"), ["bench"]).prog.endswith("bench")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_of_every_command_fits_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 80, "the short form is short"
    body = short.partition("example")[0]
    assert [line for line in body.splitlines() if len(line) > 84] == []


def test_only_near_commands_are_suggested() -> None:
    assert suggest("sever", main.COMMANDS, 0.7) == "; did you mean 'serve'?"
    for far in ("prun", "install", "help", "list", "start"):
        assert suggest(far, main.COMMANDS, 0.7) == ""


def test_what_is_logged_looks_like_the_commands_own_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, root = logging.getLogger("draftwise"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    main._log_to_stderr()
    main._log_to_stderr()
    logger.warning("something")
    assert capsys.readouterr().err == "draftwise: WARNING: something\n", "once, however often it is asked for"


def test_completions_know_every_command_and_flag() -> None:
    assert {"latency", "serve", "--rounds"} <= set(words_of("bench"))
    for shell in ("bash", "zsh", "fish"):
        text = script(shell)
        assert all(command in text for command in main.COMMANDS)
        assert "temperature" in text and "speculative-config" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes() -> None:
    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        state = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
        program = f"{script('bash')}\n{state}; _draftwise; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert complete("draftwise", "se") == ["serve"]
    assert complete("draftwise", "generate", "--temp") == ["--temperature"]
    assert "latency" in complete("draftwise", "bench", "la")

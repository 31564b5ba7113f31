"""Input of ``profile``, ``plan`` and ``simulate`` that cannot be: one line that says what is wrong, and exit code 2."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from draftwise.cli.main import main
from draftwise.plan.profile import Profile
from draftwise.plan.samples import PromptSample, Setting, StepSample

LOAD = ["--rate", "5", "--duration", "1", "--isl", "64", "--osl", "8"]
CUT, NAN, LIST, FOLDER, NOTHING = "cut.json", "nan.json", "list.json", "folder", "nowhere/x"
BAD_FILES = (CUT, NAN, LIST, FOLDER, NOTHING, "empty", "binary")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a profile of model "tiny" on machine "test", and files that are none."""
    monkeypatch.chdir(tmp_path)
    setting = Setting("int8", 4096, 16, 1000.0)
    setting.prompts.append(PromptSample("none", 64, (0.01,)))
    setting.steps.append(StepSample("none", 0, 1, 64, 1, 64, 0.01, 0.0, 9))
    made = Profile({"cpu": "test"}, "tiny", {"int8": setting})
    made.save(Path("p.json"))
    value = made.as_dict()
    Path(CUT).write_text(json.dumps(value)[:300])
    value["settings"]["int8"]["steps"][0]["target"] = math.nan
    Path(NAN).write_text(json.dumps(value))
    value["settings"]["int8"]["steps"][0]["target"] = 0.01
    value["settings"]["int8"]["kv_tokens"] = 10**15
    Path("huge.json").write_text(json.dumps(value))
    value["settings"]["int8"]["kv_tokens"] = 10**11
    Path("large.json").write_text(json.dumps(value))
    Path(LIST).write_text("[1, 2]")
    Path(FOLDER).mkdir()
    Path("empty").write_text("")
    Path("binary").write_bytes(b"\xff\xfe\x00\xff")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused."""
    assert main([str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("draftwise: "), error
    return error


@pytest.mark.parametrize("file", BAD_FILES)
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_files_that_are_none(
    command: str, file: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert file in refused(capsys, command, "--profile", file, *LOAD)
    assert file in refused(capsys, command, "--polynomial", "4000", "--trace", file)
    assert file in refused(capsys, command, "--interpolation", file, *LOAD)
    drafting = ["--polynomial", "4000", "--method", "model", *LOAD]
    assert file in refused(capsys, command, *drafting, "--acceptance", file)
    if command == "plan":
        assert "state" in refused(capsys, command, "--profile", "p.json", *LOAD, "--state", file)


@pytest.mark.parametrize("file", BAD_FILES)
def test_profiles_that_are_none(file: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert file in refused(capsys, "profile", "--report", "--output", file)
    assert file in refused(capsys, "profile", "--output", file)
    if file in (FOLDER, NOTHING, "empty", "binary"):
        assert file in refused(capsys, "profile", "--output", "new.json", "--prompts", file)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--output", "p.json"], "another machine"),
        (["another", "--report", "--output", "p.json"], "with model 'tiny', not with 'another'"),
        (["--report", "--output", "p.json", "--model", "another"], "with model 'tiny', not with 'another'"),
        (["--report", "--output", "p.json", "--plots", "p.json"], "not a folder"),
        (["--report", "--output", "p.json", "--plots", "p.json/x"], "no folder can be made"),
        (["--report", "--output", "p.json", "--dynamo", "p.json"], "not a folder"),
        (["--output", "new.json", "--methods", "bird"], "'bird' is not loaded"),
        (["--output", "new.json", "--formats", "int3"], "'int3'"),
        (["--budget", "nan"], "--budget"),
        (["--itl", "0"], "--itl"),
    ],
)
def test_what_a_profile_cannot_be_asked_for(
    flags: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags[1] == "p.json" and "--report" not in flags:
        Path("p.json").write_text(Path("p.json").read_text().replace("tiny", "embedded"))
    assert words in refused(capsys, "profile", *flags)
    assert not Path("new.json").exists(), "nothing is written for a command that is refused"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--profile", "p.json", "--model", "another", *LOAD], "with model 'tiny'"),
        (["--profile", "p.json", "--weights", "int3", *LOAD], "'int3' was not measured"),
        (["--profile", "huge.json", *LOAD], "damaged"),
        (["--profile", "large.json", *LOAD], "4,194,304 blocks can be simulated, got 6,250,000,000"),
        (["--polynomial", "4000", "--rate", "1e12"], "take a sample"),
        (["--polynomial", "4000", "--acceptance", "", *LOAD], "acceptance"),
        (["--polynomial", "1000"], "one of --trace and --rate"),
        (["--rate", "1"], "one of --profile, --device, --interpolation and --polynomial"),
        (["--polynomial", "1000", "--rate", "nan"], "--rate"),
        (["--polynomial", "1000", "--rate", "1", "--itl", "-5"], "--itl"),
        (
            ["--polynomial", "1000", "--rate", "1", "--method", "model", "--acceptance", "2"],
            "chances from 0 to 1",
        ),
        (["--polynomial", "1000", "--trace", "/nowhere.csv"], "cannot be read"),
        (["--profile", "/nowhere.json", "--rate", "1"], "cannot be read"),
        (["--device", "h101", "--model", "llama-8b", "--rate", "1"], "did you mean"),
        (["--device", "h100", "--rate", "1"], "--model"),
        (["--polynomial", "1000", "--rate", "1", "--shape", "hill"], "unknown shape"),
        (["--polynomial", "1000", "--rate", "1", "--plot", "/tmp/x.pdf"], ".svg"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_bad_input_is_one_line_and_exit_code_2(
    command: str, flags: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, command, *flags)

"""The guide's commands, in small: each runs as it stands there, on a load of some seconds and a made-up profile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from draftwise.cli.main import main
from draftwise.plan.acceptance import AcceptanceCounts
from draftwise.plan.profile import Profile
from draftwise.plan.samples import PromptSample, Setting, StepSample

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"


def commands() -> list[list[str]]:
    """Of the guide's shell blocks, without the servers and scripts."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line[1:] for line in lines if line[:1] == ["draftwise"] and line[1] != "serve"]


def _profile(path: Path) -> None:
    setting = Setting("auto", 16_384, 16, 1000.0)
    setting.prompts += [PromptSample("none", n, (0.002 + n * 1e-5,)) for n in (32, 256)]
    for n in (1, 16):
        for method, k in (("none", 0), ("eagle3", 2), ("eagle3", 4)):
            seconds = 0.001 + 5e-5 * n * (1 + k)
            setting.steps.append(StepSample(method, k, n, 128, n * (1 + k), 128 * n, seconds, 2e-4 * k, 9))
    made = Profile({"cpu": "test"}, "embedded", {"auto": setting})
    counts = AcceptanceCounts([0, 0, 0, 0, 100], [100, 80, 70, 60], [80, 70, 60, 50], 12_800)
    made.accepted = {"code": {"eagle3": {"128": counts}}}
    made.save(path)


def test_there_are_commands_of_each_kind() -> None:
    assert {line[0] for line in commands()} == {"profile", "simulate", "plan"}


@pytest.mark.parametrize(
    "command", [c for c in commands() if c[0] != "profile"], ids=lambda c: f"{c[0]} {c[1]}"
)
def test_it_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _profile(tmp_path / "profile.json")
    line = list(command)
    at = line.index("--duration") + 1
    line[at] = "10" if float(line[at]) < 1000 else "2000"  # of the long one a sample is simulated
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "SLA" in out and "requests" in out
    for flag in ("--plot",):
        if flag in line:
            assert (tmp_path / line[line.index(flag) + 1]).read_text().startswith("<svg")


def test_profile_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags are taken, and it begins; the whole is tested where profiles are."""
    monkeypatch.chdir(tmp_path)
    (line,) = (c for c in commands() if c[0] == "profile")
    assert main([*line, "--budget", "0.0001", "--num-kv-blocks", "64"]) == 0
    assert Profile.load(tmp_path / "profile.json").left > 0

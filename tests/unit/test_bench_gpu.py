"""The benchmark for GPUs, its parts on tiny shapes on the CPU: what it needs, and what it does when something fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftwise.bench.gpu import command
from draftwise.bench.gpu.report import PartReport, table
from draftwise.bench.gpu.setting import tree_parents
from draftwise.cli.main import main as draftwise

_MISSING = ("rich", "transformers", "tokenizers", "safetensors", "llguidance", "fastapi", "huggingface_hub")
"""Packages that a bare machine with torch does not have."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "part",
    [
        "bandwidth",
        "kernels",
        "steps",
        "truth",
        "profile",
        "drafting",
        "engines",
        "attention",
        "mixed",
        "adapters",
    ],
)
def test_a_part_comes_to_its_end(part: str) -> None:
    report = command.run_part(part, "cpu", True)
    assert report.error is None and report.lines
    assert all(isinstance(line.value, str) or line.value is None or line.value >= 0 for line in report.lines)
    names = [line.name for line in report.lines]
    assert len(set(names)) == len(names), "every number has a name of its own"


def test_speculation_has_the_acceptance_that_was_asked_for() -> None:
    report = command.run_part("engines", "cpu", True)
    notes = [line.note for line in report.lines if "drafts / plain" in line.name]
    assert notes and all("tokens per step" in note for note in notes)


def test_memory_is_not_measured_without_a_gpu() -> None:
    report = command.run_part("memory", "cpu", True)
    assert report.skipped == "needs a GPU" and report.error is None


def test_what_a_part_raises_is_in_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwise.bench.gpu import steps

    def broken(setting: object, report: PartReport) -> None:
        report.add("before", 1.0)
        raise RuntimeError("CUDA error:\n an illegal access")

    monkeypatch.setattr(steps, "measure_bandwidth", broken)
    path = tmp_path / "part.json"
    report = command.run_part("bandwidth", "cpu", True, path)
    assert report.error is not None and report.error.startswith("RuntimeError: CUDA error: an illegal access")
    kept = PartReport.from_dict(json.loads(path.read_text()))
    assert [line.name for line in kept.lines] == ["before"] and kept.error == report.error


def test_parts_run_in_processes_and_one_that_dies_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.PARTS, "kernels", ("nothing:nothing", 60))
    monkeypatch.setitem(command.PARTS, "attention", ("kernels:compare_attention", 0.01))
    out = tmp_path / "all.json"
    arguments = ["--device", "cpu", "--tiny", "--out", str(out), "--parts", "bandwidth", "attention"]
    assert command.main(arguments) == 1
    found = json.loads(out.read_text())
    bandwidth, attention = found["parts"]
    assert bandwidth["error"] is None and bandwidth["lines"]
    assert "stopped after" in attention["error"]
    assert found["environment"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "copy, bytes read and written" in shown and "FAILED" in shown


def test_without_a_gpu_there_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for run in (command.main, lambda argv: draftwise(["bench", "gpu", *argv])):
        assert run([]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and "no CUDA device" in captured.err


def test_nothing_but_torch_and_numpy_is_needed() -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {_MISSING!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from draftwise.bench.gpu.command import run_part
for part in ("bandwidth", "kernels", "steps", "drafting", "engines", "transformers"):
    report = run_part(part, "cpu", True)
    assert report.error is None, report.error
assert "not installed" in report.skipped
"""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environ)


def test_table_and_tree_by_hand() -> None:
    report = PartReport("part", seconds=2.0)
    report.at_least("speed", 2.0, 2.3, "x")
    report.at_most("waste", 1.0, 1.05)
    report.check("right", True)
    lines = table(
        [report, PartReport("other", error="it broke"), PartReport("last", skipped="no time")]
    ).split("\n")
    assert lines[0] == "part (2 s)"
    assert lines[1].split() == ["speed", "2", "x", ">=", "2.3", "MISSED"]
    assert lines[2].endswith("ok") and lines[3].split() == ["right", "yes", "yes", "ok"]
    assert "it broke" in lines[5] and "no time" in lines[7]
    assert tree_parents(6) == (-1, -1, -1, -1, 0, 0)

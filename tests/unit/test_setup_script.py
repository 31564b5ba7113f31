"""``scripts/setup`` mends what an interruption left, with a Python that only pretends to install."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts/setup"
if shutil.which("bash") is None:
    pytest.skip("no bash", allow_module_level=True)

# Makes environments out of itself, and writes down what it was asked for.
FAKE = """#!/usr/bin/env bash
here="$(dirname "$0")"
if [[ "$1 $2" == "-m venv" ]]; then
    venv="${@: -1}"
    echo "venv" >> "$LOG"
    [[ "$3" == --clear ]] && rm -rf "$venv"
    mkdir -p "$venv/bin"
    cp "$FAKE" "$venv/bin/python"
    touch "$venv/pyvenv.cfg" "$venv/bin/has-pip"
elif [[ "$1 $2" == "-m pip" ]]; then
    [[ -e "$here/has-pip" ]] || exit 1
    [[ "$3" == --version ]] && exit 0
    echo "pip ${@: -1}" >> "$LOG"
    sleep "${SLEEP:-0}"
    [[ "${@: -1}" != "${FAILS:-}"* || -z "${FAILS:-}" ]] || exit 1
elif [[ "$2" == *"version_info[:2]"* && -e "$here/version" ]]; then
    cat "$here/version"
else
    exec "$REAL" "$@"
fi
"""
FIRST = ["venv", "pip torch", "pip .[dev]"]
UPDATE = ["pip torch", "pip .[dev]"]


class Folder:
    def __init__(self, root: Path) -> None:
        self.venv = root / "venv"
        self.stamp = self.venv / ".draftwise-setup"
        self._log = root / "log"
        self._python = root / "python"
        self._python.write_text(FAKE)
        self._python.chmod(0o755)
        self._environment = {
            **os.environ, "PYTHON": str(self._python), "VENV": str(self.venv), "LOG": str(self._log),
            "FAKE": str(self._python), "REAL": sys.executable,
        }  # fmt: skip

    def start(self, more: Mapping[str, str], kind: str | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(SETUP), *([] if kind is None else [kind])],
            env={**self._environment, **more},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def setup(self, code: int = 0, kind: str | None = None, **more: str) -> str:
        """Run it; what it told."""
        process = self.start(more, kind)
        _, told = process.communicate(timeout=120)
        assert process.returncode == code, told
        return told

    def did(self) -> list[str]:
        """What was done since the last question; versions left out."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return [line.partition("==")[0] for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_first_time_and_the_second(folder: Folder) -> None:
    assert "done" in folder.setup()
    assert folder.did() == FIRST and folder.stamp.exists()
    assert folder.setup() == ""
    assert folder.did() == []


def test_running_needs_less_than_testing_and_takes_nothing_away(folder: Folder) -> None:
    assert "2 of 2: draftwise" in folder.setup(kind="run")
    assert folder.did() == ["venv", "pip torch", "pip ."]
    assert folder.setup(kind="run") == "" and folder.did() == []
    folder.setup()
    assert folder.did() == UPDATE
    assert folder.setup(kind="run") == "" and folder.setup() == "" and folder.did() == []
    folder.stamp.write_text("of another day dev")
    folder.setup(kind="run")
    assert folder.did() == UPDATE, "what was there for tests stays"
    assert "not everything" in folder.setup(code=2, kind="everything")


def test_an_outdated_one_is_updated(folder: Folder) -> None:
    folder.setup()
    folder.did()
    folder.stamp.write_text("of another day")
    assert "anew" not in folder.setup()
    assert folder.did() == UPDATE


@pytest.mark.parametrize("step", ["torch", ".[dev]"])
def test_one_that_was_not_finished_is_made_anew(folder: Folder, step: str) -> None:
    folder.setup(code=1, FAILS=step)
    assert folder.did()[-1] == f"pip {step}" and not folder.stamp.exists()
    (folder.venv / "half").touch()
    assert "did not finish" in folder.setup()
    assert folder.did() == FIRST and not (folder.venv / "half").exists()
    assert folder.setup() == ""


def test_an_update_that_was_not_finished(folder: Folder) -> None:
    folder.setup()
    folder.stamp.write_text("of another day")
    folder.setup(code=1, FAILS="torch")
    folder.did()
    assert "did not finish" in folder.setup()
    assert folder.did() == FIRST


def damage_python(venv: Path) -> None:
    (venv / "bin/python").unlink()


def damage_interpreter(venv: Path) -> None:
    """As when the Python that it was made with is gone."""
    damage_python(venv)
    (venv / "bin/python").symlink_to(venv / "gone")


def damage_pip(venv: Path) -> None:
    (venv / "bin/has-pip").unlink()
    (venv / ".draftwise-setup").unlink()


def damage_version(venv: Path) -> None:
    (venv / "bin/version").write_text("3.9\n")
    (venv / ".draftwise-setup").unlink()


@pytest.mark.parametrize("damage", [damage_python, damage_interpreter, damage_pip, damage_version])
def test_one_that_does_not_work_is_made_anew(folder: Folder, damage: object) -> None:
    folder.setup()
    folder.did()
    assert callable(damage)
    damage(folder.venv)
    assert "is made anew" in folder.setup()
    assert folder.did() == FIRST
    assert folder.setup() == ""


def test_killed_in_the_middle(folder: Folder) -> None:
    process = folder.start({"SLEEP": "60"})
    deadline = time.monotonic() + 60
    log = folder.venv.parent / "log"
    while not (log.exists() and "torch" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    folder.did()
    assert "did not finish" in folder.setup()
    assert folder.did() == FIRST


def test_two_at_once(folder: Folder) -> None:
    both = [folder.start({"SLEEP": "0.3"}) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert folder.did() == FIRST, "the second one found it done"


def test_a_folder_of_somebody_else_is_left_alone(folder: Folder) -> None:
    folder.venv.mkdir()
    (folder.venv / "thesis.txt").write_text("years of work")
    assert "no virtual environment" in folder.setup(code=1)
    assert (folder.venv / "thesis.txt").exists() and folder.did() == []

"""README and guides say what is true: their examples run as a user would run them, and print what they promise.

``python tests/e2e/test_readme.py`` writes the outputs of today into the README's ``text`` blocks.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftwise.cli.env import environment

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md", "docs/guides/quickstart.md", "docs/guides/from-vllm.md", "docs/algorithms/structured-output.md"
    )
]  # fmt: skip

FENCE = re.compile(
    r"(?P<skip><!-- not run: [^\n]*-->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)

# What takes minutes is run small; what it measures then means nothing, but it runs.
SMALL = {
    "draftwise bench latency": "--prompts 1 --rounds 1 --output-tokens 8 --temperatures 0",
    "draftwise bench throughput": "--rounds 1 --output-tokens 4 --concurrency 2",
    "draftwise bench accept": "--prompts 1 --output-tokens 8 --workloads edit --methods mtp suffix",
    "draftwise demo": "--rounds 1 --max-tokens 8",
}


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    skipped: bool
    start: int  # of the body in the page
    end: int


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(m["kind"], m["body"], m["skip"] is not None, m.start("body"), m.end("body")) for m in found]


def shell_environment(tmp_path: Path) -> dict[str, str]:
    """With a ``draftwise`` on the path that is this source tree's, whatever is installed."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir(exist_ok=True)
    command = bin_folder / "draftwise"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m draftwise "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    env = dict(os.environ)
    env["PATH"] = f"{bin_folder}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    env["OMP_NUM_THREADS"] = "1"
    changed = sorted(name for name in env if name.startswith("DRAFTWISE_"))
    assert not changed, f"these change the defaults that a reader has: {changed}"
    return env


def run(command: list[str], tmp_path: Path) -> str:
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=shell_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_output(page: Path, tmp_path: Path) -> str:
    """Run a page's python blocks as one program, in order."""
    program = "\n\n".join(b.body for b in blocks(page) if b.kind == "python" and not b.skipped)
    return run([sys.executable, "-W", "error::DeprecationWarning:draftwise", "-c", program], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples(page: Path, tmp_path: Path) -> None:
    output = python_output(page, tmp_path)
    promised = "".join(b.body for b in blocks(page) if b.kind == "text")
    if promised and environment()["kernels"] != "native, avx512":
        # Other instruction sets round otherwise; what they cannot change is what plain decoding takes.
        output, promised = output.splitlines()[0], promised.splitlines()[0]
    if promised:
        assert output == promised


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_examples(page: Path, tmp_path: Path) -> None:
    ran = 0
    for block in blocks(page):
        if block.kind != "sh" or block.skipped:
            continue
        for line in block.body.splitlines():
            command = line.partition("#")[0].strip()
            if not command or command.startswith("scripts/") or "path/" in command:
                continue
            command = f"{command} {SMALL.get(command, '')}"
            run(["bash", "-euo", "pipefail", "-c", command], tmp_path)
            ran += 1
    assert ran >= 3 or page.name not in ("README.md", "quickstart.md")


@pytest.mark.parametrize(
    ("name", "promised"),
    [("mixed_methods.py", "all the same tokens: True"), ("streaming.py", "still running: 0")],
)
def test_examples(name: str, promised: str, tmp_path: Path) -> None:
    assert promised in run([sys.executable, str(ROOT / "examples" / name)], tmp_path)


def test_the_two_commands_of_the_readme() -> None:
    shell = "\n".join(b.body for b in blocks(PAGES[0]) if b.kind == "sh")
    for name in ("scripts/demo", "scripts/test"):
        assert name in shell
    for name in ("demo", "test", "check", "setup"):
        script = ROOT / "scripts" / name
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_demo_script_as_it_stands() -> None:
    """Where scripts/setup made the environment (as continuous integration does), the first command must run."""
    stamp = ROOT / ".venv/.draftwise-setup"
    if not stamp.exists():
        pytest.skip("this checkout has no environment made by scripts/setup")
    done = subprocess.run(
        [ROOT / "scripts/demo", "--rounds", "1", "--max-tokens", "8"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "plain" in done.stdout and "draft_model" in done.stdout


def write_outputs() -> None:
    """Replace the README's ``text`` block by what its python blocks print now."""
    page, scratch = PAGES[0], ROOT / ".cache/readme"
    scratch.mkdir(parents=True, exist_ok=True)
    output = python_output(page, scratch)
    (block,) = [b for b in blocks(page) if b.kind == "text"]
    text = page.read_text(encoding="utf-8")
    page.write_text(text[: block.start] + output + text[block.end :], encoding="utf-8")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    write_outputs()

"""What the interpreter does not check: that the compiler takes every kernel. It needs no GPU for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import draftwise

pytest.importorskip("triton", reason="the package triton is not installed")


def compiled(script: str, folder: Path, *arguments: str) -> list[str]:
    """What a script says that compiles kernels: a line for each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{root}:{environment['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "fakes" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warn" not in done.stderr.lower()
    return done.stdout.splitlines()


def launched_kernels() -> set[str]:
    """Names of the kernels that the sources launch. Example: ``device.rms_norm[(count,)](``."""
    sources = Path(draftwise.__file__).parent
    found: set[str] = set()
    for folder in ("kernels/triton", "graphs"):
        for path in (sources / folder).rglob("*.py"):
            found |= set(re.findall(r"\b(\w+)\[\([^\n]*\)\]\(", path.read_text()))
    assert len(found) > 25
    return found


def check_every_kernel(lines: list[str]) -> None:
    for capability in ("80", "90"):
        names = {line.split()[0] for line in lines if line.split()[1] == capability}
        assert names == launched_kernels(), capability


def test_every_kernel_is_of_the_language(tmp_path: Path) -> None:
    check_every_kernel(compiled("triton_compile.py", tmp_path, "--language"))


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    check_every_kernel(compiled("triton_compile.py", tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device")
def test_what_the_benchmark_launches_compiles_for_a_gpu(tmp_path: Path) -> None:
    """As it is launched: with the types, alignments and constants that Triton sees there."""
    lines = compiled("cuda_compile.py", tmp_path)
    of_attention = [line for line in lines if line.startswith("partial_attention ")]
    assert len(lines) > 20 and 1 <= len(of_attention) <= 4

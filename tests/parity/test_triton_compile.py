"""What the interpreter does not check: that the compiler takes every kernel. It needs no GPU for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")


def compiled(script: str, folder: Path) -> list[str]:
    """What a script says that compiles kernels: a line for each."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{root}:{environment['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "fakes" / script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warn" not in done.stderr.lower()
    return done.stdout.splitlines()


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert len(compiled("triton_compile.py", tmp_path)) >= 39


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device")
def test_what_the_benchmark_launches_compiles_for_a_gpu(tmp_path: Path) -> None:
    """As it is launched: with the types, alignments and constants that Triton sees there."""
    lines = compiled("cuda_compile.py", tmp_path)
    of_attention = [line for line in lines if line.startswith("partial_attention ")]
    assert len(lines) > 20 and 1 <= len(of_attention) <= 4

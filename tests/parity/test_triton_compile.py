"""What the interpreter does not check: that the compiler takes every kernel. It needs no GPU for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parents[1] / "fakes" / "triton_compile.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warn" not in done.stderr.lower()
    assert len(done.stdout.splitlines()) == 46

"""The machine code of level amx, with a unit of tiles in software."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native import native_or_skip

from draftwise.kernels.cpu.library import ISA_VARIABLE, LIBRARY_VARIABLE, Isa

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_machine_code_of_amx_computes_what_it_should() -> None:
    """Builds a library that takes the level here; some tests of attention and linear layers on it."""
    if Isa.AVX512 not in native_or_skip().isas or shutil.which("g++") is None:
        pytest.skip("level amx needs AVX-512 besides, and the script a compiler")
    environment = {
        key: value for key, value in os.environ.items() if key not in (ISA_VARIABLE, LIBRARY_VARIABLE)
    }
    chosen = "amx and (strided or tree_paths or level_by_level or zero_points)"
    done = subprocess.run(
        [ROOT / "scripts" / "trap_tiles", "-k", chosen],
        env={**environment, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "skipped" not in done.stdout and " passed" in done.stdout, done.stdout

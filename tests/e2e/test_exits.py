"""A small sample of ``benchmarks/exits.py``: processes that end at random moments end well. The seed is printed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/exits.py"


@pytest.mark.parametrize("count", [3, pytest.param(80, marks=pytest.mark.slow)])
def test_processes_end_well(count: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    done = subprocess.run(
        # How long an end takes depends on the machine; one that takes a minute hangs.
        [sys.executable, str(BENCHMARK), "--count", str(count), "--seed", str(seed), "--limit", "60", "--json"],
        capture_output=True, text=True, timeout=120 * count, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert len(report["runs"]) == count
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"

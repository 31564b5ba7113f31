"""Ctrl-C in the middle of ``draftwise profile``: a real process, whose file the same command goes on with."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from draftwise.plan.profile import Profile

# A shell that runs the tests in the background has them ignore Ctrl-C, and all that they start.
INTERRUPTIBLE = """import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, sys.argv[1:])
"""
PROFILE = [
    "profile",
    "--methods",
    "ngram",
    "--drafts",
    "2",
    "--concurrency",
    "1",
    "2",
    "--contexts",
    "40",
    "--num-kv-blocks",
    "64",
    "--max-model-len",
    "200",
    "--rounds",
    "1000",
    "--num-threads",
    "1",
    "--output",
]


def measured(path: Path) -> int:
    """Measurements in a file; 0: there is none yet."""
    if not path.exists():
        return 0
    found = Profile.load(path).settings.values()
    return sum(s.rounds for setting in found for s in setting.steps)


def test_what_was_measured_stays(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    for before in (0, 1):  # the second run goes on where the first one ended
        count = measured(file)
        assert count >= before
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, sys.executable, "-m", "draftwise", *PROFILE, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        end = time.monotonic() + 120
        while measured(file) <= count and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert b"Traceback" not in error and b"draftwise: interrupted" in error
        assert measured(file) > count
    assert not list(tmp_path.glob("*.part")) or Profile.load(file)

"""``draftwise serve`` before anything is loaded: what is missing, and settings that cannot hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from draftwise.cli.main import main
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("missing", ["fastapi", "prometheus_client", "uvicorn"])
def test_the_extra_that_is_missing_is_named(missing: str) -> None:
    """In a process of its own, where no part of the server is imported yet."""
    names = {missing, "starlette"} if missing == "fastapi" else {missing}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=sorted(names))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        f"draftwise: {missing} is not installed: run pip install '.[serve]' in the folder of Draftwise's sources\n"
    )

"""Processes that belong to another end with it, from their first moment on."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import {module}
assert "torch" not in sys.modules
from draftwise.cluster.children import belong_to

class Known(Exception):
    pass

def seen(lifeline):
    assert lifeline == 7
    raise Known

{module}.belong_to = seen
try:
    {module}.main(*[7] * {count})
except Known:
    assert "torch" not in sys.modules
else:
    raise AssertionError

came, comes = os.pipe()
belong_to(came)
assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
print('watched', flush=True)
os.close(comes)
signal.pause()
"""


@pytest.mark.parametrize(
    ("module", "count"), [("draftwise.engine.worker", 2), ("draftwise.fleet.replica", 3)]
)
def test_the_host_is_watched_before_anything_slow_is_imported(module: str, count: int) -> None:
    """Ranks went on to import torch, for seconds, after their host had ended."""
    script = SCRIPT.format(module=module, count=count)
    done = subprocess.run([sys.executable, "-c", script], timeout=60, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b"watched\n")

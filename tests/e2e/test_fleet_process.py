"""``draftwise serve --data-parallel-size 2`` as processes: however it ends, none of them stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest


def children(pid: int) -> list[int]:
    """Processes that it started, and theirs."""
    try:
        direct = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []
    return [int(c) for c in direct] + [d for c in direct for d in children(int(c))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def stream(url: str, lines: list[bytes]) -> None:
    body = {"prompt": "def main(", "max_tokens": 200, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines.extend(answer)
    except OSError:
        pass


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at /proc")
@pytest.mark.parametrize(
    ("number", "code", "started"),
    [
        (signal.SIGTERM, 0, True),
        pytest.param(signal.SIGINT, 130, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, False, marks=pytest.mark.slow),
    ],
)
def test_no_process_stays_behind(number: int, code: int, started: bool) -> None:
    """``started``: the signal comes while streams run, or else while replicas are built."""
    server = subprocess.Popen(
        [sys.executable, "-m", "draftwise", "serve", "--port", "0", "--data-parallel-size", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    lines: list[bytes] = []
    readers: list[threading.Thread] = []
    try:
        if started:
            url = server.stdout.readline().split()[-1]
            readers = [threading.Thread(target=stream, args=(url, lines)) for _ in range(4)]
            for reader in readers:
                reader.start()
            while len(lines) < 4:
                time.sleep(0.01)
        else:
            while len(children(server.pid)) < 2:
                time.sleep(0.05)
        there = children(server.pid)
        assert len(there) == 2
        server.send_signal(number)
        _, errors = server.communicate(timeout=60)
        assert server.returncode == code and "Traceback" not in errors, errors
        if started and number != signal.SIGKILL:  # streams were let to their ends
            for reader in readers:
                reader.join(30)
            assert sum(b"[DONE]" in line for line in lines) == 4
        deadline = time.monotonic() + 30
        while any(map(is_running, there)):
            assert time.monotonic() < deadline, "a replica stays behind"
            time.sleep(0.05)
    finally:
        if server.poll() is None:
            os.kill(server.pid, signal.SIGKILL)
            server.communicate()

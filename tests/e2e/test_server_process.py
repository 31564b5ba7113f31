"""``draftwise serve`` as a process: it starts on the embedded model, stands a small soak, drains, and ends well."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from draftwise.cli.main import main

ROOT = Path(__file__).parents[2]


def serve(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftwise", "serve", "--port", "0", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_small_soak() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/soak.py"), "--requests", "80", "--max-tokens", "24",
         "--memory-limit", "0.05"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["problems"] == {} and done.returncode == 0, done.stderr[-2000:]
    assert sum(report["requests"].values()) == 80 and report["requests"]["cancelled"] > 10


def test_signals_and_exit_codes() -> None:
    server = serve("--api-key", "k", "--served-model-name", "a,b", "--access-log")
    assert server.stdout is not None
    line = server.stdout.readline()
    try:
        assert line.startswith("Draftwise serves a at http://127.0.0.1:")
        with urllib.request.urlopen(line.split()[-1] + "/version", timeout=10) as answer:
            assert {"version", "guarantees"} <= set(json.load(answer))
        asked = urllib.request.Request(line.split()[-1] + "/v1/models", headers={"Authorization": "Bearer k"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["a", "b"]
    finally:
        server.send_signal(signal.SIGINT)
        more, errors = server.communicate(timeout=30)
    assert server.returncode == 130, errors
    assert (
        more == "" and '"GET /v1/models HTTP/1.1" 200' in errors
    )  # stdout has the one line, the log the others


def test_what_cannot_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    """The command in this process, which needs not load torch each time, and then in one of its own."""
    for flags, words in (
        (("--port", "99999"), "port"),
        (("--tensor-parallel-size", "16"), "tensor_parallel_size"),
        (("--api-keys", "x"), "did you mean"),
        (("--config", os.devnull + "x"), "config"),
        (("--ssl-keyfile", "x"), "ssl"),
    ):
        try:
            code: object = main(["serve", "--port", "0", *flags])
        except SystemExit as end:
            code = end.code
        errors = capsys.readouterr().err
        assert code == 2 and words in errors and len(errors.strip().splitlines()) == 1, errors
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = serve("--port", str(taken.getsockname()[1]))
        _, errors = server.communicate(timeout=60)
        assert server.returncode == 2 and "in use" in errors

"""Requests of strangers, known ones and ones from a seed: never a 5xx or a traceback, and nothing is left behind.

The requests are those of ``benchmarks/hostile.py``, which sends a thousand of them and looks at memory, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwise import AsyncLLM
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat


@pytest.fixture(scope="module")
def hostile() -> Iterator[Any]:
    """The module of the benchmark, which is a script and in no package."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import hostile_bodies

        yield hostile_bodies
    finally:
        sys.path.remove(folder)
        sys.modules.pop("hostile_bodies", None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"), max_position_embeddings=256)
    llm = AsyncLLM(
        folder, dtype="float32", device="cpu", num_kv_blocks=256, max_num_seqs=8, speculation_control="static"
    )
    with RunningServer(llm, body_timeout=0.5, header_timeout=0.5, request_timeout=60.0) as running:
        yield running
    assert llm.is_alive
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    llm.close()


def ask(server: RunningServer, data: bytes) -> bytes:
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), 90) as connection, contextlib.suppress(OSError):
        with contextlib.suppress(OSError):  # refused before all of it was sent
            connection.sendall(data)
        while piece := connection.recv(1 << 16):
            got += piece
    return got


def check(server: RunningServer, request: Any, caplog: pytest.LogCaptureFixture) -> int:
    """The status of the answer, 0 if there is none; anything that must not be fails."""
    got = ask(server, request.data)
    shown = f"{request.name}: {request.data[:300]!r} -> {got[-300:]!r}"
    bad = [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
    assert not bad, f"{shown}\n{caplog.text}"
    caplog.clear()
    if not got:
        assert not request.http, shown
        return 0
    status = int(got.split(b" ", 2)[1])
    assert status < 500 and b"generation_failed" not in got and b"internal error" not in got, shown
    if status >= 400:
        body = got.partition(b"\r\n\r\n")[2]
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, shown
    return status


def test_requests_from_a_seed(server: RunningServer, hostile: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = [check(server, request, caplog) for request in hostile.drawn(7, 120)]
    assert {200, 400} <= set(found), "some are good, most are not"
    assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    load = json.loads(server.request("GET", "/load")[2])
    assert not any(load.values()), load


@pytest.mark.slow
def test_requests_that_have_hurt(
    server: RunningServer, hostile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for request in hostile.known():
        if request.name == "headers of 50 MB":
            assert check(server, hostile.Hostile(request.name, request.data, http=False), caplog) in (0, 431)
            continue
        check(server, request, caplog)


def test_the_same_seed_draws_the_same(hostile: Any) -> None:
    first, again, other = (list(hostile.drawn(seed, 30)) for seed in (1, 1, 2))
    assert first == again != other

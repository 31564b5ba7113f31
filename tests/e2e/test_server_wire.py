"""What strangers send over the wire: too much, too slowly, or no HTTP at all. Each gets an answer, and nobody a 5xx."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.running_server import RunningServer, head_of
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

Scripted = Callable[..., ScriptedEngine]
BODY = b'{"prompt": "a"}'
GOOD = head_of(f"Content-Length: {len(BODY)}") + BODY
HEALTH = head_of(path="/health", method="GET")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    from transformers import AutoTokenizer

    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda *pieces, **more: ScriptedEngine(folder, tokenizer, pieces, **more)


@pytest.fixture(scope="module")
def server(scripted: Scripted) -> Iterator[RunningServer]:
    with RunningServer(
        scripted("a"), max_header_size=8192, max_headers=32, max_body_size=100_000, body_timeout=0.6,
        header_timeout=0.3,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever is sent, the log has no error and no traceback afterwards."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.WARNING], caplog.text


def say(server: RunningServer, data: bytes, *more: bytes) -> bytes:
    """All that is answered until the connection ends, or nothing comes for a second."""
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        try:
            for part in (data, *more):
                connection.sendall(part)
        except OSError:
            pass  # closed while it was being sent to
        connection.settimeout(1)
        try:
            while piece := connection.recv(65536):
                got += piece
        except OSError:
            pass
    return got


def answers(got: bytes) -> list[tuple[int, Any]]:
    """(status, body) of each answer in ``got``."""
    out = []
    while got:
        head, _, rest = got.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        assert lines[0].startswith("HTTP/1.1 "), lines[0]
        size = int(headers["content-length"])
        body, got = rest[:size], rest[size:]
        assert len(body) == size
        out.append((int(lines[0].split()[1]), json.loads(body) if body else None))
    return out


def one(got: bytes) -> tuple[int, str | None]:
    """(status, code of the error) of the only answer."""
    [(status, body)] = answers(got)
    if status < 400:
        return status, None
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["code"]


CLOSE = "Connection: close"


@pytest.mark.parametrize(
    "data",
    [
        head_of(f"X-Large: {'x' * 9000}"),
        head_of(*(f"X-{i}: {'x' * 900}" for i in range(12))),
        head_of(path="/" + "x" * 9000, method="GET"),
        head_of(path="/?" + "x" * 9000, method="GET"),
        b"POST /v1/completions HTTP/1.1\r\nX: " + b"x" * 3_000_000,
        b"GET /" + b"x" * 3_000_000,
        b"POST /v1/completions HTTP/1.1\r\n" + b"x: y\r\n" * 30 + b"x" * 1_000_000,
    ],
    ids=["one", "many", "path", "query", "endless value", "endless path", "endless name"],
)
def test_headers_have_a_largest_size(server: RunningServer, data: bytes) -> None:
    assert one(say(server, data)) == (431, "max_header_size")


def test_headers_have_a_largest_number(server: RunningServer) -> None:
    many = head_of(*(f"X-{i}: y" for i in range(40)))
    got = say(server, many)
    assert one(got) == (431, "max_headers") and b"over 32 headers (--max-headers)" in got
    assert one(
        say(server, head_of(*(f"X-{i}: y" for i in range(20)), CLOSE, path="/health", method="GET"))
    ) == (200, None)


def test_a_client_that_sends_a_large_body_learns_why_it_is_refused(server: RunningServer) -> None:
    """The whole body is sent before the answer is read, as clients do."""
    for size in (100_001, 5_000_000):
        assert one(say(server, head_of(f"Content-Length: {size}"), b"x" * size)) == (413, "body_too_large")
        chunk = b"%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"
        assert one(say(server, head_of("Transfer-Encoding: chunked"), chunk)) == (413, "body_too_large")


def test_slow_clients(server: RunningServer) -> None:
    assert say(server, b"") == b""  # nothing was asked
    for part in (b"G", b"GET /health HTTP/1.1\r\nHost: x", head_of()[:-2]):
        assert one(say(server, part)) == (408, "header_timeout")
    for part in (head_of("Content-Length: 10"), head_of("Content-Length: 10") + b"12345",
                 head_of("Transfer-Encoding: chunked") + b"a\r\n123"):  # fmt: skip
        assert one(say(server, part)) == (408, "body_timeout")


def test_a_body_that_does_not_come_whole_does_not_hold_up_the_end(scripted: Scripted) -> None:
    """The server would wait for it as for a request that runs: 30 seconds, as long as many supervisors wait."""
    with RunningServer(scripted("a")) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(GOOD + head_of("Content-Length: 100") + b'{"pro')
            connection.settimeout(10)
            got = b""
            while b"cmpl-" not in got:  # the first one is answered, and the second has begun
                got += connection.recv(65536)
            server.stop()
            while piece := connection.recv(65536):
                got += piece
        server.join()  # within 20 seconds
        (status, _), (refused, body) = answers(got)
    assert (status, refused, body["error"]["code"], server.exit_code) == (200, 503, "shutting_down", 0)


def test_a_body_that_comes_in_bytes_has_one_limit_for_all_of_them(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head_of("Content-Length: 1000"))
        sent = 0
        connection.settimeout(0.05)
        got = b""
        while not got and sent < 1000:
            try:
                got = connection.recv(4096)
            except TimeoutError:
                connection.sendall(b" ")
                sent += 1
    assert one(got) == (408, "body_timeout") and sent < 1000


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,  # TLS where none is
        b"\x00" * 100,
        b"GET / HTTP/3.7\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head_of("Content-Length: -1"),
        head_of("Content-Length: 1", "Content-Length: 2"),
        head_of("Content-Length: 1e3"),
        head_of("Content-Length: " + "9" * 100),
        head_of("Content-Length: 1", "Transfer-Encoding: chunked"),
        head_of("Transfer-Encoding: chunked") + b"zz\r\n",
        head_of("Transfer-Encoding: chunked") + b"fffffffffffffffffffff\r\n",
        head_of("Transfer-Encoding: gzip"),
        head_of("Upgrade: h2c", "Connection: Upgrade", f"Content-Length: {len(BODY)}") + BODY,
        head_of("X: a\nb\x00c"),
    ],
)
def test_what_is_no_http_is_a_400(server: RunningServer, data: bytes) -> None:
    status, _ = one(say(server, data))
    assert status in (400, 404), data


def test_other_protocols_are_answered_in_this_one(server: RunningServer) -> None:
    for upgrade in ("websocket", "h2c"):
        key = ("Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==", "Sec-WebSocket-Version: 13")
        asked = head_of(f"Upgrade: {upgrade}", "Connection: Upgrade", *key, path="/health", method="GET")
        assert answers(say(server, asked))[0] == (200, None)


def test_a_length_that_is_not_the_bodys(server: RunningServer) -> None:
    assert one(say(server, head_of("Content-Length: 5", CLOSE) + BODY)) == (400, "invalid_json")
    got = answers(say(server, head_of("Content-Length: 5") + BODY))  # the rest is no request
    assert [status for status, _ in got] == [400] or [status for status, _ in got] == [400, 400]
    assert one(say(server, head_of(f"Content-Length: {len(BODY) + 5}") + BODY)) == (408, "body_timeout")


def test_bodies_in_chunks_and_without_length(server: RunningServer) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    assert one(say(server, head_of("Transfer-Encoding: chunked", CLOSE) + chunks)) == (200, None)
    assert one(say(server, head_of(CLOSE) + BODY)) == (400, "invalid_json")  # no length: no body
    expecting = head_of("Expect: 100-continue", f"Content-Length: {len(BODY)}", CLOSE)
    got = say(server, expecting, BODY)
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert one(got.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")) == (200, None)


def test_pipelined_requests_are_answered_in_their_order(server: RunningServer) -> None:
    got = answers(say(server, GOOD + HEALTH + GOOD))
    assert [status for status, _ in got] == [200, 200, 200] and got[1][1] is None
    # Behind a few of them nothing is taken: each is an object, and a megabyte holds ten thousand.
    got = answers(say(server, HEALTH * 10_000))
    assert {status for status, _ in got} == {200} and 1 <= len(got) < 50
    # What is no request behind one that is does not cost it its answer.
    assert answers(say(server, GOOD + b"\x00\x00\x00"))[0][0] == 200


def test_one_that_leaves_while_others_of_its_requests_wait_is_cancelled(scripted: Scripted) -> None:
    engine = scripted("a", hang=True)
    with RunningServer(engine) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(GOOD + GOOD)
            _until(lambda: server.context.admission.num_requests == 1)
        _until(lambda: server.context.admission.num_requests == 0)
        assert len(engine.closed) == 1


def test_an_answer_that_nobody_reads_is_given_up(scripted: Scripted) -> None:
    engine = scripted("x" * 30_000_000)  # more than the buffers of both ends hold
    with RunningServer(engine, send_timeout=0.3) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(GOOD)
        _until(lambda: bool(engine.closed))
        _until(lambda: not server._server.server_state.connections)


def test_the_server_goes_on(server: RunningServer) -> None:
    assert server.request("POST", "/v1/completions", BODY)[0] == 200
    _until(lambda: not server._server.server_state.connections)


def _until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)

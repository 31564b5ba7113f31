"""Who is let in: pages of other origins, names that are not the server's, bodies that do not say that they are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.running_server import RunningServer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

BODY = {"prompt": "hello", "max_tokens": 8}
Scripted = Callable[..., ScriptedEngine]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    from transformers import AutoTokenizer

    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda *pieces, **more: ScriptedEngine(folder, tokenizer, pieces, **more)


@pytest.fixture
def server(scripted: Scripted) -> Iterator[RunningServer]:
    with RunningServer(scripted("a")) as running:
        yield running


def ask(
    server: RunningServer, method: str = "POST", path: str = "/v1/completions", **headers: str
) -> tuple[int, Any]:
    """(status, code of the error or None); underscores in names of headers stand for hyphens."""
    status, _, answer = server.request(
        method,
        path,
        BODY if method == "POST" else None,
        {name.replace("_", "-"): value for name, value in headers.items()},
    )
    return status, json.loads(answer)["error"]["code"] if status >= 400 else None


def test_pages_of_other_origins(server: RunningServer) -> None:
    own = f"http://127.0.0.1:{server.port}"
    assert ask(server) == (200, None)
    assert ask(server, Origin=own) == (200, None)
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "chrome-extension://abc"):
        assert ask(server, Origin=origin) == (403, "foreign_origin"), origin
        assert ask(server, path="/reset_prefix_cache", Origin=origin) == (403, "foreign_origin")
        assert ask(server, "OPTIONS", Origin=origin)[0] == 403
    # Behind a proxy that changed Host the browser itself says that the page is the server's own.
    assert ask(server, Origin="https://llm.example", Sec_Fetch_Site="same-origin") == (200, None)
    assert ask(server, Origin="https://llm.example", Sec_Fetch_Site="cross-site") == (403, "foreign_origin")


def test_names_that_are_not_the_servers(server: RunningServer) -> None:
    for host in (f"localhost:{server.port}", f"127.0.0.1:{server.port}", "[::1]", "10.0.0.7:80"):
        assert ask(server, Host=host) == (200, None), host
    for host in ("evil.example", f"rebound.example:{server.port}"):
        assert ask(server, Host=host) == (403, "unknown_host"), host
        # Such a page is of this server's origin, as the browser sees it.
        same = {"Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}
        assert ask(server, Host=host, **same) == (403, "unknown_host")
        assert ask(server, "GET", "/", Host=host) == (403, "unknown_host")
        assert ask(server, "GET", "/health", Host=host) == (200, None)  # of load balancers
    message = json.loads(server.request("GET", "/", headers={"Host": "a.example:9"})[2])["error"]["message"]
    assert "--allowed-hosts a.example" in message


def test_listed_names_and_origins(scripted: Scripted) -> None:
    with RunningServer(
        scripted("a"), allowed_hosts=("llm.example",), allowed_origins=("https://app.example",)
    ) as server:
        assert ask(server, Host="llm.example", Origin="https://app.example") == (200, None)
        assert ask(server, Origin="https://llm.example") == (200, None)
        assert ask(server, Host="other.example") == (403, "unknown_host")
        assert ask(server, Origin="https://evil.example") == (403, "foreign_origin")
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        status, headers, _ = server.request("OPTIONS", "/v1/completions", headers=asked)
        assert status == 200 and headers["access-control-allow-origin"] == "https://app.example"


def test_a_key_is_enough(scripted: Scripted) -> None:
    key = {"Authorization": "Bearer k"}
    with RunningServer(scripted("a"), api_keys=("k",), host="127.0.0.1") as server:
        assert ask(server, Host="llm.example", Origin="https://app.example", **key) == (200, None)
        assert ask(server, Host="llm.example") == (401, "invalid_api_key")
    with RunningServer(scripted("a"), api_keys=("k",), allowed_hosts=("llm.example",)) as server:
        assert ask(server, Host="llm.example", Origin="https://app.example", **key) == (200, None)
        assert ask(server, Host="other.example", **key) == (403, "unknown_host")


def test_bodies_say_that_they_are_json(server: RunningServer) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert ask(server, Content_Type=kind) == (200, None), kind
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "",
                 "text/plain; application/json", "application/jsonp"):  # fmt: skip
        for path in ("/v1/completions", "/tokenize", "/reset_prefix_cache"):
            assert ask(server, path=path, Content_Type=kind) == (415, "unsupported_media_type"), kind
    _, _, answer = server.request("POST", "/v1/completions", BODY, {"Content-Type": "text/plain"})
    assert "-H 'Content-Type: application/json'" in json.loads(answer)["error"]["message"]
    # Without a body there is nothing to say.
    assert server.request("POST", "/reset_prefix_cache")[0] == 200
    assert server.request("POST", "/ping")[0] == 200


def test_head(server: RunningServer) -> None:
    for path in ("/", "/health", "/ping", "/version", "/v1/models", "/metrics"):
        status, headers, body = server.request("HEAD", path)
        assert (status, body) == (200, b""), path
        assert (
            headers["content-length"] == server.request("GET", path)[1]["content-length"]
            or path == "/metrics"
        )
    assert server.request("HEAD", "/v1/completions")[0] == 405
    assert server.request("HEAD", "/nothing")[0] == 404


def test_what_is_not_there_is_answered_with_what_is(server: RunningServer) -> None:
    for path in (
        "/v1/embeddings",
        "/v1/images/generations",
        "/v1/audio/speech",
        "/v1/files",
        "/nothing",
    ):
        for method in ("POST", "GET", "DELETE"):
            status, _, answer = server.request(method, path, BODY if method == "POST" else None)
            error = json.loads(answer)["error"]
            assert (status, error["code"], error["type"]) == (404, "unknown_url", "not_found_error")
            assert f"{method} {path} " in error["message"] and "POST /v1/chat/completions" in error["message"]
            assert "did you mean" not in error["message"]
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        message = json.loads(server.request("POST", path, BODY)[2])["error"]["message"]
        assert "did you mean /v1/chat/completions?" in message
    status, headers, answer = server.request("GET", "/v1/completions")
    error = json.loads(answer)["error"]
    assert status == 405 and headers["allow"] == "POST"
    assert error["message"].startswith("/v1/completions takes POST, not GET")

"""The page at ``/docs`` in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields

from draftwise.cli.main import build_parser
from draftwise.config import RequestLimits
from draftwise.server.config import ServerConfig
from tests.e2e.page.driving import Scripts, needs_chromium
from tests.fakes.chromium import Tab
from tests.fakes.running_server import RunningServer
from tests.fakes.traced_engine import plain

OPEN = "document.querySelectorAll('.endpoint').length > 0"


def node(path: str) -> str:
    """The element of an endpoint, as a script."""
    return f"[...document.querySelectorAll('.endpoint')].find(e => e.querySelector('.path').textContent === '{path}')"


def test_it_brings_nothing_from_elsewhere(server: RunningServer) -> None:
    status, headers, body = server.request("GET", "/docs")
    assert status == 200 and b"http" not in body.replace(b"/openapi", b"")
    assert "default-src 'none'" in headers["content-security-policy"]
    document = json.loads(server.request("GET", "/openapi.json")[2])
    # This server has one engine, and no adapters.
    refused = {"/v1/load_lora_adapter": 400, "/v1/unload_lora_adapter": 404, "/scale_elastic_ep": 400}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            body_of = operation.get("requestBody")
            if body_of is not None:  # the example that the form begins with is a valid request
                content = body_of["content"]["application/json"]
                assert set(content["example"]) <= set(content["schema"]["properties"])
                wanted = refused.get(path, 200)
                assert server.request("POST", path, content["example"])[0] == wanted, path


def test_limits_have_the_values_of_this_server(server: RunningServer) -> None:
    with RunningServer(server.engine, max_body_size=12345, max_body_fields=77, request_timeout=None) as other:
        rows = json.loads(other.request("GET", "/openapi.json")[2])["x-limits"]
    limits = {row["name"]: row for row in rows}
    assert len(limits) == len(rows) and all(row["text"] and row["answer"] and row["option"] for row in rows)
    assert limits["max_body_size"]["value"] == 12345 and limits["max_body_fields"]["value"] == 77
    assert limits["request_timeout"]["value"] is None
    length = server.engine.max_model_len
    assert limits["max_body_values"]["value"] >= 2 * length
    assert limits["max_prompt_chars"]["value"] == server.engine.config.request_limits.prompt_chars(length)
    # Nothing that is a limit is missing.
    assert {f.name for f in fields(RequestLimits)} <= set(limits)
    named = {f.name for f in fields(ServerConfig) if f.name.startswith("max_") or f.name.endswith("_timeout")}
    assert named - {"max_chunk_rate", "drain_timeout"} <= set(limits)
    # Every option is one of `serve`.
    parser = build_parser("serve")
    flags = {flag for action in parser._subparsers._group_actions[0].choices["serve"]._actions  # type: ignore
             for flag in action.option_strings}  # fmt: skip
    assert {row["option"].split()[0] for row in rows} <= flags


@needs_chromium
def test_every_endpoint_opens_with_its_fields(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server, "/docs")
    tab.wait(OPEN)
    paths = json.loads(server.request("GET", "/openapi.json")[2])["paths"]
    assert tab.evaluate("document.querySelectorAll('.endpoint').length") == sum(map(len, paths.values()))
    tab.evaluate("document.querySelectorAll('.endpoint').forEach(e => { e.open = true; })")
    tab.wait("document.querySelectorAll('.try').length === document.querySelectorAll('.endpoint').length")
    words = tab.evaluate(f"{node('/v1/completions')}.textContent")
    assert "promptrequired" in words.replace(" ", "") and "speculative_token_tree" in words
    assert "integer or null" in words, "types are told in words"
    tab.evaluate("document.querySelector('.limits').open = true")
    words = tab.evaluate("document.querySelector('.limits').textContent")
    assert (
        "max_body_size8,388,608bytes of a body413--max-body-size" in words and "max_stop_strings64" in words
    )
    for width in (320, 1360):
        tab.resize(width, 800)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@needs_chromium
def test_a_request_by_keyboard(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with RunningServer(scripts([(evil, plain(evil.encode()))]), api_keys=("right",)) as server:
        tab = open_page(server, "/docs")
        tab.wait("!document.querySelector('#key-form').hidden")
        assert tab.evaluate("document.activeElement.id") == "key"
        for letter in "right":
            tab.key(letter)
        tab.evaluate("document.querySelector('#key-form button').click()")
        tab.wait(OPEN)
        tab.evaluate(f"{node('/v1/completions')}.querySelector('summary').focus()")
        tab.evaluate(f"{node('/v1/completions')}.querySelector('summary').click()")
        tab.wait("document.querySelector('.try textarea') !== null")
        tab.key("Tab")
        assert tab.evaluate("document.activeElement.tagName") == "TEXTAREA"
        tab.key("Enter", ctrl=True)
        tab.wait("document.querySelector('.state').textContent.startsWith('200 after')")
        answer = json.loads(tab.text(".answer"))
        assert answer["choices"][0]["text"] == evil, "text of a model stays text"
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        tab.fill(".try textarea", '{"prompt": "x", "temprature": 1}')
        tab.click(".try .primary")
        tab.wait("document.querySelector('.state').textContent.startsWith('400')")
        assert "temperature" in tab.text(".answer")
        tab.fill(".try textarea", '{"prompt": "x", "stream": true}')
        tab.click(".try .primary")
        tab.wait("document.querySelector('.answer').textContent.includes('[DONE]')")
        tab.evaluate(f"{node('/v1/models/{name}')}.querySelector('summary').click()")
        tab.wait(f"{node('/v1/models/{name}')}.querySelector('input') !== null")
        tab.evaluate(f"{node('/v1/models/{name}')}.querySelector('input').value = 'tiny'")
        tab.evaluate(f"{node('/v1/models/{name}')}.querySelector('form').requestSubmit()")
        tab.wait(
            f"{node('/v1/models/{name}')}.querySelector('.answer').textContent.includes('max_model_len')"
        )

"""The server's manners: keys, limits, deadlines, clients that leave, engines that die, and its page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwise import AsyncLLM
from draftwise.bench.http_client import Target
from draftwise.bench.serve import bench_serve
from draftwise.errors import ConfigError
from draftwise.server.sockets import check_tls
from tests.fakes.running_server import RunningServer, head_of
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

BODY = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        folder, dtype="float32", device="cpu", num_kv_blocks=256, max_num_seqs=2, speculation_control="static"
    )
    yield engine
    wait_until(lambda: engine.stats().num_running == 0)
    engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    engine.close()


@pytest.fixture
def scripted(folder: str) -> Callable[..., ScriptedEngine]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda *pieces, **more: ScriptedEngine(folder, tokenizer, pieces, **more)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def open_stream(
    server: RunningServer, body: dict[str, Any], receive_buffer: int | None = None
) -> socket.socket:
    """A streamed request whose answer nobody has read."""
    data = json.dumps({**body, "stream": True}).encode()
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head_of(f"Content-Length: {len(data)}") + data)
    return connection


# ------------------------------------------------------------------------------------------------ the door


def test_keys(llm: AsyncLLM) -> None:
    with RunningServer(llm, api_keys=("first", "second")) as server:
        for key in ("first", "second"):
            assert server.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
        for headers in (
            {},
            {"Authorization": "Bearer fir"},
            {"Authorization": "first"},
            {"Authorization": "Bearer "},
        ):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("POST", "/reset_prefix_cache"),
            ):
                status, answer, body = server.request(method, path, headers=headers)
                assert status == 401 and error_of(body)["code"] == "invalid_api_key"
                assert answer["www-authenticate"] == "Bearer"
        for path in ("/health", "/ping", "/version", "/metrics", "/"):
            assert server.request("GET", path)[0] == 200


def test_bodies_have_a_largest_size(llm: AsyncLLM) -> None:
    with RunningServer(llm, max_body_size=1000) as server:
        status, _, body = server.request("POST", "/v1/completions", {"prompt": "x" * 2000})
        assert status == 413 and error_of(body)["code"] == "body_too_large"
        # Chunked: the size is not announced.
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.sendall(head_of("Transfer-Encoding: chunked"))
            connection.sendall(b"400\r\n" + b"x" * 0x400 + b"\r\n")
            assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]
        assert server.request("POST", "/v1/completions", {**BODY, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt":' + b"[" * 5000]
)  # fmt: skip
def test_bodies_that_are_none(llm: AsyncLLM, body: bytes) -> None:
    with RunningServer(llm) as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            status, _, answer = server.request("POST", path, body)
            assert status == 400, path
            assert error_of(answer)["message"]


def test_unknown_paths_and_methods(llm: AsyncLLM) -> None:
    with RunningServer(llm) as server:
        assert server.request("GET", "/nothing")[0] == 404
        status, _, body = server.request("GET", "/v1/completions")
        assert status == 405 and error_of(body)
        for path in ("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/.gitkeep",
                     "/static//etc/passwd"):  # fmt: skip
            assert server.request("GET", path)[0] == 404
        # What clients write does not become a label.
        text = server.request("GET", "/metrics")[2].decode()
        assert 'path="other"' in text and "nothing" not in text and "passwd" not in text


def test_cross_origin(llm: AsyncLLM) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with RunningServer(llm) as server:
        assert "access-control-allow-origin" not in server.request("GET", "/version", headers=asked)[1]
    with RunningServer(llm, allowed_origins=("https://a.example",), api_keys=("k",)) as server:
        status, headers, _ = server.request("OPTIONS", "/v1/completions", headers=asked)
        assert status == 200 and headers["access-control-allow-origin"] == "https://a.example"
        other = server.request("GET", "/version", headers={"Origin": "https://b.example"})[1]
        assert "access-control-allow-origin" not in other
        # A page must be able to read that its key is wrong.
        status, headers, _ = server.request("GET", "/v1/models", headers={"Origin": "https://a.example"})
        assert status == 401 and headers["access-control-allow-origin"] == "https://a.example"


def test_the_page(llm: AsyncLLM) -> None:
    with RunningServer(llm) as server:
        status, headers, body = server.request("GET", "/")
        assert status == 200 and headers["content-type"].startswith("text/html") and b"Draftwise" in body
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        document = json.loads(server.request("GET", "/openapi.json")[2])
        schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        assert {"prompt", "speculation", "return_trace"} <= set(schema["properties"])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls(llm: AsyncLLM, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    check_tls(str(key), str(certificate), None)
    with pytest.raises(ConfigError, match="ssl"):
        check_tls(str(certificate), str(certificate), None)
    with RunningServer(llm, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as server:
        trusting = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{server.port}/health"
        assert urllib.request.urlopen(url, timeout=10, context=trusting).status == 200


# ------------------------------------------------------------------------------------------------ limits


def test_a_full_server_says_when_to_come_again(llm: AsyncLLM) -> None:
    with RunningServer(llm, max_concurrent=1) as server, open_stream(server, LONG):
        wait_until(lambda: server.context.admission.num_requests == 1)
        status, headers, body = server.request("POST", "/v1/completions", BODY)
        assert status == 429 and error_of(body)["type"] == "rate_limit_error"
        assert int(headers["retry-after"]) >= 1


def test_the_queue_has_a_limit(scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted("a", hang=True)
    engine.config = type(engine.config)(max_num_seqs=1)
    with RunningServer(engine, max_queue=1) as server:
        with open_stream(server, LONG), open_stream(server, LONG):
            wait_until(lambda: server.context.admission.num_requests == 2)
            assert server.request("POST", "/v1/completions", BODY)[0] == 429
            assert json.loads(server.request("GET", "/load")[2])["server_load"] == 2
        wait_until(lambda: server.context.admission.num_requests == 0)  # both clients went away
        assert len(engine.closed) == 2


def test_clients_may_choose_the_same_request_id(scripted: Callable[..., ScriptedEngine]) -> None:
    """Names of several prompts of one request are made of its id: "a" with two prompts and "a-1" met."""
    engine = scripted("a", hang=True)
    with RunningServer(engine) as server:
        two = LONG | {"prompt": ["x", "y"], "request_id": "a"}
        with (
            open_stream(server, two),
            open_stream(server, two),
            open_stream(server, LONG | {"request_id": "a-1"}),
        ):
            wait_until(lambda: server.context.admission.num_requests == 3)
            wait_until(lambda: len(engine.streams) == 5)


def test_a_deadline_ends_requests(llm: AsyncLLM, scripted: Callable[..., ScriptedEngine]) -> None:
    with RunningServer(scripted("a", hang=True)) as server:
        status, headers, body = server.request("POST", "/v1/completions", {**BODY, "timeout": 0.1})
        assert status == 503 and error_of(body)["code"] == "deadline_exceeded"
        assert headers["x-should-retry"] == "false"
        # In a stream it comes as an event.
        body = server.request("POST", "/v1/completions", {**BODY, "timeout": 0.1, "stream": True})[2]
        events = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line]
        assert events[0]["choices"][0]["text"] == "a" and events[-1]["error"]["code"] == "deadline_exceeded"
    with RunningServer(llm, request_timeout=0.02) as server:
        assert server.request("POST", "/v1/completions", {**LONG, "n": 2})[0] == 503
        wait_until(lambda: llm.stats().num_running == 0)
        assert server.context.admission.num_samples == 0


# ------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled(llm: AsyncLLM, stream: bool) -> None:
    with RunningServer(llm) as server:
        before = llm.stats().finish_reasons.get("abort", 0)
        connection = open_stream(server, {**LONG, "n": 2})
        if not stream:
            connection.close()
            data = json.dumps({**LONG, "n": 2}).encode()
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(head_of(f"Content-Length: {len(data)}"))
            connection.sendall(data)
        wait_until(lambda: llm.stats().num_running > 0)
        connection.close()
        wait_until(lambda: llm.stats().num_running == llm.stats().num_waiting == 0)
        wait_until(lambda: llm.stats().finish_reasons.get("abort", 0) > before)  # counted with the next step
        wait_until(lambda: server.context.admission.num_requests == 0)  # in the server's own thread


def test_a_reader_that_stops_is_given_up(scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted(*["x" * 4096] * 4000)  # 16 MB: more than the buffers of both ends hold
    with RunningServer(engine, send_timeout=0.5) as server:
        with open_stream(server, LONG, receive_buffer=4096):
            wait_until(lambda: server.context.admission.num_requests == 1)
            wait_until(lambda: server.context.admission.num_requests == 0)
        assert engine.closed


def test_a_slow_reader_gets_everything(llm: AsyncLLM) -> None:
    whole = None
    with RunningServer(llm) as server:
        whole = json.loads(server.request("POST", "/v1/completions", LONG)[2])["choices"][0]["text"]
        with open_stream(server, LONG, receive_buffer=2048) as connection:
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                time.sleep(0.001)
                piece = connection.recv(1024)
                assert piece, data[-300:]
                data += piece
    events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: {")]
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == whole


def test_chunks_are_cheap(scripted: Callable[..., ScriptedEngine]) -> None:
    """Processor seconds of the server's thread, which do not depend on what else the machine does."""
    count, used = 4000, []
    with RunningServer(scripted(*[" word"] * count)) as server:
        for _ in range(2):
            server.call(lambda: used.append(time.thread_time()))
            assert server.request("POST", "/v1/completions", {**BODY, "stream": True})[0] == 200
        server.call(lambda: used.append(time.thread_time()))
        wait_until(lambda: len(used) == 3)
    assert (used[2] - used[1]) / count < 0.0002


# ------------------------------------------------------------------------------------------- life and death


def test_a_dead_engine(scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted("a", hang=True)
    server = RunningServer(engine)
    with server, open_stream(server, LONG) as connection:
        wait_until(lambda: server.context.admission.num_requests == 1)
        assert server.request("GET", "/health")[0] == 200
        server.call(engine.die)
        wait_until(lambda: server.request("GET", "/health")[0] == 503)
        status, _, body = server.request("POST", "/v1/completions", BODY)
        assert status == 503 and error_of(body)["code"] == "engine_dead"
        data = b""
        while piece := connection.recv(4096):
            data += piece
        assert b"engine_dead" in data
        server.join()
    assert server.exit_code == 1


def test_draining_finishes_what_runs(llm: AsyncLLM) -> None:
    with RunningServer(llm) as server, open_stream(server, LONG) as connection:
        data = connection.recv(4096)
        server.stop()
        while piece := connection.recv(65536):
            data += piece
        assert b'"finish_reason":"length"' in data and b"[DONE]" in data
        server.join()
        assert server.exit_code == 0
    with pytest.raises(OSError):
        server.request("GET", "/health")


def test_draining_ends_at_last(scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted("a", hang=True)
    with RunningServer(engine, drain_timeout=1.0) as server, open_stream(server, LONG) as connection:
        connection.recv(4096)
        start = time.monotonic()
        server.stop()
        server.join(10)
        assert time.monotonic() - start < 8 and engine.closed


def test_a_real_engine_dies(folder: str) -> None:
    llm = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=64, speculation_control="static")

    def explode(*_: object) -> None:
        raise RuntimeError("device lost")

    with contextlib.closing(llm), RunningServer(llm) as server:
        with open_stream(server, LONG) as connection:
            assert b" 200 " in connection.recv(4096)
            llm._engine.core.executor.execute = explode  # type: ignore[method-assign,assignment]
            data = b""
            while b"engine_dead" not in data:
                piece = connection.recv(65536)
                assert piece, data[-300:]
                data += piece
            assert server.request("GET", "/health")[0] == 503
            while piece := connection.recv(65536):
                data += piece
        assert b"[DONE]" not in data and b"device lost" not in data
        server.join()
    assert server.exit_code == 1


# ------------------------------------------------------------------------------------------------ bench serve


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bench_serve(llm: AsyncLLM, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "xyxyxy"}]} if "chat" in path else {"prompt": "xyxyxy"}
    body = {**prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True,
            "speculation": {"method": "ngram", "num_speculative_tokens": 3}}  # fmt: skip
    with RunningServer(llm) as server:
        target = Target.parse(server.url)
        for load in ({"concurrency": 2}, {"rate": float("inf")}, {"rate": 200.0, "concurrency": 2}):
            before = llm.stats().speculation
            found = asyncio.run(bench_serve(target, [body] * 6, path=path, sla={"e2e": 1e6}, **load))
            after = llm.stats().speculation
            assert (found.num_requests, found.num_failed) == (6, 0), found.errors
            assert found.output_tokens <= 72 and found.attainment == 1.0 and found.e2e is not None
            drafts = after.num_drafts - before.num_drafts
            assert (found.acceptance or {"num_drafts": 0})["num_drafts"] == drafts
        with_usage = {**body, "stream_options": {"include_usage": True}}
        found = asyncio.run(bench_serve(target, [with_usage] * 2, path=path, concurrency=1))
        assert found.output_tokens == 24 and found.goodput is None
        wrong = asyncio.run(bench_serve(target, [{**body, "temperature": -1}] * 2, path=path, concurrency=1))
        assert wrong.num_failed == 2 and wrong.errors == {"HTTP 400": 2} and wrong.ttft is None


# ------------------------------------------------------------------------------------------------ tools

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = ["Let me", " look. <tool", '_call>{"name": "f", "argu', 'ments": {"a": "<b>"}}</tool_call>\n<tool_call>',
         '{"name": "g", "arguments": {}}</tool_call>']  # fmt: skip


def chat_body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}


def test_tool_calls(scripted: Callable[..., ScriptedEngine]) -> None:
    import openai

    engine = scripted(*CALLS)
    with RunningServer(engine) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "x"}]
            whole = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            choice = whole.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
            functions = [c.function for c in choice.message.tool_calls or ()]  # type: ignore[union-attr]
            assert [(f.name, json.loads(f.arguments)) for f in functions] == [("f", {"a": "<b>"}), ("g", {})]
            assert engine.prompts[0]["prompt"].startswith("[tools: f]")

            text, names, indices, finish = "", [], [], None
            stream = client.chat.completions.create(
                model="tiny", messages=messages, tools=TOOLS, stream=True  # type: ignore[arg-type]
            )  # fmt: skip
            for chunk in stream:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                for call in delta.tool_calls or ():
                    indices.append(call.index)
                    assert call.function is not None and call.id
                    names.append(call.function.name)
                finish = chunk.choices[0].finish_reason or finish
            assert (text, names, indices, finish) == ("Let me look.", ["f", "g"], [0, 1], "tool_calls")

        one = json.loads(
            server.request("POST", "/v1/chat/completions", chat_body(parallel_tool_calls=False))[2]
        )
        assert [c["function"]["name"] for c in one["choices"][0]["message"]["tool_calls"]] == ["f"]
        none = json.loads(server.request("POST", "/v1/chat/completions", chat_body(tool_choice="none"))[2])
        assert none["choices"][0]["message"]["content"] == "".join(CALLS)
        assert "[tools" not in engine.prompts[-1]["prompt"]


def test_tool_calls_in_another_form(scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted("Now [TOOL", '_CALLS]f[ARGS]{"a": "x', '"}')
    with RunningServer(engine, tool_call_parser="mistral") as server:
        answer = json.loads(server.request("POST", "/v1/chat/completions", chat_body())[2])
        message = answer["choices"][0]["message"]
        assert message["content"] == "Now" and message["tool_calls"][0]["function"]["name"] == "f"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "x"}
        assert engine.params[-1].skip_special_tokens is False, "its marks are special tokens"
        server.request("POST", "/v1/chat/completions", chat_body(tools=None))
        assert engine.params[-1].skip_special_tokens is True
    with pytest.raises(ConfigError, match="tool_call_parser"):
        RunningServer(engine, tool_call_parser="nope")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "no tool is called 'h'"),
        ({"tools": None, "tool_choice": "required"}, "needs tools"),
        ({"chat_template": "{{ 1 }}"}, "trust-request-chat-template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "cannot be set"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 3}, "needs logprobs"),
    ],
)
def test_chats_that_are_refused(
    scripted: Callable[..., ScriptedEngine], more: dict[str, Any], words: str
) -> None:
    with RunningServer(scripted("a")) as server:
        status, _, body = server.request("POST", "/v1/chat/completions", chat_body(**more))
        assert status == 400 and words in error_of(body)["message"]


def test_nothing_of_a_prompt_is_logged(
    llm: AsyncLLM, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG", logger="draftwise")
    with RunningServer(llm, log_level="debug", access_log=True, log_interval=0.05) as server:
        server.request("POST", "/v1/completions", {**BODY, "prompt": "SECRETWORD"})
        server.request("POST", "/v1/completions", {**BODY, "prompt": "SECRETWORD", "temperature": -1})
        server.request("POST", "/v1/chat/completions", {"messages": [{"role": "SECRETWORD"}], "x": 1})
        server.request("POST", "/v1/completions", b'{"prompt": "SECRETWORD')
        time.sleep(0.12)
    captured = capfd.readouterr()
    assert "SECRETWORD" not in caplog.text + captured.out + captured.err
    assert Path(__file__).name not in captured.err


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "function", "function": {"name": "f"}}, '{"a": 1}'),
        ("required", '{"name": "f", "arguments": {"a": 1}}'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_end_with_tool_calls(
    scripted: Callable[..., ScriptedEngine], choice: Any, text: str, stream: bool
) -> None:
    with RunningServer(scripted(text[:5], text[5:])) as server:
        body = chat_body(tool_choice=choice, stream=stream)
        _, _, answer = server.request("POST", "/v1/chat/completions", body)
        last = answer if not stream else answer.strip().split(b"data: ")[-2]
        assert json.loads(last)["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("more", "before", "after"),
    [
        ({}, 'Hm. <tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "", ""),
        ({"tool_choice": "required"}, '{"name": "f", "arguments": ', "}"),
    ],
)
def test_arguments_stream_as_they_grow(
    scripted: Callable[..., ScriptedEngine], more: dict[str, Any], before: str, after: str
) -> None:
    import openai

    pieces = [*([before] if before else []), '{"a": "', *["word "] * 20, '"}', *([after] if after else [])]
    arguments = '{"a": "' + "word " * 20 + '"}'
    with (
        RunningServer(scripted(*pieces)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        body: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}
        got, ids, names, finish = [], [], [], None
        for chunk in client.chat.completions.create(stream=True, **body):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.index == 0 and call.function is not None
                got.append(call.function.arguments)
                ids += [call.id] if call.id else []
                names += [call.function.name] if call.function.name else []
            finish = chunk.choices[0].finish_reason or finish
        assert len(got) >= 20 and "".join(got) == arguments, got
        assert len(ids) == 1 and names == ["f"] and finish == "tool_calls"
        whole = client.chat.completions.create(**body).choices[0].message.tool_calls[0]
        assert whole.function.arguments == arguments and whole.type == "function"
        events = list(
            client.responses.create(
                model="tiny", input="x", stream=True, tools=[{"type": "function", "name": "f", "parameters": {}}],
                tool_choice={"type": "function", "name": "f"} if isinstance(more.get("tool_choice"), dict) else
                more.get("tool_choice", "auto"),
            )
        )  # fmt: skip
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert len(deltas) >= 20 and "".join(deltas) == arguments

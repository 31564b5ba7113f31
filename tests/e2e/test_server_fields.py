"""Fields that clients of other servers send, and errors that they look for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from draftwise import AsyncLLM
from tests.fakes.running_server import RunningServer, head_of
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"), max_position_embeddings=128)


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[RunningServer]:
    llm = AsyncLLM(
        folder, dtype="float32", device="cpu", num_kv_blocks=64, max_num_seqs=4, speculation_control="static"
    )
    with RunningServer(llm) as running:
        yield running
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    llm.close()


def post(server: RunningServer, path: str, **body: Any) -> Any:
    status, _, answer = server.request("POST", path, body)
    assert status == 200, answer
    return json.loads(answer)


def complete(server: RunningServer, **body: Any) -> Any:
    return post(server, "/v1/completions", **{**GREEDY, "return_token_ids": True, **body})["choices"][0]


def chat(server: RunningServer, **body: Any) -> Any:
    return post(
        server, "/v1/chat/completions", **{"messages": [USER], **GREEDY, "return_token_ids": True, **body}
    )


def error(server: RunningServer, path: str, **body: Any) -> Any:
    status, _, answer = server.request("POST", path, body)
    assert status == 400, answer
    return json.loads(answer)["error"]


def events(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize("size", [129, 3000, 70_000, 7_000_000])
def test_a_prompt_that_is_too_long_is_said_in_openais_words(server: RunningServer, size: int) -> None:
    """Small ones by their tokens, large ones by their characters, before they are tokenized."""
    text = "x" * size
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        ),
        ("/v1/responses", {"input": text}),
    ):
        found = error(server, path, **body)
        assert found["code"] == "context_length_exceeded" and found["type"] == "invalid_request_error"
        assert "his model's maximum context length is 128 tokens" in found["message"]
    assert server.context.admission.num_requests == server.context.admission.num_samples == 0


def test_a_prompt_that_is_too_long_for_the_cache(folder: str) -> None:
    llm = AsyncLLM(
        folder, dtype="float32", device="cpu", num_kv_blocks=2, block_size=16, speculation_control="static"
    )
    with RunningServer(llm) as server:
        found = error(server, "/v1/completions", prompt="x" * 100)
        assert found["code"] == "context_length_exceeded" and "maximum context length" in found["message"]
    llm.close()


def test_openais_client_tells_a_long_prompt(server: RunningServer) -> None:
    import openai

    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.completions.create(model="tiny", prompt="x" * 200)
    assert caught.value.code == "context_length_exceeded"


def test_tokens_of_the_end_of_a_prompt(server: RunningServer) -> None:
    for prompt in ("abcdefgh", list(b"abcdefgh")):
        cut = complete(server, prompt=prompt, truncate_prompt_tokens=3, echo=True)
        assert cut["prompt_token_ids"] == list(b"fgh") and cut["text"].startswith("fgh")
        assert complete(server, prompt=prompt, truncate_prompt_tokens=8)["prompt_token_ids"] == list(
            b"abcdefgh"
        )
    long = complete(server, prompt="x" * 500, truncate_prompt_tokens=-1)
    assert len(long["prompt_token_ids"]) == 124 and len(long["token_ids"]) == 4
    found = chat(server, truncate_prompt_tokens=5)
    assert found["usage"]["prompt_tokens"] == 5
    for wrong in (0, -2):
        assert error(server, "/v1/completions", prompt="x", truncate_prompt_tokens=wrong)["param"] == (
            "truncate_prompt_tokens"
        )


def test_echo_in_chat(server: RunningServer) -> None:
    messages = [USER, {"role": "assistant", "content": "I say"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = chat(server, **body)["choices"][0]["message"]["content"]
    assert chat(server, **body, echo=True)["choices"][0]["message"]["content"] == "I say" + plain
    assert chat(server, echo=True)["choices"][0]["message"] == chat(server)["choices"][0]["message"]
    streamed = server.request(
        "POST", "/v1/chat/completions", {**GREEDY, **body, "echo": True, "stream": True}
    )[2]
    text = "".join(c["delta"].get("content", "") for e in events(streamed) for c in e["choices"])
    assert text == "I say" + plain
    body["messages"] = [USER, {"role": "assistant", "content": [{"type": "text", "text": "I say"}]}]
    assert chat(server, **body, echo=True)["choices"][0]["message"]["content"] == "I say" + plain


def test_what_the_template_is_told(server: RunningServer) -> None:
    without, with_begin = chat(server), chat(server, add_special_tokens=True)
    assert with_begin["prompt_token_ids"] == server.context.tokenizer.encode(  # type: ignore[union-attr]
        bytes(without["prompt_token_ids"]).decode()
    )
    template = "{{ documents[0]['text'] }}|{{ enable_thinking }}|{{ reasoning_effort }}"
    with RunningServer(server.engine, chat_template=template) as templated:
        asked = {"documents": [{"text": "doc"}], "enable_thinking": False, "reasoning_effort": "low"}
        assert bytes(chat(templated, **asked)["prompt_token_ids"]) == b"doc|False|low"
    with RunningServer(
        server.engine, chat_template="{{ reasoning_effort }}{{ messages | length }}"
    ) as templated:
        asked = {"reasoning": {"effort": "high", "summary": None}, "include": ["reasoning.encrypted_content"]}
        answer = post(templated, "/v1/responses", input="x", max_output_tokens=2, **asked)
        assert answer["usage"]["input_tokens"] == len("high1")
    assert (
        error(server, "/v1/responses", input="x", include=["message.output_text.logprobs"])["param"]
        == "include"
    )
    assert error(server, "/v1/responses", input="x", reasoning={"effort": 5})["param"] == "reasoning"


def test_no_alternatives_need_no_logprobs(server: RunningServer) -> None:
    assert chat(server, top_logprobs=0)["choices"][0]["logprobs"] is None


def test_tokens_as_ids(server: RunningServer) -> None:
    asked = {"prompt": "ab", "logprobs": 2, "return_tokens_as_token_ids": True}
    found = complete(server, **asked)
    assert found["logprobs"]["tokens"] == [f"token_id:{t}" for t in found["token_ids"]]
    assert all(name.startswith("token_id:") for top in found["logprobs"]["top_logprobs"] for name in top)
    echoed = complete(server, **asked, echo=True)
    assert echoed["logprobs"]["tokens"][:2] == ["token_id:97", "token_id:98"]
    choice = chat(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [
        f"token_id:{t}" for t in choice["token_ids"]
    ]


def test_prefixes_are_shared_by_all_or_by_none(server: RunningServer, folder: str) -> None:
    assert error(server, "/v1/completions", prompt="x", cache_salt="mine")["param"] == "cache_salt"
    llm = AsyncLLM(
        folder,
        dtype="float32",
        device="cpu",
        num_kv_blocks=16,
        enable_prefix_caching=False,
        speculation_control="static",
    )
    with RunningServer(llm) as alone:
        assert complete(alone, prompt="x", cache_salt="mine")["text"]
    llm.close()


def test_unknown_fields_are_an_option(server: RunningServer) -> None:
    assert error(server, "/v1/completions", prompt="x", temprature=1)["code"] == "unknown_parameter"
    with RunningServer(server.engine, unknown_fields="warn") as lenient:
        assert complete(lenient, prompt="x", temprature=1)["text"] == complete(server, prompt="x")["text"]


def test_forced_calls_without_grammars_still_name_the_choice(server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]
    assert error(server, "/v1/chat/completions", messages=[USER], tools=tools, tool_choice="required")[
        "param"
    ] == ("tool_choice")


def test_large_bodies_have_a_largest_sum(folder: str) -> None:
    from transformers import AutoTokenizer

    engine = ScriptedEngine(folder, AutoTokenizer.from_pretrained(folder), ["a"])
    with RunningServer(engine, max_body_memory=300_000, max_body_size=400_000) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as held:
            held.sendall(head_of("Content-Length: 300000") + b" " * 299_000)
            full = {"prompt": "x", "user": "y" * 200_000}
            for _ in range(100):
                status, headers, answer = server.request("POST", "/v1/completions", full)
                if status == 429:
                    break
                time.sleep(0.05)  # what was sent to the other connection is on its way
            assert status == 429 and json.loads(answer)["error"]["code"] == "max_body_memory"
            assert headers["retry-after"] == "1"
            assert server.request("POST", "/v1/completions", {"prompt": "x" * 60_000})[0] in (200, 400)
        for _ in range(100):
            if server.request("POST", "/v1/completions", full)[0] == 200:
                return
            time.sleep(0.05)
        pytest.fail("what a client that left had sent is still counted")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": [{"content": "x"}]}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 4, "stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_errors_name_the_field_that_the_client_sent(
    server: RunningServer, path: str, body: dict[str, Any], field: str
) -> None:
    """And not the one of the engine that it becomes."""
    found = error(server, path, **body)
    assert found["param"] == field and found["message"].startswith(field)


def test_the_list_of_models_with_a_slash_behind(server: RunningServer) -> None:
    for path in ("/v1/models", "/v1/models/"):
        assert json.loads(server.request("GET", path)[2])["object"] == "list"
    assert json.loads(server.request("GET", "/v1/models/tiny")[2])["object"] == "model"


@pytest.mark.parametrize("seconds", [10**400, -(10**400), 1e308, 0])
def test_a_deadline_that_is_no_time_is_refused(server: RunningServer, seconds: float) -> None:
    found = error(server, "/v1/completions", prompt="x", timeout=seconds)
    assert found["param"] == "timeout" and "at least 0.001" in found["message"]


def test_newer_fields_of_openais_are_known(server: RunningServer) -> None:
    assert chat(server, prompt_cache_options={"mode": "implicit"})["choices"]
    found = error(server, "/v1/chat/completions", messages=[USER], moderation={"model": "m"})
    assert found["code"] == "unsupported_parameter" and "moderation is not supported" in found["message"]
    for field in ("access_programs", "background_options", "context_management", "image", "moderation"):
        found = error(server, "/v1/responses", input="x", **{field: {"a": 1}})
        assert found["code"] == "unsupported_parameter" and found["param"] == field
    nothing = {"stream_options": {"include_obfuscation": False}, "stream": True}
    status, _, _ = server.request("POST", "/v1/responses", {"input": "x", "max_output_tokens": 2, **nothing})
    assert status == 200


def test_stream_options_that_say_nothing(server: RunningServer) -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    body = {"prompt": "x", **GREEDY, "stream": True, "stream_options": options}
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 200 and all("usage" not in chunk for chunk in events(answer))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"structured_outputs": {"choice": ["ab"]}, "min_tokens": 4}, "excludes the end"),
        ({"structured_outputs": {"regex": "a+"}, "bad_words": ["a"]}, "exclude every token"),
    ],
)
def test_parameters_that_leave_nothing_are_the_clients_fault(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    """Clients send a request again after a 500."""
    body = {"prompt": "x", "temperature": 0, "max_tokens": 8, **fields}
    found = error(server, "/v1/completions", **body)
    assert words in found["message"] and found["code"] == "parameters_failed"
    assert found["type"] == "invalid_request_error"
    status, _, answer = server.request("POST", "/v1/completions", {**body, "stream": True})
    assert status == 200 and events(answer)[-1]["error"] == found

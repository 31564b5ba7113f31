"""Bodies nobody would write: the answer is never a 500, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwise import AsyncLLM
from draftwise.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    CountTokensBody,
    DetokenizeBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
)
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"), max_position_embeddings=64)
    llm = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=64, max_num_seqs=4)
    with RunningServer(llm, max_samples=8, request_timeout=20.0) as running:
        yield running
    assert llm.is_alive
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    llm.close()


KINDS: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.sampled_from(
        [2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, 0.5, -0.0, 1e-9, float("nan"), float("inf")]
    ),
    st.text(max_size=6),
    st.sampled_from(
        ["auto", "none", "required", "text", "json_object", "user", "ngram", "coupled", "\x00", "\U0001f600"]
    ),
)
KEYS = st.one_of(
    st.sampled_from(
        ["role", "content", "type", "function", "name", "parameters", "method", "rule", "num_speculative_tokens",
         "speculative_token_tree", "json", "regex", "choice", "schema", "json_schema", "text", "include_usage", "0"]
    ),
    st.text(max_size=4),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", ""])},
        optional={"content": VALUES, "tool_calls": VALUES, "name": VALUES},
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A valid body with some fields set to anything."""
    path = draw(st.sampled_from(list(KINDS)))
    body: dict[str, Any] = {}
    if "completions" in path or "responses" in path or path == "/v1/messages":
        body["max_output_tokens" if "responses" in path else "max_tokens"] = draw(st.integers(1, 4))
    body |= {
        "/v1/completions": {"prompt": "ab"},
        "/v1/chat/completions": {"messages": draw(MESSAGES)},
        "/v1/responses": {"input": "ab"},
        "/v1/messages": {"messages": draw(MESSAGES)},
        "/v1/messages/count_tokens": {"messages": draw(MESSAGES)},
        "/tokenize": {"prompt": "ab"},
        "/detokenize": {"tokens": [1]},
    }[path]
    fields = [name for name in KINDS[path].model_fields if name != "max_tokens"]
    for name in draw(st.lists(st.sampled_from(fields), max_size=3)):
        body[name] = draw(VALUES)
    return path, body


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=bodies())
def test_no_body_is_an_internal_error(server: RunningServer, case: tuple[str, dict[str, Any]]) -> None:
    path, body = case
    status, headers, answer = server.request("POST", path, body)
    assert status in (200, 400, 404), (status, answer[:500])
    if status != 200:
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
    elif headers["content-type"].startswith("application/json"):
        json.loads(answer, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    else:
        assert b'"code":"internal' not in answer and b"internal error" not in answer


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([*KINDS, "/reset_prefix_cache", "/ping"]), data=st.binary(max_size=60))
def test_no_bytes_are_an_internal_error(server: RunningServer, path: str, data: bytes) -> None:
    assert server.request("POST", path, data)[0] in (200, 400, 404)

"""`/v1/messages` with the official client of that interface, whole and in events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftwise import AsyncLLM
from draftwise.models.tokenizer import load_tokenizer
from tests.fakes.running_server import RunningServer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

PIECES = ["<think>Hm", "</think>Let me", " look. <tool", '_call>{"name": "f", "argu',
          'ments": {"a": "<b>"}}</tool_call>\n<tool_call>', '{"name": "g", "arguments": {}}</tool_call>']  # fmt: skip
TOOLS: Any = [
    {
        "name": "f",
        "description": "d",
        "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
    {"name": "g", "input_schema": {"type": "object"}},
]
USER: Any = [{"role": "user", "content": "x"}]
ASK: Any = {"model": "tiny", "max_tokens": 64, "messages": USER}
Make = Callable[..., tuple[ScriptedEngine, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The client's package, imported when tests run: it takes longer than to collect a tenth of all tests."""
    return pytest.importorskip("anthropic")


@pytest.fixture
def scripted(folder: str, anthropic: Any) -> Iterator[Make]:
    opened: list[Any] = []

    def make(pieces: list[str] = PIECES, key: str = "none", **more: Any) -> tuple[ScriptedEngine, Any]:
        engine = ScriptedEngine(folder, load_tokenizer(folder), pieces)
        server = RunningServer(engine, **{"reasoning_parser": "qwen3", **more})
        server.__enter__()
        client = anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)
        opened.extend((client, server))
        return engine, client

    yield make
    for one in opened:
        one.__exit__(None, None, None)


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[RunningServer]:
    llm = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=128)
    with RunningServer(llm) as running:
        yield running
    llm.check_integrity()
    llm.close()


def test_blocks_of_an_answer(scripted: Make) -> None:
    engine, client = scripted()
    answer = client.messages.create(**ASK, tools=TOOLS)
    thought, text, first, second = answer.content
    assert (thought.type, thought.thinking, text.type, text.text) == (
        "thinking",
        "Hm",
        "text",
        "Let me look.",
    )
    assert (first.type, first.name, first.input, second.name, second.input) == (
        "tool_use",
        "f",
        {"a": "<b>"},
        "g",
        {},
    )
    assert answer.stop_reason == "tool_use" and answer.role == "assistant" and answer.model == "tiny"
    assert answer.usage.input_tokens == len(engine.prompts[0]["prompt_token_ids"])
    assert answer.usage.output_tokens == len("".join(PIECES))
    assert engine.prompts[0]["prompt"].startswith("[tools: f g]")
    # The whole answer goes back, with results.
    results = [
        {"type": "tool_result", "tool_use_id": first.id, "content": "5", "is_error": True},
        {"type": "tool_result", "tool_use_id": second.id, "content": [{"type": "text", "text": "6"}]},
        {"type": "text", "text": "and?"},
    ]
    turn = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    client.messages.create(**{**ASK, "messages": turn}, tools=TOOLS, system="Be brief.")
    said = engine.prompts[-1]["prompt"]
    assert said.endswith(
        "<system>Be brief.\n<user>x\n<assistant>Let me look.\n<tool>5\n<tool>6\n<user>and?\n<assistant>"
    )
    one = client.messages.create(
        **ASK, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
    none = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
    assert none.stop_reason == "end_turn" and "<tool_call>" in none.content[-1].text


def test_events_come_in_their_order(scripted: Make) -> None:
    _, client = scripted()
    raw = list(client.messages.create(**ASK, tools=TOOLS, stream=True))
    kinds = [event.type for event in raw]
    short = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert [e.index for e in raw if e.type == "content_block_start"] == [0, 1, 2, 3]
    with client.messages.stream(**ASK, tools=TOOLS) as stream:  # the client puts it together
        final = stream.get_final_message()
    whole = client.messages.create(**ASK, tools=TOOLS)
    for streamed, at_once in zip(final.content, whole.content, strict=True):
        skip = {"id"}
        assert streamed.model_dump(exclude=skip) == at_once.model_dump(exclude=skip)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def test_what_is_asked_reaches_the_engine(scripted: Make, anthropic: Any) -> None:
    engine, client = scripted(["a"], chat_template="{{ enable_thinking }}|{{ reasoning_effort }}")
    client.messages.create(
        **ASK,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        speed="fast",
        extra_body={
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "seed": 7,
            "speculation": {"method": "none"},
        },
    )
    params = engine.params[-1]
    assert (params.stop, params.temperature, params.top_k, params.top_p) == (("END",), 0.5, 3, 0.9)
    assert (params.seed, params.max_tokens, params.speculation) == (7, 64, {"method": "none"})
    assert params.structured_outputs is not None and params.structured_outputs.after == ("</think>",)
    assert params.structured_outputs.within == 1024
    assert engine.prompts[-1]["prompt"] == "True|low"
    for budget in (0, "many", None):
        asked: Any = {"type": "enabled", "budget_tokens": budget}
        if budget is None:
            client.messages.create(**ASK, thinking=asked)
            assert engine.params[-1].structured_outputs is None
        else:
            with pytest.raises(anthropic.BadRequestError, match="budget_tokens must be an integer"):
                client.messages.create(**ASK, thinking=asked)
    client.messages.create(**ASK, thinking={"type": "disabled"})
    assert engine.prompts[-1]["prompt"].startswith("False|")


def test_a_forced_call(scripted: Make) -> None:
    engine, client = scripted(['{"a": "b', '"}'], reasoning_parser=None)
    answer = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "f"})
    assert [block.input for block in answer.content] == [{"a": "b"}] and answer.stop_reason == "tool_use"
    assert engine.params[-1].structured_outputs is not None
    engine.pieces = ['{"a": "b']
    cut = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "f"})
    assert cut.content[0].input == {"INVALID_JSON": '{"a": "b'}


def test_an_answer_that_was_begun_goes_on(scripted: Make) -> None:
    engine, client = scripted(["!"])
    said = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    client.messages.create(**{**ASK, "messages": said})
    assert engine.prompts[-1]["prompt"] == "<user>x\n<assistant>Well"


def test_messages_of_one_role_are_one(scripted: Make) -> None:
    engine, client = scripted(["!"])
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    said = [*USER, {"role": "user", "content": [{"type": "text", "text": "y"}, document]}]
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.messages.create(**{**ASK, "messages": said}, system=system)
    assert engine.prompts[-1]["prompt"] == "<system>a\nb\n<user>x\ny\nD\n<assistant>"


def test_a_real_engine(server: RunningServer, anthropic: Any) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        ask: Any = {**ASK, "max_tokens": 12, "system": "Be brief.", "extra_body": {"temperature": 0}}
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            final = stream.get_final_message()
        assert [b.text for b in whole.content] == [b.text for b in final.content]
        assert whole.stop_reason == final.stop_reason in ("max_tokens", "end_turn")
        count = client.messages.count_tokens(model="tiny", messages=USER, system="Be brief.")
        used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        assert count.input_tokens == used == final.usage.input_tokens + final.usage.cache_read_input_tokens
        stop = client.messages.create(**ask, stop_sequences=[whole.content[0].text[1:3]])
        assert stop.stop_reason == "stop_sequence" and stop.stop_sequence == whole.content[0].text[1:3]
        models = client.models.list()
        assert [model.id for model in models.data] == ["tiny"] and client.models.retrieve(
            "tiny"
        ).type == "model"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role is 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' are not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "the id 't'",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "a tool_use needs"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "only custom is supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "h"}}, "no tool is called 'h'"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice: expected"),
        ({"thinking": {"type": "much"}}, "thinking: type"),
        ({"output_config": {"format": {"type": "xml"}}}, "format must be of type json_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"max_tokns": 5}, "did you mean 'max_tokens'"),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "prompt is too long: .*maximum context length",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: RunningServer, anthropic: Any, body: Any, words: str
) -> None:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match=words) as caught,
    ):
        client.messages.create(**{**ASK, "max_tokens": 4}, extra_body=body)
    told = caught.value.body
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"


def test_errors_have_the_form_of_their_interface(scripted: Make, anthropic: Any) -> None:
    _, client = scripted(key="wrong", api_keys=("right",), max_body_size=1000)
    with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key") as refused:
        client.messages.create(**ASK)
    assert refused.value.body["error"]["type"] == "authentication_error"
    right = client.with_options(api_key="right")
    assert right.messages.create(**ASK).content
    with pytest.raises(anthropic.APIStatusError, match="larger than") as large:
        right.messages.create(**{**ASK, "system": "x" * 2000})
    assert large.value.body["error"]["type"] == "request_too_large"
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        right.messages.create(**{**ASK, "model": "other"})


def test_a_stream_that_fails_says_so(folder: str) -> None:
    engine = ScriptedEngine(folder, load_tokenizer(folder), ["a"], hang=True)
    with RunningServer(engine, request_timeout=0.2) as server:
        status, _, data = server.request("POST", "/v1/messages", {**ASK, "stream": True})
    last = data.decode().strip().split("\n\n")[-1].splitlines()
    told = json.loads(last[1].removeprefix("data: "))
    assert status == 200 and last[0] == "event: error"
    assert told["type"] == "error" and told["error"]["type"] == "overloaded_error"


def test_what_other_servers_have_is_refused_with_a_reason(server: RunningServer) -> None:
    for path, words in (
        ("/v1/embeddings", "no embeddings"), ("/score", "no embeddings"), ("/sleep?level=1", "nothing to free"),
        ("/wake_up", "nothing to free"), ("/v1/audio/speech", "no audio"), ("/v1/files", "stores nothing"),
    ):  # fmt: skip
        status, _, data = server.request("POST", path, {})
        error = json.loads(data)["error"]
        assert status == 404 and words in error["message"] and error["code"] == "unknown_url", path
    assert json.loads(server.request("GET", "/is_sleeping")[2]) == {"is_sleeping": False}

"""`/v1/responses` with the official client: function calls whole and in pieces, conversations with calls in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from draftwise import AsyncLLM
from draftwise.models.tokenizer import load_tokenizer
from draftwise.server.tools import Arguments, template_calls
from tests.fakes.running_server import RunningServer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

PIECES = ["Let me", " look. <tool", '_call>{"name": "f", "argu', 'ments": {"a": "<b>"}}</tool_call>\n<tool_call>',
          '{"name": "g", "arguments": {}}</tool_call>']  # fmt: skip
TOOLS: Any = [
    {"type": "function", "name": "f", "description": "d", "strict": True,
     "parameters": {"type": "object", "properties": {"a": {"enum": ["<b>", "c"]}}, "required": ["a"],
                    "additionalProperties": False}},
    {"type": "function", "name": "g", "parameters": None, "strict": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def scripted(folder: str) -> Iterator[Callable[..., tuple[ScriptedEngine, Any]]]:
    opened: list[Any] = []

    def make(pieces: list[str] = PIECES) -> tuple[ScriptedEngine, Any]:
        engine = ScriptedEngine(folder, load_tokenizer(folder), pieces)
        server = RunningServer(engine)
        server.__enter__()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        opened.extend((client, server))
        return engine, client

    yield make
    for one in opened:  # a client first: it keeps connections
        one.__exit__(None, None, None)


@pytest.fixture(scope="module")
def client(folder: str) -> Iterator[Any]:
    llm = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=128, speculation_control="static")
    with (
        RunningServer(llm) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    llm.check_integrity()
    llm.close()


def test_calls_are_items_of_the_answer(scripted: Callable[..., Any]) -> None:
    engine, client = scripted()
    answer = client.responses.create(model="tiny", input="x", tools=TOOLS)
    message, first, second = answer.output
    assert answer.status == "completed" and answer.output_text == "Let me look."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "f", {"a": "<b>"})
    assert (second.name, second.arguments, second.status) == ("g", "{}", "completed")
    assert len({message.id, first.id, second.id, first.call_id, second.call_id}) == 5
    assert [t.name for t in answer.tools] == ["f", "g"] and answer.tool_choice == "auto"
    assert engine.prompts[0]["prompt"].startswith("[tools: f g]")
    one = client.responses.create(model="tiny", input="x", tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"] and not one.parallel_tool_calls
    none = client.responses.create(model="tiny", input="x", tools=TOOLS, tool_choice="none")
    assert "<tool_call>" in none.output_text and "[tools" not in engine.prompts[-1]["prompt"]
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    client.responses.create(model="tiny", input="x", tools=TOOLS, tool_choice=choice)
    assert engine.prompts[-1]["prompt"].startswith("[tools: g]")


def test_events_of_calls(scripted: Callable[..., Any]) -> None:
    _, client = scripted()
    with client.responses.stream(model="tiny", input="x", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    added = [e for e in events if e.type == "response.output_item.added"]
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [e.output_index for e in added] == [e.output_index for e in done] == [0, 1, 2]
    assert [e.item.id for e in added] == [item.id for item in final.output]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Let me look."
    arguments = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert arguments == [item.arguments for item in final.output[1:]] == ['{"a": "<b>"}', "{}"]


def test_a_conversation_with_calls(scripted: Callable[..., Any]) -> None:
    engine, client = scripted()
    turn: list[Any] = [{"role": "user", "content": "x"}]
    first = client.responses.create(model="tiny", input=turn, tools=TOOLS)
    turn += first.output
    turn += [
        {"type": "function_call_output", "call_id": c.call_id, "output": f"result of {c.name}"}
        for c in first.output
        if c.type == "function_call"
    ]
    client.responses.create(model="tiny", input=turn, tools=TOOLS)
    assert engine.prompts[-1]["prompt"].partition("]")[2] == (
        "<user>x\n<assistant>Let me look.\n<tool>result of f\n<tool>result of g\n<assistant>"
    )


def test_arguments_for_templates() -> None:
    """Both ways in which templates write arguments give the same."""
    import jinja2.sandbox

    text = '{"a": "ü", "b": 1}'
    calls = template_calls([{"id": "1", "function": {"name": "f", "arguments": text}}, "?", {"function": 3}])
    assert calls[1:] == ["?", {"function": 3}] and isinstance(calls[0]["function"]["arguments"], Arguments)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    for way in ("{{ x | tojson }}", "{{ '' + x }}", "{{ x + '' }}", "{{ '' ~ x }}", "{{ x }}"):
        assert environment.from_string(way).render(x=calls[0]["function"]["arguments"]) == text
    assert template_calls([{"function": {"arguments": "[1"}}]) == [{"function": {"arguments": "[1"}}]


def test_forced_calls(client: Any) -> None:
    """The model is random: that the arguments fit the schema is the grammar's doing."""
    more: dict[str, Any] = {"model": "tiny", "input": "x", "tools": TOOLS, "temperature": 1.0}
    choice: Any = {"type": "function", "name": "f"}
    for seed in range(3):
        extra = {"extra_body": {"seed": seed}}
        (call,) = client.responses.create(tool_choice=choice, **more, **extra).output
        assert call.type == "function_call" and call.name == "f"
        assert json.loads(call.arguments)["a"] in ("<b>", "c")
        with client.responses.stream(tool_choice=choice, **more, **extra) as stream:
            deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
            assert stream.get_final_response().output[0].arguments == "".join(deltas) == call.arguments
    two = [TOOLS[0], {**TOOLS[1], "parameters": {"type": "object", "maxProperties": 0}}]
    (call,) = client.responses.create(**{**more, "tools": two}, tool_choice="required").output
    assert call.type == "function_call" and call.name in ("f", "g") and call.status == "completed"


def test_arguments_of_a_named_function_come_as_they_grow(scripted: Callable[..., Any]) -> None:
    _, client = scripted(['{"a":', ' "c"', "}"])
    choice: Any = {"type": "function", "name": "f"}
    with client.responses.stream(model="tiny", input="x", tools=TOOLS, tool_choice=choice) as stream:
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
    assert deltas == ['{"a":', ' "c"', "}"]


def test_a_call_that_is_cut_is_incomplete(client: Any) -> None:
    choice: Any = {"type": "function", "name": "f"}
    answer = client.responses.create(
        model="tiny", input="x", tools=TOOLS, tool_choice=choice, max_output_tokens=3, temperature=0
    )
    assert answer.status == "incomplete" and answer.output[0].status == "incomplete"
    assert answer.output[0].arguments == '{"a'


def test_structured_answers(client: Any) -> None:
    class Small(BaseModel):
        yes: bool

    answer = client.responses.parse(
        model="tiny", input="x", text_format=Small, temperature=1.0, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Small)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"previous_response_id": "resp_1"}, "stores no answers"),
        ({"tools": [{"type": "web_search"}]}, "only function"),
        ({"tools": [{"type": "function"}]}, "needs a name"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "no tool is called 'h'"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice: expected"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "h"}]},
            },
            "'h'",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "contradict",
        ),
        ({"text": {"format": 3}}, "text.format: expected an object"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "call_id 'c'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "needs arguments"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "stores no items"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "'web_search_call' are not supported"),
        ({"input": [{"type": "reasoning", "content": [{"a": 1}]}]}, "content of reasoning is a list"),
        ({"background": True}, "background is not supported"),
        ({"top_logprobs": 1}, "top_logprobs is not supported"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {"run": 7}}, "metadata: .* string"),
        ({"metadata": "run"}, "metadata: .* dictionary"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: Any, body: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.post("/responses", body={"input": "x", **body}, cast_to=object)


def test_what_says_nothing_is_taken(client: Any) -> None:
    answer = client.responses.create(
        model="tiny",
        input="x",
        max_output_tokens=2,
        background=False,
        include=[],
        store=True,
        top_logprobs=0,
        truncation="disabled",
    )
    assert answer.store is False and answer.previous_response_id is None


def test_what_the_request_said_comes_back(client: Any) -> None:
    answer = client.responses.create(
        model="tiny", input="x", max_output_tokens=2, metadata={"run": "7"}, reasoning={"effort": "low"}
    )
    assert answer.metadata == {"run": "7"} and answer.reasoning.effort == "low"
    assert answer.truncation == "disabled" and answer.background is False

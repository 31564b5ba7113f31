"""Reasoning in the answers of chat completions and of the Responses API, with the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from draftwise import AsyncLLM
from draftwise.config.embedded import embedded_path
from draftwise.models.tokenizer import load_tokenizer
from tests.fakes.running_server import RunningServer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

PIECES = ["<thi", "nk>\nI ", "could call <tool", "_call>.\n</th", "ink>\n\nLet me look.\n<tool_call>",
          '{"name": "f", "arguments": {"a": 1}}</tool_call>']  # fmt: skip
THOUGHT = "I could call <tool_call>."
MARKED = len("<think>\nI could call <tool_call>.\n</think>")  # the tokens are bytes
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER: Any = [{"role": "user", "content": "x"}]
Make = Callable[..., tuple[ScriptedEngine, openai.OpenAI]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def scripted(folder: str) -> Iterator[Make]:
    opened: list[Any] = []

    def make(
        pieces: list[str] = PIECES, parser: str | None = "qwen3", **more: Any
    ) -> tuple[ScriptedEngine, Any]:
        engine = ScriptedEngine(folder, load_tokenizer(folder), pieces)
        server = RunningServer(engine, reasoning_parser=parser, **more)
        server.__enter__()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        opened.extend((client, server))
        return engine, client

    yield make
    for one in opened:
        one.__exit__(None, None, None)


def test_chat(scripted: Make) -> None:
    _, client = scripted()
    answer = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    message: Any = answer.choices[0].message
    assert message.reasoning_content == message.reasoning == THOUGHT
    assert message.content == "Let me look." and answer.choices[0].finish_reason == "tool_calls"
    assert [c.function.arguments for c in message.tool_calls] == ['{"a": 1}']
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == MARKED
    hidden: Any = client.chat.completions.create(
        model="tiny", messages=USER, extra_body={"include_reasoning": False}
    )
    assert "reasoning" not in hidden.choices[0].message.model_extra
    assert hidden.choices[0].message.content.startswith("Let me look.\n<tool_call>")


@pytest.mark.parametrize("tools", [TOOLS, openai.omit])
def test_a_stream_of_chat(scripted: Make, tools: Any) -> None:
    _, client = scripted()
    thoughts, text, arguments, usage = "", "", "", None
    order = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=USER, tools=tools, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta: Any = choice.delta
            extra = delta.model_extra
            assert extra.get("reasoning_content") == extra.get("reasoning")
            thoughts += extra.get("reasoning") or ""
            text += delta.content or ""
            arguments += "".join(c.function.arguments for c in delta.tool_calls or ())
            order += ["thought"] * ("reasoning" in extra) + ["text"] * bool(delta.content)
    assert thoughts == THOUGHT and text.startswith("Let me look.")
    assert arguments == ('{"a": 1}' if tools is TOOLS else "")
    assert order == sorted(order, key=["thought", "text"].index) and order.count("thought") > 1
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == MARKED


def test_responses(scripted: Make) -> None:
    engine, client = scripted()
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}]
    answer: Any = client.responses.create(model="tiny", input="x", tools=tools)
    thought, message, call = answer.output
    assert (
        thought.type == "reasoning" and thought.content[0].text == THOUGHT and thought.status == "completed"
    )
    assert message.content[0].text == "Let me look." and call.arguments == '{"a": 1}'
    assert answer.usage.output_tokens_details.reasoning_tokens == MARKED
    # The items go back as they are.
    turn = [{"role": "user", "content": "x"}, *answer.output]
    turn.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    client.responses.create(model="tiny", input=turn, tools=tools)
    assert "<assistant>Let me look.\n<tool>5\n" in engine.prompts[-1]["prompt"]


def test_a_stream_of_responses(scripted: Make) -> None:
    _, client = scripted(PIECES[:-1])
    kinds, thought, text = [], "", ""
    last: Any = None
    for one in client.responses.create(model="tiny", input="x", stream=True):
        kinds.append(one.type)
        thought += one.delta if one.type == "response.reasoning_text.delta" else ""
        text += one.delta if one.type == "response.output_text.delta" else ""
        last = one
    assert thought == THOUGHT and text == "Let me look.\n<tool_call>"
    short = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert short == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert [item.type for item in last.response.output] == ["reasoning", "message"]
    assert last.response.usage.output_tokens_details.reasoning_tokens == MARKED


def test_a_grammar_holds_behind_reasoning(scripted: Make) -> None:
    engine, client = scripted()
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}

    def marks() -> tuple[Any, Any]:
        spec = engine.params[-1].structured_outputs
        assert spec is not None
        return spec.after, spec.opened_by

    client.chat.completions.create(model="tiny", messages=USER, response_format=form)
    assert marks() == (("</think>",), "<think>")
    client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, tool_choice="required")
    assert marks() == (("</think>",), "<think>")
    said: Any = [*USER, {"role": "assistant", "content": "<think>Hm"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(model="tiny", messages=said, response_format=form, extra_body=more)
    assert marks() == (("</think>",), None)
    client.responses.create(model="tiny", input="x", text={"format": {"type": "json_object"}})
    assert marks() == (("</think>",), "<think>")


def test_a_forced_call_behind_reasoning(scripted: Make) -> None:
    _, client = scripted(["<think>Hm</th", 'ink>{"name": "f", "argu', 'ments": {"a": 1}}'])
    answer: Any = client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice="required"
    )
    message = answer.choices[0].message
    assert message.reasoning == "Hm" and not message.content
    assert message.tool_calls[0].function.arguments == '{"a": 1}'


def test_harmony(scripted: Make) -> None:
    pieces = ["<|channel|>analysis<|mess", "age|>Hm<|end|><|start|>assistant<|channel|>", "commentary to=functions.f ",
              '<|constrain|>json<|message|>{"a": 1}<|call|>']  # fmt: skip
    _, client = scripted(pieces, "openai_gptoss", tool_call_parser="openai")
    answer: Any = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    message = answer.choices[0].message
    assert (message.reasoning, message.content) == ("Hm", None)
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}


def test_earlier_reasoning_reaches_the_template(scripted: Make, folder: str) -> None:
    engine, client = scripted(
        ["a"],
        chat_template="{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}",
    )
    for name in ("reasoning", "reasoning_content"):
        said: Any = [*USER, {"role": "assistant", "content": "yes", name: "Hm"}, *USER]
        client.chat.completions.create(model="tiny", messages=said)
        assert engine.prompts[-1]["prompt"] == "[]x[Hm]yes[]x"
    item: Any = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm"}]}
    client.responses.create(
        model="tiny", input=[item, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "x"}]
    )
    assert engine.prompts[-1]["prompt"] == "[Hm]yes[]x"


UNIT = '<think>the level is low</think>{"level":2}\n'
LEVEL = {
    "type": "object",
    "properties": {"level": {"type": "integer", "maximum": 9}},
    "required": ["level"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def embedded() -> Iterator[openai.OpenAI]:
    llm = AsyncLLM(
        num_kv_blocks=256,
        max_model_len=1024,
        speculation_control="static",
        speculative_config={"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_min": 1},
    )
    template = "{{ messages[0].content }}"  # the model goes on with what was written
    with (
        RunningServer(llm, reasoning_parser="qwen3", chat_template=template) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    llm.close()


@pytest.mark.parametrize("forced", [False, True])
def test_reasoning_ends_inside_an_accepted_draft(embedded: openai.OpenAI, forced: bool) -> None:
    """With a grammar behind it: the same answer as without drafts, whole and streamed, and the mark in mid-draft."""
    text = UNIT * 6 + "<think>"
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 60}
    if forced:
        ask["tools"] = [{"type": "function", "function": {"name": "f", "parameters": LEVEL}}]
        ask["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    else:
        ask["extra_body"] = {"structured_outputs": {"json": LEVEL, "disable_any_whitespace": True}}
    found = {}
    for method in ("none", "ngram"):
        more = {"speculation": {"method": method}, "return_token_sources": True, "return_token_ids": True}
        body = {**ask.get("extra_body", {}), **more}
        answer: Any = embedded.chat.completions.create(**{**ask, "extra_body": body}, temperature=0)
        message = answer.choices[0].message
        said = message.tool_calls[0].function.arguments if forced else message.content
        assert message.reasoning == "the level is low" and json.loads(said) == {"level": 2}
        found[method] = answer.choices[0]
        streamed: dict[str, Any] = {"reasoning": "", "content": "", "arguments": "", "sources": []}
        for chunk in embedded.chat.completions.create(
            **{**ask, "extra_body": body}, temperature=0, stream=True
        ):
            delta: Any = chunk.choices[0].delta
            streamed["reasoning"] += delta.model_extra.get("reasoning") or ""
            streamed["content"] += delta.content or ""
            streamed["arguments"] += "".join(c.function.arguments for c in delta.tool_calls or ())
            streamed["sources"] += (chunk.choices[0].model_extra or {})["token_sources"]
        assert streamed["reasoning"] == message.reasoning
        assert streamed["arguments" if forced else "content"] == said
        assert streamed["sources"] == answer.choices[0].token_sources
    plain, drafted = found["none"], found["ngram"]
    assert plain.token_ids == drafted.token_ids
    assert {source["method"] for source in plain.token_sources} == {"none"}
    # The tokens of "</think>" and what follows them, with the place of each in its step's draft.
    tokenizer = load_tokenizer(str(embedded_path("target")))
    texts = [tokenizer.decode([token]) for token in drafted.token_ids]
    end = next(i for i in range(len(texts)) if "".join(texts[: i + 1]).endswith("</think>"))
    last, after = drafted.token_sources[end : end + 2]
    assert last["source"] == after["source"] == "draft" and last["method"] == after["method"] == "ngram"
    assert after["position"] == last["position"] + 1 > 0, "one draft holds the end of reasoning and goes on"


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_budget_ends_reasoning(embedded: openai.OpenAI, method: str) -> None:
    """Inside of drafts, too: the same tokens with and without them, at most so many of them reasoning."""
    found = {}
    for one in {"none", method}:
        body = {"thinking_token_budget": 3, "speculation": {"method": one}, "return_token_ids": True}
        answer: Any = embedded.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": UNIT * 6 + "<think>"}],
            max_tokens=40,
            temperature=0,
            extra_body=body,
        )
        found[one] = answer.choices[0].token_ids
        message = answer.choices[0].message
        assert message.reasoning and message.content, "it answers"
    tokenizer = load_tokenizer(str(embedded_path("target")))
    assert found["none"] == found[method]
    texts = [tokenizer.decode([token]) for token in found[method]]
    assert "".join(texts).partition("</think>")[0] == "".join(texts[:3])


def test_a_budget_reaches_the_engine_or_is_refused(scripted: Make) -> None:
    engine, client = scripted()
    body = {"thinking_token_budget": 7}
    client.chat.completions.create(model="tiny", messages=USER, extra_body=body)
    spec = engine.params[-1].structured_outputs
    assert spec is not None and spec.is_free and (spec.opened_by, spec.within) == ("<think>", 7)
    form: Any = {"type": "json_object"}
    client.chat.completions.create(model="tiny", messages=USER, extra_body=body, response_format=form)
    spec = engine.params[-1].structured_outputs
    assert spec is not None and spec.json_object and spec.within == 7
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        client.chat.completions.create(model="tiny", messages=USER, extra_body={"thinking_token_budget": -1})
    _, harmony = scripted(parser="openai_gptoss")
    _, without = scripted(parser=None)
    with pytest.raises(openai.BadRequestError, match="needs a server with --reasoning-parser"):
        without.chat.completions.create(model="tiny", messages=USER, extra_body=body)
    with pytest.raises(openai.BadRequestError, match="use reasoning_effort"):
        harmony.chat.completions.create(model="tiny", messages=USER, extra_body=body)


def test_defaults_of_the_server_hold_where_requests_say_nothing(scripted: Make) -> None:
    template = "{{ enable_thinking }}|{{ language }}"
    engine, client = scripted(
        ["a"],
        chat_template=template,
        default_chat_template_kwargs={"enable_thinking": False, "language": "d"},
        enable_force_include_usage=True,
    )
    client.chat.completions.create(model="tiny", messages=USER)
    assert engine.prompts[-1]["prompt"] == "False|d"
    own: Any = {"chat_template_kwargs": {"enable_thinking": True}}
    chunks = list(client.chat.completions.create(model="tiny", messages=USER, stream=True, extra_body=own))
    assert engine.prompts[-1]["prompt"] == "True|d"
    assert chunks[-1].usage is not None and not chunks[-1].choices

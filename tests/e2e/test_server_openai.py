"""The official client against the server over a tiny model with a tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from draftwise import AsyncLLM
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"))
    llm = AsyncLLM(
        folder,
        dtype="float32",
        device="cpu",
        num_kv_blocks=512,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        speculation_control="static",
    )
    with RunningServer(llm) as running:
        yield running
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    llm.close()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}
EXACT = {"ignore_eos": True}


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        prompt="abcabcabc", **GREEDY, extra_body={"return_token_ids": True, **EXACT}
    )
    text, ids, reasons = "", [], []
    usage = None
    for chunk in client.completions.create(
        prompt="abcabcabc",
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
        extra_body={"return_token_ids": True, **EXACT},
    ):
        if chunk.usage is not None:
            usage = chunk.usage
            assert chunk.choices == []
            continue
        text += chunk.choices[0].text
        ids += chunk.choices[0].model_extra["token_ids"]  # type: ignore[index]
        reasons.append(chunk.choices[0].finish_reason)
    choice = whole.choices[0]
    assert text == choice.text and ids == choice.model_extra["token_ids"]  # type: ignore[index]
    assert reasons[-1] == choice.finish_reason == "length" and set(reasons[:-1]) <= {None}
    assert usage is not None and usage.completion_tokens == 24 == len(ids) and usage.prompt_tokens == 9


def test_batch_n_and_token_ids_keep_their_order(client: openai.OpenAI) -> None:
    texts = ["one", "two", "three"]
    ids = [list(text.encode()) for text in texts]
    by_text = client.completions.create(prompt=texts, **GREEDY, extra_body=EXACT)
    by_ids = client.completions.create(prompt=ids, **GREEDY, extra_body=EXACT)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices]
    assert [c.index for c in by_text.choices] == [0, 1, 2]
    single = client.completions.create(prompt="two", **GREEDY, extra_body=EXACT)
    assert single.choices[0].text == by_text.choices[1].text
    many = client.completions.create(
        prompt=["one", "two"], model="tiny", n=2, seed=5, max_tokens=8, extra_body=EXACT
    )
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text != many.choices[1].text
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(
        prompt=["one", "two"], model="tiny", n=2, seed=5, max_tokens=8, stream=True, extra_body=EXACT
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [c.text for c in many.choices]


def test_speculation_is_per_request_and_reported(client: openai.OpenAI) -> None:
    answers = {}
    for method in ("none", "ngram"):
        body = {"speculation": {"method": method}, "return_metrics": True, "return_trace": True, **EXACT}
        answers[method] = client.completions.create(prompt="xyxyxyxy", **GREEDY, extra_body=body)
    none, ngram = (a.model_extra for a in answers.values())
    assert answers["none"].choices[0].text == answers["ngram"].choices[0].text
    assert none is not None and ngram is not None
    assert none["metrics"]["speculation"]["num_drafts"] == 0
    assert ngram["metrics"]["speculation"]["num_drafts"] > 0
    assert {t["source"] for s in none["trace"] for t in s["tokens"]} == {"target"}
    # The trace accounts for every token, in order, and for what the counters say.
    tokens = [t for step in ngram["trace"] for t in step["tokens"]]
    assert [t["output_index"] for t in tokens] == list(range(24))
    assert (
        sum(t["source"] == "draft" for t in tokens) == ngram["metrics"]["speculation"]["num_accepted_tokens"]
    )
    assert sum(len(s["draft"]) for s in ngram["trace"]) == ngram["metrics"]["speculation"]["num_draft_tokens"]
    for step in ngram["trace"]:
        accepted = [step["draft"][node]["token_id"] for node in step["accepted"]]
        drafted = [t["token_id"] for t in step["tokens"] if t["source"] == "draft"]
        assert drafted == accepted[: len(drafted)]


def test_a_streamed_trace_is_the_whole_trace(client: openai.OpenAI) -> None:
    body = {"return_trace": True, **EXACT}
    whole = client.completions.create(prompt="xyxyxyxy", **GREEDY, extra_body=body)
    steps: list[Any] = []
    for chunk in client.completions.create(prompt="xyxyxyxy", stream=True, **GREEDY, extra_body=body):
        steps += chunk.model_extra["trace"]  # type: ignore[index]
    assert steps == whole.model_extra["trace"]  # type: ignore[index]


def test_logprobs_echo_and_scoring(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="abcd", echo=True, logprobs=2, **GREEDY, extra_body=EXACT)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert answer.choices[0].text.startswith("abcd") and logprobs.tokens[:4] == list("abcd")
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 28
    assert logprobs.token_logprobs[0] is None and all(
        v is not None and v <= 0 for v in logprobs.token_logprobs[1:]
    )
    # Scoring, as evaluation harnesses do it: nothing but the prompt comes back.
    score = client.completions.create(model="tiny", prompt="abcd", echo=True, logprobs=2, max_tokens=0)
    assert score.choices[0].text == "abcd" and score.usage is not None and score.usage.completion_tokens == 0
    assert score.choices[0].logprobs is not None
    assert score.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:4]


def test_bytes_of_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    """Tokens are single bytes here: none of these characters is one."""
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            logprobs=True,
            top_logprobs=1,
            stream=stream,
            extra_body={"structured_outputs": {"choice": ["é😀"]}},
        )
        choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        found = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
        data = b"".join(bytes(entry.bytes) for entry in found)
        assert data.removesuffix(b"<|end|>").decode() == "é😀"
        for entry in found:  # the likeliest, and the one that was taken: never three bytes in place of one
            assert all(len(other.bytes) == 1 or other.token.startswith("<|") for other in entry.top_logprobs)


def test_stop_strings_are_never_leaked(client: openai.OpenAI) -> None:
    free = client.completions.create(prompt="hello", **GREEDY, extra_body=EXACT).choices[0].text
    stop = next(free[i : i + 2] for i in range(6, len(free) - 2) if free[i : i + 2].isprintable())
    expected = free[: free.index(stop)]
    pieces = [
        chunk.choices[0]
        for chunk in client.completions.create(
            prompt="hello", stream=True, stop=[stop], **GREEDY, extra_body=EXACT
        )
    ]
    assert "".join(p.text for p in pieces) == expected
    assert pieces[-1].finish_reason == "stop" and pieces[-1].model_extra["stop_reason"] == stop  # type: ignore[index]


def test_chat_stream_and_whole(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    whole = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=3, **GREEDY, extra_body=EXACT
    )
    chunks = list(
        client.chat.completions.create(
            messages=messages,
            logprobs=True,
            top_logprobs=3,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
            extra_body=EXACT,
        )
    )
    deltas = [c.choices[0] for c in chunks if c.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert (
        chunks[-1].usage.total_tokens == whole.usage.total_tokens
    )  # cached tokens differ: the prompt was seen
    content = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and len(content) == 24
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy: the likeliest
    streamed = [e for d in deltas if d.logprobs and d.logprobs.content for e in d.logprobs.content]
    assert streamed == content


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="tiny", input="hi", instructions="be brief", temperature=0, max_output_tokens=12
    )
    text = whole.output_text
    pieces, last = "", None
    for piece in client.responses.create(
        model="tiny", input="hi", instructions="be brief", temperature=0, max_output_tokens=12, stream=True
    ):
        if piece.type == "response.output_text.delta":
            pieces += piece.delta
        last = piece
    assert pieces == text and last is not None
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == text and last.response.usage is not None
    for usage in (whole.usage, last.response.usage):
        assert usage is not None
        for details in (
            usage.input_tokens_details,
            usage.output_tokens_details,
        ):  # all that the client's types want
            type(details).model_validate(details.model_dump(exclude_unset=True))


def test_seed_decides_the_text(client: openai.OpenAI) -> None:
    def once(seed: int, method: str) -> str:
        body = {"speculation": {"method": method}, **EXACT}
        return client.completions.create(
            model="tiny", prompt="seed", seed=seed, max_tokens=16, extra_body=body
        ).choices[0].text  # fmt: skip

    assert once(1, "none") == once(1, "ngram") != once(2, "none")


def test_models_tokenize_and_detokenize(server: RunningServer, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    tokens = client.post("/../tokenize", body={"prompt": "añb"}, cast_to=object)
    assert tokens == {"count": 4, "max_model_len": 512, "tokens": list("añb".encode())}
    text = client.post("/../detokenize", body={"tokens": list("añb".encode())}, cast_to=object)
    assert text == {"prompt": "añb"}
    chat: Any = client.post(
        "/../tokenize", body={"messages": [{"role": "user", "content": "x"}]}, cast_to=object
    )
    assert bytes(chat["tokens"]).decode() == "<user>x\n<assistant>"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1, "temperature"),
        ("top_p", 2, "top_p"),
        ("n", 0, "n is 0"),
        ("n", 1000, "at most 256"),
        ("max_tokens", 0, "max_tokens"),
        ("logprobs", 50, "0..20"),
        ("temprature", 1, "did you mean 'temperature'"),
        ("speculation", {"method": "eagel"}, "not loaded"),
        ("speculation", {"methd": "none"}, "did you mean 'method'"),
        ("prompt", "", "empty"),
        ("prompt", [], "empty"),
        ("prompt", [1, 999], "out of range"),
        ("prompt", "x" * 600, "512"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("suffix", "x", "suffix"),
        ("best_of", 3, "best_of"),
        ("timeout", -1, "timeout"),
        ("stream_options", {"x": 1}, "stream_options"),
        ("stream_options", {"include_usage": True}, "needs stream"),
        ("temperature", True, "temperature"),
        ("max_tokens", "12", "max_tokens"),
    ],
)
def test_invalid_fields_are_named(client: openai.OpenAI, field: str, value: Any, words: str) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, field: value}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body=body, cast_to=object)
    assert words in str(caught.value)
    assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "invalid_request_error"


def test_fields_of_openais_service_are_taken(client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        prediction={"type": "content", "content": "x"},
        parallel_tool_calls=True,
    )
    with pytest.raises(openai.BadRequestError, match="functions is not supported"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], functions=[{"name": "f"}]
        )
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="x")


def test_structured_output_and_forced_tools(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    assert 0 <= json.loads(answer.choices[0].message.content or "")["a"] <= 99
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for choice in ({"type": "function", "function": {"name": "f"}}, "required"):
        forced = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=120,
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        calls = forced.choices[0].message.tool_calls
        assert calls is not None and len(calls) == 1 and calls[0].type == "function"
        assert calls[0].function.name == "f" and 0 <= json.loads(calls[0].function.arguments)["a"] <= 99


def test_async_client_in_parallel(server: RunningServer) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> tuple[str, str]:
                whole = await client.completions.create(prompt=f"p{i}p{i}", **GREEDY, extra_body=EXACT)
                stream = await client.completions.create(
                    prompt=f"p{i}p{i}", stream=True, **GREEDY, extra_body=EXACT
                )
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].text
                return whole.choices[0].text, text

            for whole, streamed in await asyncio.gather(*(one(i) for i in range(12))):
                assert whole == streamed

    asyncio.run(main())


def test_metrics_agree_with_the_engine(server: RunningServer, client: openai.OpenAI) -> None:
    import re
    import urllib.request

    client.completions.create(prompt="abab" * 8, **GREEDY, extra_body=EXACT)
    text = urllib.request.urlopen(server.url + "/metrics", timeout=10).read().decode()
    stats = server.engine.stats()

    def total(name: str, labels: str = "") -> float:
        found = re.findall(rf"^draftwise:{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    spec = stats.speculation
    assert total("spec_decode_num_drafts_total") == spec.num_drafts > 0
    assert total("spec_decode_num_draft_tokens_total") == spec.num_draft_tokens
    assert total("spec_decode_num_accepted_tokens_total") == spec.num_accepted_tokens
    for i, count in enumerate(spec.num_accepted_tokens_per_pos):
        assert total("spec_decode_num_accepted_tokens_per_pos_total", f'position="{i}"') == count
    assert total("generation_tokens_total") == stats.num_generation_tokens
    assert total("prompt_tokens_total") == stats.num_prompt_tokens
    assert total("request_success_total") == stats.num_requests_finished
    finished = stats.finish_reasons.get("stop", 0)
    finished += stats.finish_reasons.get("length", 0)
    assert total("e2e_request_latency_seconds_count") == finished
    assert total("time_to_first_token_seconds_count") + total("inter_token_latency_seconds_count") <= (
        stats.num_generation_tokens
    )


def test_sources_of_tokens(client: openai.OpenAI) -> None:
    """Of each token who drafted it and where it stood in its step: what the trace says, in short."""
    body = {"return_token_sources": True, "return_trace": True, "return_token_ids": True, **EXACT}
    whole: Any = client.completions.create(prompt="xyxyxyxy", **GREEDY, extra_body=body)
    choice = whole.choices[0]
    told = [
        {
            "source": token["source"],
            "method": step["method"] if step["draft"] else "none",
            "position": token["position"],
        }
        for step in whole.trace
        for token in step["tokens"]
    ]
    assert choice.token_sources == told and len(told) == len(choice.token_ids) == 24
    assert {one["source"] for one in told} >= {"draft"} and {one["method"] for one in told} >= {"ngram"}
    streamed: list[Any] = []
    for chunk in client.completions.create(prompt="xyxyxyxy", **GREEDY, stream=True, extra_body=body):
        extra = chunk.choices[0].model_extra
        assert extra is not None and len(extra["token_sources"]) == len(extra["token_ids"])
        streamed += extra["token_sources"]
    assert streamed == told
    message: Any = [{"role": "user", "content": "xyxyxyxy"}]
    chat: Any = client.chat.completions.create(messages=message, **GREEDY, extra_body={**body, "n": 2})
    assert all(len(c.token_sources) == len(c.token_ids) for c in chat.choices) and len(chat.choices) == 2

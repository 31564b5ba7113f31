"""Requests are prepared beside the event loop: what takes long holds up nobody, and can be given up at any moment."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftwise import AsyncLLM, RequestError, SamplingParams
from draftwise.engine import processor as processors
from draftwise.engine import tokenizing
from draftwise.engine.outputs import RequestOutput
from draftwise.engine.workers import Lane
from draftwise.errors import EngineDeadError, LimitError
from tests.fakes.running_server import RunningServer, head_of
from tests.fakes.tiny_chat import make_tiny_chat

LONG = "def f(x):\n    return x\n" * 120
"""So many characters are tokenized in a thread."""
SHORT = "import os\n"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Gate:
    """A tokenizer that does not come back from a long text before it is let."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.threads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, **more: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        if len(text) >= len(LONG):
            self.entered.release()
            assert self.open.wait(60)
        return self._tokenizer.encode(text, **more)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=60)


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[AsyncLLM, Gate]]:
    async with AsyncLLM(
        device="cpu", dtype="float32", num_kv_blocks=512, speculation_control="static"
    ) as llm:
        processor = llm._engine.processor
        gate = processor.tokenizer = Gate(processor.tokenizer)
        try:
            yield llm, gate
            assert not llm._streams and not llm._by_rid
        finally:
            gate.open.set()


def test_what_no_thread_can_prepare_leaves_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        async with gated() as (llm, gate):
            gate.open.set()
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="new thread"):
                    llm.submit(LONG, GREEDY, "name")
            assert (await last(llm.generate(LONG, GREEDY, "name"))).finished

    asyncio.run(main())


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    seen = [output async for output in outputs]
    return seen[-1]


def test_a_long_text_holds_up_nobody() -> None:
    """Its thread stands still; others come, are served to their end, and are no slower in steps."""

    async def main() -> None:
        async with gated() as (llm, gate):
            long = asyncio.create_task(last(llm.generate(LONG, GREEDY)))
            await gate.wait_entered()
            others = await asyncio.gather(*(last(llm.generate(SHORT, GREEDY)) for _ in range(5)))
            assert all(output.finished for output in others) and not long.done()
            gate.open.set()
            assert (await long).outputs[0].finish_reason == "length"
            assert [name.startswith("draftwise-text") for name in gate.threads] == [True] + [False] * 5

    asyncio.run(main())


def test_requests_keep_the_order_in_which_they_came() -> None:
    """Numbers, which decide who is served first and what the engine's seed draws, are given at arrival."""

    async def main() -> list[int]:
        async with gated() as (llm, gate):
            sampled = SamplingParams(max_tokens=2)
            streams = [llm.submit(prompt, sampled) for prompt in (LONG, SHORT, LONG, SHORT)]
            await gate.wait_entered()
            assert [stream.prepared for stream in streams] == [False, True, False, True]
            gate.open.set()
            for stream in streams:
                await stream.ready()
                await last(stream)
            numbers = [stream.group.requests[0].rid for stream in streams]
            assert numbers == sorted(numbers)
            seeds = [stream.group.requests[0].seed for stream in streams]
            for stream in streams:
                stream.close()
            return seeds

    assert asyncio.run(main()) == asyncio.run(main())


@pytest.mark.parametrize("way", ["task", "close", "abort", "engine"])
def test_a_request_can_be_given_up_while_it_is_prepared(way: str) -> None:
    async def main() -> None:
        async with gated() as (llm, gate):
            stream = llm.submit(LONG, GREEDY.replace(n=2), "mine")
            reader = asyncio.create_task(last(stream))
            await gate.wait_entered()
            with pytest.raises(RequestError, match="in use"):
                llm.submit(SHORT, GREEDY, "mine")
            if way == "task":
                reader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reader
                stream.close()
            elif way == "close":
                stream.close()
                with pytest.raises(IndexError):  # it ended without any output
                    await reader
            elif way == "abort":
                assert await asyncio.to_thread(llm.abort, "mine")
                assert not llm.abort("mine")
                output = await reader
                assert output.finished and output.request_id == "mine" and output.prompt == LONG
                assert [sample.finish_reason for sample in output.outputs] == ["abort", "abort"]
                stream.close()
            else:
                await asyncio.to_thread(llm.close)
                gate.open.set()
                with pytest.raises(EngineDeadError, match="closed"):
                    await reader
                stream.close()
                return
            # The thread comes back: nothing is queued, and the name is free.
            gate.open.set()
            again = await last(llm.generate(SHORT, GREEDY, "mine"))
            assert again.outputs[0].finish_reason == "length"
            assert llm.stats().num_requests_finished == 1

    asyncio.run(main())


def test_errors_come_to_whoever_asked() -> None:
    async def main() -> None:
        async with gated() as (llm, gate):
            gate.open.set()
            with pytest.raises(LimitError, match="max_prompt_chars"):  # before any thread is asked
                llm.submit("x" * 10_000_000, GREEDY)
            too_long = LONG * 10  # more tokens than the model has room for
            stream = llm.submit(too_long, GREEDY)
            for _ in range(2):
                with pytest.raises(RequestError, match="tokens"):
                    await stream.ready()
            with pytest.raises(RequestError, match="tokens"):
                await last(stream)
            stream.close()
            with pytest.raises(RequestError, match="tokens"):
                await last(llm.generate(too_long, GREEDY))
            bad = GREEDY.replace(structured_outputs={"regex": "("})
            with pytest.raises(RequestError, match="invalid regex"):
                await last(llm.generate(SHORT, bad))
            with pytest.raises(RequestError, match="empty"):  # at once
                llm.submit("", GREEDY)

    asyncio.run(main())


def test_what_is_queued_behind_busy_threads_ends_with_the_engine() -> None:
    async def main() -> None:
        async with gated() as (llm, gate):
            streams = [llm.submit(LONG, GREEDY) for _ in range(5)]
            for _ in range(2):  # the lane's threads
                await gate.wait_entered()
            await asyncio.to_thread(llm.close)
            for stream in streams[2:]:
                with pytest.raises(EngineDeadError, match="closed"):
                    await stream.ready()
            gate.open.set()
            for stream in streams:
                with pytest.raises(EngineDeadError, match="closed"):
                    await last(stream)
                stream.close()

    asyncio.run(main())


def test_outputs_with_many_log_probabilities_are_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    from draftwise.engine import group as groups

    build = groups.RequestGroup.build

    def watched(self: groups.RequestGroup, reading: groups.Reading) -> Any:
        threads.append(threading.current_thread().name)
        return build(self, reading)

    monkeypatch.setattr(groups.RequestGroup, "build", watched)

    async def main() -> None:
        async with gated() as (llm, _):
            main_thread = threading.current_thread().name
            few = GREEDY.replace(logprobs=5, output_kind="final_only")
            await last(llm.generate(SHORT, few))
            assert set(threads) == {main_thread}
            threads.clear()
            many = GREEDY.replace(logprobs=-1, max_tokens=2, output_kind="final_only")
            output = await last(llm.generate(SHORT, many))
            assert [name.startswith("draftwise-output") for name in threads] == [True]
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None and len(logprobs[0]) > tokenizing._FEW_CHARS

    asyncio.run(main())


def test_chats_are_rendered_in_a_thread() -> None:
    async def main() -> None:
        async with gated() as (llm, gate):
            gate.open.set()
            template = "{% for m in messages %}{{ m.content }}{% endfor %}"
            message = {"role": "user", "content": "import os"}
            prompt = await llm.render_chat([message], chat_template=template)
            assert prompt == llm.apply_chat_template([message], chat_template=template)
            assert prompt["prompt"] == "import os"
            assert [name.startswith("draftwise-text") for name in gate.threads] == [True, False]
            with pytest.raises(LimitError, match="max_messages"):
                await llm.render_chat([message] * 20_000, chat_template=template)

    asyncio.run(main())


def test_a_large_schema_is_gone_through_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its characters are counted at once; for its depth and its enums one has to read it."""
    from draftwise.engine import limits as module

    threads: list[str] = []
    walk = module.check_schema

    def watched(*args: Any) -> None:
        threads.append(threading.current_thread().name)
        walk(*args)

    monkeypatch.setattr(module, "check_schema", watched)

    async def main() -> None:
        async with gated() as (llm, _):
            main_thread = threading.current_thread().name

            def params(schema: Any) -> SamplingParams:
                return GREEDY.replace(structured_outputs={"json": schema}, max_tokens=2)

            await last(llm.generate(SHORT, params({"enum": [f"value {i}" for i in range(2000)]})))
            assert threads and main_thread not in threads
            stream = llm.submit(SHORT, params({"enum": list(range(20_000))}))
            with pytest.raises(LimitError, match="max_enum_values"):
                await stream.ready()
            stream.close()
            with pytest.raises(LimitError, match="max_schema_chars"):  # at once
                llm.submit(SHORT, params({"const": "x" * 300_000}))

    asyncio.run(main())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"))
    llm = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=256, speculation_control="static")
    yield llm
    llm.close()


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_thread_finds_wrong_is_refused_before_the_answer_begins(
    served: AsyncLLM, stream: bool
) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": stream, "structured_outputs": {"regex": "("}}
    with RunningServer(served) as server:
        status, headers, answer = server.request("POST", "/v1/completions", body)
        assert status == 400 and headers["content-type"] == "application/json"
        assert json.loads(answer)["error"]["param"] == "structured_outputs"
        assert server.context.admission.num_requests == 0
        good = {**body, "structured_outputs": {"regex": "b" * 30}}
        assert server.request("POST", "/v1/completions", good)[0] == 200


@pytest.fixture(scope="module")
def hurt(served: AsyncLLM) -> Iterator[RunningServer]:
    """One server for all that is refused: it has to stand it, and to end well behind it."""
    with RunningServer(served) as server:
        yield server
        assert server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert server.context.admission.num_requests == 0


HOSTILE: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "no text can follow it"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        "",
        "no text can follow it",
    ),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "[0.001, 1000]"),
    ({"temperature": 1e300}, "temperature", "[0, 1000000]"),
    ({"stop": "x" * 1_000_000}, "stop", "max_stop_chars"),
    ({"stop": ["x" * 10_000] * 2, "n": 32}, "stop", "max_stop_chars"),
    ({"structured_outputs": {"choice": ["x"] * 100_000}}, "structured_outputs", "max_choices"),
    ({"bad_words": ["x"] * 100_000}, "bad_words", "max_bad_words"),
    ({"structured_outputs": {"json": {"enum": list(range(300_000))}}}, "", "max_body_values"),
    (
        {"structured_outputs": {"json": {"enum": list(range(20_000))}}},
        "structured_outputs",
        "max_enum_values",
    ),
    ({"prompt": "x" * 1_000_000}, "prompt", "max_prompt_chars"),
    ({"n": 10**9}, "n", ""),
    ({"speculation": {"method": "mtp", "speculative_token_tree": [[0]] * 100_000}}, "speculation", ""),
]


@pytest.mark.parametrize(("fields", "param", "words"), HOSTILE, ids=lambda value: str(value)[:30])
def test_what_hurt_a_server_is_refused_by_name(
    hurt: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"prompt": "a", "max_tokens": 2} | fields
    status, _, answer = hurt.request("POST", "/v1/completions", body)
    error = json.loads(answer)["error"]
    assert status == 400, error
    assert words in error["message"] and len(error["message"]) < 600
    assert not param or error["param"] == param


def test_thousands_of_choices_over_http(served: AsyncLLM) -> None:
    choices = ["abcdefgh"[i % 8] * (i // 8 + 1) for i in range(3000)]
    body = {"prompt": "a", "max_tokens": 400, "structured_outputs": {"choice": choices}}
    with RunningServer(served) as server:
        status, _, answer = server.request("POST", "/v1/completions", body)
        choice = json.loads(answer)["choices"][0]
        assert status == 200 and len(set(choice["text"])) == 1
        assert choice["text"] in choices or choice["finish_reason"] == "length"


def test_a_client_that_leaves_while_his_request_is_prepared(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    group = processors.Processor.group

    def slow(self: processors.Processor, *args: Any, **more: Any) -> Any:
        entered.set()
        assert go_on.wait(60)
        return group(self, *args, **more)

    monkeypatch.setattr(processors.Processor, "group", slow)
    monkeypatch.setattr(processors.Processor, "lane", lambda *_: Lane.TEXT)
    with RunningServer(served) as server:
        data = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head_of(f"Content-Length: {len(data)}") + data)
            assert entered.wait(60)
        deadline = time.monotonic() + 20
        while server.context.admission.num_requests:
            assert time.monotonic() < deadline, "the request was not given up"
            time.sleep(0.01)
        go_on.set()
    assert not served._streams and served.stats().num_running == served.stats().num_waiting == 0

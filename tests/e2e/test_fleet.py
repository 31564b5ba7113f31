"""Two replicas behind one port, in processes of their own: they answer as one engine does, also while some are lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.config import resolve_engine_config
from draftwise.config.lora import LoRARequest
from draftwise.errors import EngineDeadError, ReplicaLostError, RequestError
from draftwise.fleet.engine import FleetEngine
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_kv_blocks": 256,
    "block_size": 4,
    "speculation_control": "static",
    "num_threads": 1,
}
LONG = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def fleet(folder: str) -> Iterator[FleetEngine]:
    config = resolve_engine_config(model=folder, data_parallel_size=2, enable_lora=True, **OPTIONS)
    engine = FleetEngine(config)
    yield engine
    processes = list(engine._members._processes)
    engine.close()
    engine.close()
    assert all(process.has_ended for process in processes)
    assert not engine.is_alive


@pytest.fixture(scope="module")
def server(fleet: FleetEngine) -> Iterator[RunningServer]:
    with RunningServer(fleet) as running:
        yield running


def run(server: RunningServer, work: Coroutine[Any, Any, Any]) -> Any:
    """In the event loop of the server, to which the fleet belongs."""
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(60)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def ask(server: RunningServer, **body: Any) -> dict[str, Any]:
    status, _, data = server.request("POST", "/v1/completions", {"temperature": 0, **body})
    answer: dict[str, Any] = json.loads(data)
    assert status == 200, answer
    return answer


def at_rest(fleet: FleetEngine) -> None:
    """Nothing runs, no block is held, and the books agree."""
    wait_until(lambda: fleet.stats().num_running == fleet.stats().num_used_blocks == 0)
    fleet.check_integrity()
    assert fleet._where == {} == fleet._asked
    assert all(
        fleet._members.router.load(n) == fleet._members.router.num_requests(n) == 0 for n in fleet.replicas
    )


def test_it_says_what_one_engine_says(folder: str, fleet: FleetEngine, server: RunningServer) -> None:
    prompts = [[5, 6, 7], list(range(10, 60)), [9] * 33, list(range(90, 110))]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=1, ignore_eos=True)
    drawn = SamplingParams(max_tokens=12, seed=3, n=2, ignore_eos=True)
    with LLM(folder, **OPTIONS) as llm:
        alone = [*llm.generate(prompts, params), *llm.generate(prompts, drawn)]

    async def together(kind: str) -> list[Any]:
        async def one(ids: list[int], params: SamplingParams) -> list[Any]:
            asked = params.clone()
            asked.output_kind = kind  # type: ignore[assignment]
            return [o async for o in fleet.submit({"prompt_token_ids": ids}, asked)]

        asked = [one(ids, p) for p in (params, drawn) for ids in prompts]
        return await asyncio.gather(*asked)

    for kind in ("final_only", "cumulative", "delta"):
        for outputs, wanted in zip(run(server, together(kind)), alone, strict=True):
            assert outputs[-1].finished and outputs[-1].prompt_token_ids == wanted.prompt_token_ids
            for i, completion in enumerate(wanted.outputs):
                parts = outputs if kind == "delta" else outputs[-1:]
                assert sum((o.outputs[i].token_ids for o in parts), ()) == completion.token_ids
                assert "".join(o.outputs[i].text for o in parts) == completion.text
                if completion.logprobs is not None:
                    told = sum((o.outputs[i].logprobs for o in parts), ())
                    assert [set(e) for e in told] == [set(e) for e in completion.logprobs]
            assert outputs[-1].metrics.ttft > 0
    at_rest(fleet)
    done = [books.stats.num_requests_finished for books in fleet.books()]
    assert len(done) == 2 and min(done) > 0, "all went to one replica"


def test_text_streams_over_http(fleet: FleetEngine, server: RunningServer) -> None:
    body = {"prompt": "hello world", "max_tokens": 20, "ignore_eos": True}
    whole = ask(server, **body)["choices"][0]["text"]
    _, _, data = server.request("POST", "/v1/completions", {**body, "temperature": 0, "stream": True})
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == whole
    long = ask(server, prompt="hello " * 500, truncate_prompt_tokens=20, max_tokens=3)
    assert long["usage"]["prompt_tokens"] == 20
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert server.request("POST", "/v1/chat/completions", chat)[0] == 200
    at_rest(fleet)


def test_a_conversation_stays_where_its_prefix_is(fleet: FleetEngine, server: RunningServer) -> None:
    fleet.reset_prefix_cache()
    before = {b.replica: b.stats.prefix_cache_hits for b in fleet.books()}
    talks = [list(range(start, start + 41)) for start in (3, 50, 97)]
    for turn in range(4):
        for number, talk in enumerate(talks):
            answer = ask(server, prompt=talk, max_tokens=8, ignore_eos=True, return_token_ids=True)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            full = (len(talk) - 9) // 4 * 4 if turn else 0  # what the turn before left
            assert cached >= full, f"turn {turn} of talk {number}"
            talk += [*answer["choices"][0]["token_ids"], 7]
    after = {b.replica: b.stats.prefix_cache_hits for b in fleet.books()}
    assert all(after[name] > before[name] for name in after), "both replicas have talks"


def test_what_is_wrong_with_a_request_is_said(fleet: FleetEngine, server: RunningServer) -> None:
    for body, words in (
        ({"prompt": [1, 10**6]}, "out of range"),
        ({"prompt": "x", "speculation": {"method": "eagle"}}, "not loaded"),  # found in the replica
        ({"prompt": [3] * 5000}, "maximum context length"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "stop": ["y"] * 1000}, "max_stop_strings"),
    ):
        status, _, data = server.request("POST", "/v1/completions", {"max_tokens": 4, **body})
        assert status == 400 and words in json.loads(data)["error"]["message"], data

    async def twice() -> None:
        stream = fleet.submit("hello", SamplingParams(max_tokens=50), "same")
        with pytest.raises(RequestError, match="in use"):
            fleet.submit("hello", SamplingParams(), "same")
        stream.close()
        stream.close()
        fleet.submit("hello", SamplingParams(max_tokens=2), "same").close()

    run(server, twice())
    at_rest(fleet)


def test_aborted_and_abandoned_requests_leave_nothing(fleet: FleetEngine, server: RunningServer) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [fleet.submit("hello", params, f"r{i}") for i in range(6)]
        assert fleet.abort("r0") and not fleet.abort("r0") and not fleet.abort("nobody")
        async for output in streams[0]:
            last = output
        assert last.outputs[0].finish_reason == "abort"
        await streams[1].__anext__()
        for stream in streams[1:3]:
            stream.close()
        long = tuple(f"{i:02d}" + "z" * 98 for i in range(21))
        late = fleet.submit("hello", SamplingParams(max_tokens=4, stop=long), "late")  # prepared in a thread
        assert late.number not in fleet._where
        assert fleet.abort_all() == 4
        for stream in [*streams[3:], late]:
            async for output in stream:
                last = output
            assert last.finished and last.outputs[0].finish_reason == "abort"

        for stream in [*streams, late]:
            stream.close()

    run(server, main())
    at_rest(fleet)


def test_what_operators_see(fleet: FleetEngine, server: RunningServer) -> None:
    status, _, data = server.request("GET", "/health")
    ready = [{"replica": n, "state": "ready", "num_requests": 0} for n in fleet.replicas]
    assert status == 200 and json.loads(data) == {"replicas": ready}
    _, _, data = server.request("GET", "/metrics")
    for number in fleet.replicas:
        assert f'draftwise:num_requests_running{{model_name="tiny",replica="{number}"}} 0.0' in data.decode()
        assert (
            f'draftwise:e2e_request_latency_seconds_count{{model_name="tiny",replica="{number}"}}'
            in data.decode()
        )
    assert json.loads(server.request("GET", "/load")[2])["num_requests_running"] == 0
    assert json.loads(server.request("POST", "/reset_prefix_cache")[2]) == {"success": True}
    assert json.loads(server.request("GET", "/version")[2])["methods"][0] == "none"
    body = {"new_data_parallel_size": 0}
    assert server.request("POST", "/scale_elastic_ep", body)[0] == 400


def test_an_adapter_is_on_all_replicas_or_on_none(fleet: FleetEngine, server: RunningServer) -> None:
    body = {"lora_name": "a", "lora_path": "/nowhere"}
    status, _, data = server.request("POST", "/v1/load_lora_adapter", body)
    assert status == 400 and "nowhere" in data.decode()
    assert run(server, fleet.remove_lora(1)) is False and fleet._members.adapters._loaded == {}
    with pytest.raises(RequestError):
        fleet.load_lora(LoRARequest("b", 2, "/nowhere"))
    at_rest(fleet)


def process_of(fleet: FleetEngine, number: int) -> int:
    return fleet._members[number].process.pid


def test_a_lost_replicas_requests_begin_again_unless_they_were_seen(
    fleet: FleetEngine, server: RunningServer
) -> None:
    """The replica is stopped before it gets a request, so that nothing of that one was streamed when it is killed;
    another request has been read from by then."""

    async def main() -> int:
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0, output_kind="delta")
        wanted = [o async for o in fleet.submit("hello", params)]
        for _ in range(20):
            begun = fleet.submit("hello", params)
            await begun.__anext__()
            victim = fleet._where[begun.number].number
            os.kill(process_of(fleet, victim), signal.SIGSTOP)
            await asyncio.sleep(0.05)
            if begun.number in fleet._where:
                break
            os.kill(process_of(fleet, victim), signal.SIGCONT)
            begun.close()
        unseen = []
        for _ in range(8):  # of which some go there
            unseen.append(fleet.submit("hello", params))
        assert any(fleet._where[s.number].number == victim for s in unseen)
        os.kill(process_of(fleet, victim), signal.SIGKILL)
        with pytest.raises(ReplicaLostError, match=f"replica {victim} was ended by SIGKILL"):
            async for _ in begun:
                pass
        for stream in unseen:
            outputs = [o async for o in stream]
            text = "".join(o.outputs[0].text for o in outputs)
            assert text == "".join(o.outputs[0].text for o in wanted)
            assert sum(len(o.outputs[0].token_ids) for o in outputs) == 400
        return victim

    victim = run(server, main())
    assert victim not in fleet.replicas and len(fleet.replicas) == 1 and fleet.is_alive
    assert server.request("GET", "/health")[0] == 200
    assert ask(server, prompt="hello", max_tokens=3)["usage"]["completion_tokens"] == 3
    at_rest(fleet)


def test_replicas_are_started_and_drain(fleet: FleetEngine, server: RunningServer) -> None:
    """After the test before there is one. A second one starts; then one drains, and its streams end where they are."""
    status, _, data = server.request("POST", "/scale_elastic_ep", {"new_data_parallel_size": 2})
    assert status == 200 and len(json.loads(data)["replicas"]) == 2
    leaving = max(fleet.replicas)
    pid = process_of(fleet, leaving)

    async def main() -> None:
        params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0)
        streams = [fleet.submit([n, n + 1, n + 2], params) for n in range(6)]
        for stream in streams:
            await stream.ready()
        there = [s for s in streams if fleet._where[s.number].number == leaving]
        assert there
        await fleet.scale(1)
        assert fleet.replicas == (min(fleet.replicas),)
        late = fleet.submit("hello", SamplingParams(max_tokens=2))
        assert fleet._where[late.number].number != leaving
        for stream in [*streams, late]:
            async for output in stream:
                last = output
            assert last.outputs[0].finish_reason == "length"

    run(server, main())
    wait_until(lambda: leaving not in fleet._members)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    at_rest(fleet)


def test_without_replicas_there_is_no_server(fleet: FleetEngine, server: RunningServer) -> None:
    async def main() -> None:
        stream = fleet.submit("hello", SamplingParams(max_tokens=400, ignore_eos=True))
        os.kill(process_of(fleet, fleet.replicas[0]), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass

    run(server, main())
    assert not fleet.is_alive and fleet.replicas == ()
    assert server.request("GET", "/health")[0] == 503
    assert server.request("POST", "/v1/completions", {"prompt": "x"})[0] == 503
    server.join()
    assert server.exit_code == 1

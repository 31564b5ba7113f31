"""Adapters over HTTP: as models of their own, loaded and unloaded while the server runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, AsyncLLM, LoRARequest, SamplingParams
from draftwise.cli import main
from draftwise.config.lora import parse_modules
from draftwise.errors import ConfigError, RequestError
from tests.fakes.lora import merge, save_adapter
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat

OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 64,
    "num_threads": 1,
    "dtype": "float32",
    "speculation_control": "static",
}
ASK = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class World:
    def __init__(self, root: Path) -> None:
        self.model = make_tiny_chat(root / "model")
        self.adapters = [save_adapter(root / f"a{i}", root / "model", i) for i in (1, 2)]
        self.texts = []
        merged = [merge(root / "model", Path(a), root / f"m{i}") for i, a in enumerate(self.adapters)]
        for folder in (self.model, *merged):
            with LLM(folder, tokenizer=self.model, **OPTIONS) as llm:
                params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
                self.texts.append(llm.generate("hello", params)[0].outputs[0].text)
        assert len(set(self.texts)) == 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[RunningServer]:
    llm = AsyncLLM(world.model, enable_lora=True, **OPTIONS)
    modules = parse_modules([f"first={world.adapters[0]}"])
    for module in modules:
        llm.load_lora(module)
    try:
        with RunningServer(llm, lora_modules=modules) as running:
            yield running
    finally:
        llm.close()


def complete(server: RunningServer, model: str | None) -> str:
    status, _, body = server.request(
        "POST", "/v1/completions", ASK if model is None else {**ASK, "model": model}
    )
    assert status == 200, body
    answer = json.loads(body)
    assert answer["model"] == (model or "tiny")
    text: str = answer["choices"][0]["text"]
    return text


def test_an_adapter_is_a_model_of_its_name(server: RunningServer, world: World) -> None:
    cards = json.loads(server.request("GET", "/v1/models")[2])["data"]
    assert [card["id"] for card in cards] == ["tiny", "first"]
    assert cards[1]["parent"] == "tiny" and cards[1]["root"] == world.adapters[0]
    assert json.loads(server.request("GET", "/v1/models/first")[2])["id"] == "first"
    assert complete(server, None) == world.texts[0]
    assert complete(server, "first") == world.texts[1]


def test_all_at_once(server: RunningServer, world: World) -> None:
    found: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        found.append((name, complete(server, name)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ["tiny", "first"] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = {"tiny": world.texts[0], "first": world.texts[1]}
    assert len(found) == 8 and all(text == wanted[name] for name, text in found)


def test_adapters_come_and_go(server: RunningServer, world: World) -> None:
    load = {"lora_name": "second", "lora_path": world.adapters[1]}
    status, _, body = server.request("POST", "/v1/load_lora_adapter", load)
    assert (status, body) == (200, b"Success: LoRA adapter 'second' added successfully.")
    assert complete(server, "second") == world.texts[2]
    metrics = server.request("GET", "/metrics")[2].decode()
    [line] = [line for line in metrics.splitlines() if line.startswith("draftwise:lora_requests_info{")]
    assert 'max_lora="8"' in line and 'running_lora_adapters=""' in line
    assert complete(server, "first") == world.texts[1]
    assert server.request("POST", "/v1/load_lora_adapter", load)[0] == 400
    status, _, body = server.request("POST", "/v1/unload_lora_adapter", {"lora_name": "second"})
    assert (status, body) == (200, b"Success: LoRA adapter 'second' removed successfully.")
    assert server.request("POST", "/v1/completions", {**ASK, "model": "second"})[0] == 404
    assert server.request("POST", "/v1/unload_lora_adapter", {"lora_name": "second"})[0] == 404
    # the same name, another adapter: nothing of the old one is found in the cache
    assert server.request("POST", "/v1/load_lora_adapter", {**load, "lora_path": world.adapters[0]})[0] == 200
    assert complete(server, "second") == world.texts[1]
    assert server.request("POST", "/v1/unload_lora_adapter", {"lora_name": "second"})[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"lora_name": "x", "lora_path": "/nowhere"}, "does not exist"),
        ({"lora_name": "x", "lora_path": "x" * 5000}, "cannot be looked at"),
        ({"lora_name": "x", "lora_path": "~nobody of this name/x"}, "cannot be looked at"),
        ({"lora_name": "tiny", "lora_path": "/nowhere"}, "is the name of the model"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": "/nowhere"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/nowhere", "load_inplace": True}, "load_inplace"),
    ],
)
def test_what_cannot_be_loaded_is_a_400(server: RunningServer, body: dict[str, Any], words: str) -> None:
    status, _, answer = server.request("POST", "/v1/load_lora_adapter", body)
    found = json.loads(answer)["error"]
    assert status == 400 and words in found["message"] and found["param"] in body.keys() | {"lora_path"}
    assert [m["id"] for m in json.loads(server.request("GET", "/v1/models")[2])["data"]] == ["tiny", "first"]


def test_a_server_without_adapters_says_so(world: World) -> None:
    llm = AsyncLLM(world.model, **OPTIONS)
    try:
        with RunningServer(llm) as running:
            body = {"lora_name": "x", "lora_path": world.adapters[0]}
            status, _, answer = running.request("POST", "/v1/load_lora_adapter", body)
            assert status == 400 and "--enable-lora" in json.loads(answer)["error"]["message"]
    finally:
        llm.close()


def test_requests_go_on_with_an_adapter_that_is_unloaded(world: World) -> None:
    async def run() -> tuple[str, list[LoRARequest]]:
        async with AsyncLLM(world.model, enable_lora=True, async_scheduling=True, **OPTIONS) as llm:
            module = LoRARequest("first", 1, world.adapters[0])
            await llm.add_lora(module)
            with pytest.raises(RequestError, match="in use"):
                await llm.add_lora(module)
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            text = ""
            async for output in llm.generate("hello", params, lora_request=module):
                text = output.outputs[0].text
                if module in llm.list_loras():
                    assert await llm.remove_lora(1)
            assert not await llm.remove_lora(1)
            return text, llm.list_loras()

    assert asyncio.run(run()) == (world.texts[1], [])


def test_an_adapter_goes_when_its_last_request_has_ended(world: World) -> None:
    """Unloaded while a request with it waits for a place: the request is answered, and then the memory is free."""

    async def run() -> list[str]:
        first, second = (LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(world.adapters))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        async with AsyncLLM(world.model, enable_lora=True, max_loras=1, **OPTIONS) as llm:
            for module in (first, second):  # more names than places
                await llm.add_lora(module)
            streams = [llm.submit("hello", params, lora_request=module) for module in (first, second)]
            await asyncio.gather(*(stream.ready() for stream in streams))
            assert await llm.remove_lora(2)
            found = ["", ""]
            for i, stream in enumerate(streams):
                async for output in stream:
                    found[i] = output.outputs[0].text
                stream.close()
            core = llm._engine.core
            assert await llm.remove_lora(1)
            assert core.adapters == {} and not core.scheduler.adapters.moves
            return found

    assert asyncio.run(run()) == world.texts[1:]


def test_modules_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse_modules(["a=x/y", '{"name": "b", "path": "z"}'])
    assert [(m.lora_name, m.lora_int_id, m.lora_path) for m in found] == [("a", 1, "x/y"), ("b", 2, "z")]
    for given in (["a"], ["=x"], ["a="], ["{}"], ["{"], ["a=x", "a=y"]):
        with pytest.raises(ConfigError, match="lora_modules"):
            parse_modules(given)
    for command in (["serve"], ["run-batch", "-i", __file__, "-o", "-"]):
        assert main.main([*command, "--lora-modules", "a=x"]) == 2
        assert "lora_modules: needs enable_lora" in capsys.readouterr().err


def test_a_file_of_requests_with_adapters(world: World, tmp_path: Path) -> None:
    names = ("tiny", "a", "b", "c")
    bodies = [{**ASK, "model": name} for name in names]
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": body["model"], "method": "POST", "url": "/v1/completions", "body": body}
        for body in bodies
    ]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        "run-batch", "-i", str(asked), "-o", str(answered), "--model", str(world.model), "--served-model-name", "tiny",
        "--num-kv-blocks", "64", "--dtype", "float32", "--enable-lora", "--max-loras", "1", "--lora-modules",
    ]  # fmt: skip
    assert (
        main.main([*command, *(f"{name}={path}" for name, path in zip("ab", world.adapters, strict=True))])
        == 1
    )
    answers = [json.loads(line) for line in answered.read_text().splitlines()]
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert found["c"]["status_code"] == 404
    assert [found[name]["body"]["choices"][0]["text"] for name in names[:3]] == world.texts
    assert main.main([*command, f"a={tmp_path / 'nothing'}"]) == 2

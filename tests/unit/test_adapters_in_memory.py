"""What adapters that wait, or that nobody uses any more, cost the others: drafts, memory, forked children."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.lora import save_adapter
from tests.fakes.tiny import save_llama

from draftwise import LLM, AsyncLLM, LoRARequest, SamplingParams
from draftwise.engine import adapters
from draftwise.engine.stepped import LLMEngine
from draftwise.errors import EngineDeadError, RequestError
from draftwise.runner.local import LocalExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT: Any = {"prompt_token_ids": [5, 6, 7]}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "num_kv_blocks": 64,
    "num_threads": 1,
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 1,
}


class World:
    def __init__(self, root: Path) -> None:
        self.model = save_llama(root / "model", seed=1)
        self.requests = [
            LoRARequest(f"a{i}", i, save_adapter(root / f"a{i}", root / "model", i)) for i in (1, 2, 3, 4)
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("lora"))


def test_who_waits_for_a_place_is_not_in_the_batch(world: World) -> None:
    """One request runs at a time, so it drafts as one does that is alone."""
    speculation = {
        "method": "draft_model", "model": world.model, "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 256, 0]],
    }  # fmt: skip
    with LLM(world.model, speculative_config=speculation, speculation_control="static", **OPTIONS) as llm:
        llm.generate(PROMPT, GREEDY, lora_request=world.requests[0])
        alone = llm.stats().speculation.num_drafts
        llm.generate([PROMPT] * 3, GREEDY, lora_request=world.requests[:3])
        assert llm.stats().speculation.num_drafts > 3 * alone
        before = llm.stats().speculation.num_drafts
        llm.generate([PROMPT] * 4, GREEDY, lora_request=world.requests[0])
        assert llm.stats().speculation.num_drafts == before


def test_a_call_leaves_as_many_as_are_kept(world: World) -> None:
    with LLM(world.model, max_cpu_loras=2, **OPTIONS) as llm:
        llm.generate([PROMPT] * 4, GREEDY, lora_request=world.requests)
        assert llm._engine is not None and len(llm._engine.core.adapters) == 2
        llm.check_integrity()


def test_the_last_step_leaves_as_many_as_are_kept(world: World) -> None:
    engine = LLMEngine(world.model, max_cpu_loras=2, **OPTIONS)
    for known in world.requests:
        engine.add_request(known.lora_name, PROMPT, GREEDY, lora_request=known)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine._engine is not None and len(engine._engine.core.adapters) == 2
    engine.close()


def test_what_was_unloaded_goes_when_its_requests_have_ended(world: World) -> None:
    engine = LLMEngine(world.model, **OPTIONS)
    assert engine._engine is not None
    core = engine._engine.core
    for known in world.requests[:2]:
        assert engine.add_lora(known)
    with pytest.raises(RequestError, match="lora_int_id 1 is in use"):
        engine.add_lora(world.requests[0])
    assert engine.list_loras() == list(world.requests[:2])
    engine.add_request("first", PROMPT, GREEDY, lora_request=world.requests[0])
    engine.step()
    assert engine.remove_lora(1) and not engine.remove_lora(1)
    assert engine.list_loras() == [world.requests[1]]
    engine.add_request("second", PROMPT, GREEDY, lora_request=world.requests[1])
    assert len(core.adapters) == 2
    while engine.has_unfinished_requests():
        engine.step()
    engine.add_request("third", PROMPT, GREEDY, lora_request=world.requests[1])
    assert len(core.adapters) == 1
    engine.close()


def test_a_name_that_two_adapters_have_is_said_once(world: World) -> None:
    """As over HTTP: one is unloaded, and another one loaded under the name, while requests have the first."""
    engine = LLMEngine(world.model, **OPTIONS)
    assert engine._engine is not None
    for known in world.requests[:3]:
        named = LoRARequest("same", known.lora_int_id, known.lora_path)
        engine.add_request(known.lora_name, PROMPT, GREEDY, lora_request=named)
    engine.step()
    found = engine._engine.adapters.stats()
    assert found is not None and (found.running, found.waiting) == (("same",), ("same",))
    engine.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_second_ctrl_c_while_an_adapter_is_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The engine goes on. Ahead, nobody waits for an adapter, so the interrupt meets the wait for a step. Where the
    first one meets no wait, the call is over before the second one, which then nobody listens to."""
    load, interrupts, over = LocalExecutor.load_adapter, [True], threading.Event()
    generating = False

    def interrupted(self: LocalExecutor, *args: Any) -> None:
        load(self, *args)
        if interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            interrupts.pop()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            over.set()

    def interrupt(number: int, frame: object) -> None:
        if generating:
            raise KeyboardInterrupt

    with LLM(world.model, async_scheduling=ahead, **OPTIONS) as llm:
        wanted = [llm.generate(PROMPT, GREEDY, lora_request=known)[0] for known in world.requests]
        monkeypatch.setattr(LocalExecutor, "load_adapter", interrupted)
        before = signal.signal(signal.SIGINT, interrupt)
        generating = True
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT] * 4, GREEDY, lora_request=world.requests)
            generating = False
            assert over.wait(60)
        finally:
            signal.signal(signal.SIGINT, before)
        found = llm.generate([PROMPT] * 4, GREEDY, lora_request=world.requests)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
        llm.check_integrity()


def test_who_left_before_an_interrupted_step_leaves_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan would have told the executor who had ended."""
    load, interrupts = LocalExecutor.load_adapter, [True]

    def interrupted(self: LocalExecutor, *args: Any) -> None:
        load(self, *args)
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(LocalExecutor, "load_adapter", interrupted)
    with LLM(world.model, **OPTIONS) as llm:
        llm.generate(PROMPT, GREEDY)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY, lora_request=world.requests[0])
        llm.generate(PROMPT, GREEDY)
        assert llm._engine is not None
        executor = llm._engine.core.executor
        assert isinstance(executor, LocalExecutor)
        assert list(executor._rows) == [2], "of whom the next step will tell"
        assert llm.stats().finish_reasons == {"length": 2, "abort": 1}


def test_an_adapter_that_cannot_be_loaded_ends_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: LocalExecutor, *args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LocalExecutor, "load_adapter", fails)
    for ahead in (False, True):
        with (
            LLM(world.model, async_scheduling=ahead, **OPTIONS) as llm,
            pytest.raises(EngineDeadError, match="out of memory"),
        ):
            llm.generate(PROMPT, GREEDY, lora_request=world.requests[0])


def test_who_lists_adapters_does_not_wait_for_a_sweep(world: World) -> None:
    """Which waits for the end of a step, and holds the lock meanwhile."""

    async def run() -> None:
        async with AsyncLLM(world.model, **OPTIONS) as llm:
            await llm.add_lora(world.requests[0])
            with llm._engine.adapters._lock:
                listing = threading.Thread(target=llm.list_loras, daemon=True)
                listing.start()
                listing.join(20)
                assert not listing.is_alive()

    asyncio.run(run())


def test_who_needs_no_file_waits_for_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters are read, which takes long; requests with a third one, and long texts, go on."""
    read, go_on = adapters.read_adapter, threading.Event()

    def slowly(path: str, **options: Any) -> Any:
        assert path == world.requests[0].lora_path or go_on.wait(60)
        return read(path, **options)

    monkeypatch.setattr(adapters, "read_adapter", slowly)
    long: Any = {"prompt_token_ids": [5, 6] * 50}

    async def run() -> None:
        async with AsyncLLM(world.model, **OPTIONS) as llm:

            async def ask(prompt: Any, known: LoRARequest | None) -> bool:
                params = SamplingParams(max_tokens=2)
                return [o async for o in llm.generate(prompt, params, lora_request=known)][-1].finished

            await llm.add_lora(world.requests[0])
            loads = [asyncio.create_task(llm.add_lora(known)) for known in world.requests[1:3]]
            asks = [asyncio.create_task(ask(PROMPT, world.requests[3]))]
            await asyncio.sleep(0)
            try:
                assert await asyncio.wait_for(ask(PROMPT, world.requests[0]), 20)
                assert await asyncio.wait_for(ask(long, None), 20)
                assert not any(task.done() for task in (*loads, *asks))
            finally:
                go_on.set()
            await asyncio.gather(*loads)
            assert await asyncio.gather(*asks) == [True]

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_while_an_adapter_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, began, go_on = adapters.read_adapter, threading.Event(), threading.Event()
    parent = os.getpid()

    def slowly(*args: Any, **options: Any) -> Any:
        if os.getpid() == parent:
            began.set()
            assert go_on.wait(60)
        return read(*args, **options)

    monkeypatch.setattr(adapters, "read_adapter", slowly)
    with LLM(world.model, **OPTIONS) as llm:
        ask = threading.Thread(
            target=llm.generate, args=(PROMPT, GREEDY), kwargs={"lora_request": world.requests[0]}
        )
        ask.start()
        assert began.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that hangs
            code = 1
            try:
                [output] = llm.generate(PROMPT, GREEDY, lora_request=world.requests[1])
                code = 0 if output.finished else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        ask.join()

"""Engines in programs that use torch in their own way, and that build several at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwise import LLM, AsyncLLM, LLMEngine, SamplingParams
from draftwise.engine.surroundings import Alone
from draftwise.errors import ConfigError, RequestError
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def elsewhere() -> Iterator[Callable[[], None]]:
    """Sets torch's default device to one where nothing can be read."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_default_device_of_a_program_stays_its_own(
    make_llm: Callable[..., LLM], elsewhere: Callable[[], None], when: str
) -> None:
    prompts = random_prompts(3, seed=3)
    wanted = token_ids(make_llm().generate(prompts, GREEDY))
    if when == "before":
        elsewhere()
    llm = make_llm()
    elsewhere()
    assert token_ids(llm.generate(prompts, GREEDY)) == wanted
    assert torch.get_default_device().type == "meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_the_default_type_of_a_program_changes_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code is given addresses of tensors, and writes float32 there."""
    prompts = random_prompts(3, seed=3)
    shaping = {"top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    params = [
        SamplingParams(
            temperature=0.7 + 0.1 * i, seed=i, max_tokens=8, ignore_eos=True, speculation={"method": method}, **more
        )
        for i, (method, more) in enumerate((("draft_model", {}), ("mtp", {}), ("ngram", shaping)))
    ]  # fmt: skip
    texts: list[Any] = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            for kernels in ("native", "torch"):
                monkeypatch.setenv("DRAFTWISE_KERNELS", kernels)
                with LLM(num_kv_blocks=32, speculation_control="static") as llm:
                    texts.append(token_ids(llm.generate(prompts, params)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert texts[:2] == texts[2:]


def test_an_asynchronous_engine_is_built_on_its_own_device(elsewhere: Callable[[], None]) -> None:
    async def generate() -> Any:
        async with AsyncLLM(num_kv_blocks=16) as llm:
            return [output async for output in llm.generate("x = ", GREEDY)][-1]

    wanted = asyncio.run(generate()).outputs[0].token_ids
    elsewhere()
    assert asyncio.run(generate()).outputs[0].token_ids == wanted


AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
from draftwise import LLM
def build(_):
    LLM(num_kv_blocks=16).close()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(build, range(4)))
"""


def test_threads_may_build_engines_at_once() -> None:
    """In a new process: what Transformers loads on first use was half there for the second thread."""
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True, timeout=300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_builds_although_a_thread_of_its_parent_was_building() -> None:
    alone = Alone()
    inside, leave = threading.Event(), threading.Event()

    def build() -> None:
        with alone.take():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=build)
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        os._exit(0 if alone._lock.acquire(timeout=10) else 1)
    leave.set()
    thread.join(60)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_threads_of_an_engine_are_its_own(
    make_llm: Callable[..., LLM], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", kernels)
    seen = []

    def sees(_: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return logits

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        llm, wide = make_llm(num_threads=1), make_llm(num_threads=2)
        assert torch.get_num_threads() == 3
        for engine in (llm, wide):
            engine.generate(random_prompts(1), GREEDY.replace(logits_processors=[sees], max_tokens=1))
        assert seen == ([1, 2] if kernels == "torch" else [1, 1])  # native kernels have threads of their own
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_engine_is_not_built_or_used_where_tensors_have_no_data(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    """Native code would read at addresses that are none, and end the program."""
    llm, stepped = make_llm(), LLMEngine(tiny.target, skip_tokenizer_init=True, num_kv_blocks=16)
    prompts = random_prompts(1)
    wanted = token_ids(llm.generate(prompts, GREEDY))
    with FakeTensorMode():
        for kind in (LLM, AsyncLLM):
            with pytest.raises(ConfigError, match="tensors without data"):
                kind()
        with pytest.raises(RequestError, match="tensors without data"):
            llm.generate(prompts, GREEDY)
        with pytest.raises(RequestError, match="tensors without data"):
            stepped.add_request("0", prompts[0], GREEDY)
    stepped.close()
    assert token_ids(llm.generate(prompts, GREEDY)) == wanted

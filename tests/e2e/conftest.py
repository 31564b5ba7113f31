"""Engines over tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM
from tests.fakes.tiny import VOCAB, TinyModels, make_tiny_models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return make_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PlainText = Callable[[list[dict[str, Any]], Any], list[tuple[int, ...]]]


@pytest.fixture(scope="session")
def plain_text(tiny: TinyModels) -> PlainText:
    """``plain_text(prompts, params)``: what a new engine of the tiny target without a drafter says. Tests with the same
    prompts and parameters compare with the same answer, which is computed once."""
    known: dict[str, list[tuple[int, ...]]] = {}

    def say(prompts: list[dict[str, Any]], params: Any) -> list[tuple[int, ...]]:
        key = repr((prompts, params))
        if key not in known:
            with LLM(tiny.target, **_OPTIONS) as llm:
                known[key] = token_ids(llm.generate(prompts, params))
        return known[key]

    return say


_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "speculation_control": "static",  # draft what is asked for, however busy the machine is
    "num_kv_blocks": 512,
}


@pytest.fixture
def make_llm(tiny: TinyModels) -> Iterator[Callable[..., LLM]]:
    """``make(**options)``: an engine over the tiny target in float32, without tokenizer; its books are checked and it
    is closed at the end of the test."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        base = dict(_OPTIONS)
        if "num_kv_blocks" in options or "kv_cache_memory" in options:
            base.pop("num_kv_blocks")
        llm = LLM(options.pop("model", tiny.target), **(base | options))
        made.append(llm)
        return llm

    yield make
    for llm in made:
        if llm._engine is None:
            continue
        llm.check_integrity()
        stats = llm.stats()
        assert stats.num_used_blocks == 0, "blocks leak"
        assert stats.num_running == stats.num_waiting == 0
        llm.close()


def random_prompts(count: int, seed: int = 0, low: int = 3, high: int = 60) -> list[dict[str, Any]]:
    """Prompts of mixed lengths; every other one repeats itself, so that n-gram look-up finds something."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i in range(count):
        n = int(rng.integers(low, high))
        ids = rng.integers(3, VOCAB, n).tolist()
        if i % 2:
            ids = (ids[: max(2, n // 4)] * 5)[:n]
        prompts.append({"prompt_token_ids": ids})
    return prompts


def token_ids(outputs: Any) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]

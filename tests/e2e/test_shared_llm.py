"""One `LLM` and several callers: threads take turns, and what the engine calls cannot call the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftwise import LLM, EngineDeadError, RequestError, SamplingParams
from tests.e2e.conftest import random_prompts, token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_threads_take_turns(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompts = random_prompts(4, seed=3)
    wanted = token_ids(llm.generate(prompts, GREEDY))
    found: dict[int, list[Any]] = {i: [] for i in range(len(prompts))}

    def generate(number: int) -> None:
        for _ in range(6):
            found[number] += token_ids(llm.generate(prompts[number], GREEDY))

    threads = [threading.Thread(target=generate, args=(i,), daemon=True) for i in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: [wanted[i]] * 6 for i in found}


def test_closing_waits_for_those_who_generate(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    begun, closing = threading.Event(), threading.Event()

    def wait(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert closing.wait(60)
        return logits

    outputs: list[Any] = []
    params = GREEDY.replace(logits_processors=[wait])
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate([[3, 4]], params)), daemon=True)
    thread.start()
    assert begun.wait(60)
    threading.Timer(0.05, closing.set).start()
    llm.close()
    thread.join(60)
    assert len(outputs[0].outputs[0].token_ids) == 20
    with pytest.raises(EngineDeadError):
        llm.generate([[3, 4]], GREEDY)


@pytest.mark.parametrize("method", ["generate", "close", "reset_drafters"])
def test_a_logits_processor_cannot_use_its_engine(make_llm: Callable[..., LLM], method: str) -> None:
    llm = make_llm()

    def call(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        getattr(llm, method)(*([[[3, 4]], GREEDY] if method == "generate" else []))
        return logits

    (output,) = llm.generate([[3, 4]], GREEDY.replace(logits_processors=[call]))
    assert output.outputs[0].finish_reason == "error"
    assert "a function that it calls, such as a logits processor" in (output.outputs[0].error or "")
    assert llm.generate([[3, 4]], GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("prompts", [None, 5, b"abc", [[]], [None], [5.0]])
def test_what_is_no_prompt_is_refused(make_llm: Callable[..., LLM], prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt is"):
        make_llm().generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, "x", 5, [GREEDY, 1], SamplingParams])
def test_what_are_no_parameters_is_refused(make_llm: Callable[..., LLM], params: Any) -> None:
    with pytest.raises(RequestError, match=r"^sampling_params is .*; it must be SamplingParams"):
        make_llm().generate([[3, 4], [5, 6]], params)


@pytest.mark.parametrize("priority", [1, [1, None], [1, "2"], [1, 2.0], [True, 1]])
def test_priorities_are_integers(make_llm: Callable[..., LLM], priority: Any) -> None:
    """Others cannot be put in an order, and the queue would be left half written."""
    llm = make_llm()
    with pytest.raises(RequestError, match=r"^priority is "):
        llm.generate([[3, 4], [5, 6]], GREEDY, priority=priority)
    llm.check_integrity()
    assert llm.stats().num_waiting == 0

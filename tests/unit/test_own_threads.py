"""Steps let torch compute on one thread: that holds for the thread that steps, and for no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.native import native_or_skip

from draftwise import LLM, AsyncLLM, LLMEngine, SamplingParams
from draftwise.runner.own_threads import ThreadNumbers, thread_numbers


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def elsewhere() -> int:
    """What a new thread finds."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


class Looks:
    """A logits processor that notes the number of torch's threads: its own thread's, and a new thread's."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        self.seen.add((torch.get_num_threads(), elsewhere()))
        return logits


def own_or_skip() -> ThreadNumbers:
    numbers = thread_numbers()
    if not numbers.own:
        pytest.skip("torch's OpenMP is not found here")
    return numbers


def test_a_number_is_the_calling_threads() -> None:
    numbers = own_or_skip()
    mkl = numbers.set(1)
    assert (torch.get_num_threads(), elsewhere()) == (1, 2)
    numbers.set(2, mkl)
    assert torch.get_num_threads() == 2
    for _ in range(2):  # what MKL had comes back
        with numbers.kept(1):
            assert (torch.get_num_threads(), elsewhere()) == (1, 2)
            assert numbers.set(1) in (0, 1)
        assert torch.get_num_threads() == 2 and numbers.set(2, mkl) == mkl


def test_without_openmp_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwise.runner.own_threads._LIBRARY", "there is none")
    numbers = ThreadNumbers()
    assert not numbers.own
    numbers.set(1)
    assert torch.get_num_threads() == 1
    with numbers.kept(2):  # would be everybody's, and for long
        assert torch.get_num_threads() == 1
    numbers.set(2)


@pytest.mark.parametrize("kind", ["LLM", "LLMEngine", "AsyncLLM"])
def test_threads_that_begin_during_a_step(kind: str) -> None:
    native_or_skip()
    own_or_skip()
    looks = Looks()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logits_processors=[looks])
    options = {"num_threads": 2, "max_model_len": 64, "num_kv_blocks": 8}
    if kind == "LLM":
        with LLM(**options) as llm:
            llm.generate("def main(", params)
    elif kind == "LLMEngine":
        engine = LLMEngine(**options)
        engine.add_request("0", "def main(", params)
        while engine.has_unfinished_requests():
            engine.step()
            assert torch.get_num_threads() == 2
        engine.close()
    else:

        async def main() -> None:
            async with AsyncLLM(**options) as llm:
                async for _ in llm.generate("def main(", params):
                    pass

        asyncio.run(main())
    assert looks.seen == {(1, 2)}
    assert torch.get_num_threads() == 2

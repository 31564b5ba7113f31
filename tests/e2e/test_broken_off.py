"""Steps that end in the middle: functions of a request that raise what ends programs, and handlers of signals that
raise."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch

from draftwise import LLM, AsyncLLM, LLMEngine, SamplingParams, register_proposer, register_verifier
from draftwise.engine.interrupts import WholeSteps
from draftwise.kv.manager import KVManager
from draftwise.propose.base import DraftRow, Proposer
from draftwise.types import Proposal, Verification, chain
from draftwise.verify.base import Rule, VerifyRequest
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}
METHODS = ("draft_model", "none", "ngram")


class Late(Exception):
    """What the handler of an alarm raises."""


class Raises:
    """A logits processor that raises once, at one of its calls."""

    def __init__(self, error: BaseException, call: int) -> None:
        self.error, self.call, self.calls = error, call, 0

    def __call__(self, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise self.error
        return logits


# Some of the calls are those of the drafter, behind tokens that were taken in.
@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("stays", [False, True])
def test_others_go_on_after_a_step_that_was_broken_off(tiny: TinyModels, call: int, stays: bool) -> None:
    engine = LLMEngine(
        tiny.target,
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=4,
        num_kv_blocks=256,
        speculation_control="static",
        speculative_config=[DRAFTS | {"model": tiny.near}, {"method": "ngram", "num_speculative_tokens": 3}],
    )
    prompts = random_prompts(3, seed=3)
    params = [GREEDY.replace(speculation={"method": method}) for method in METHODS]

    def run(more: SamplingParams | None) -> tuple[dict[str, Any], int]:
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, own)
            if not i and more is not None:
                engine.add_request("bad", prompts[0], more)
        found, broken = {}, 0
        while engine.has_unfinished_requests():
            try:
                for output in engine.step():
                    if output.finished:
                        found[output.request_id] = output.outputs[0].token_ids
            except SystemExit:
                broken += 1
                engine._alive().core.check_integrity()
                if not stays:
                    engine.abort_request("bad")
        return found, broken

    wanted, _ = run(None)
    found, broken = run(params[0].replace(logits_processors=[Raises(SystemExit(3), call)]))
    assert broken == 1
    assert found.pop("bad", wanted["0"]) == wanted["0"]
    assert found == wanted
    engine._alive().core.check_integrity()
    assert engine._alive().core.scheduler.kv.num_used == 0
    engine.close()


def shared_by_others(tiny: TinyModels, *drafters: dict[str, Any]) -> AsyncLLM:
    """An engine with a draft model, and with these ``drafters``."""
    return AsyncLLM(
        tiny.target,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        speculative_config=[DRAFTS | {"model": tiny.near}, *drafters],
        speculation_control="static",
    )


async def one(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> Any:
    """The output of a request, whole."""
    return [output async for output in llm.generate(prompt, params)][-1].outputs[0]


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr
)
def test_a_processor_cannot_end_the_engine_of_others(tiny: TinyModels, error: BaseException) -> None:
    async def main() -> None:
        llm = shared_by_others(tiny)
        prompts = random_prompts(2, seed=4)
        wanted = await one(llm, prompts[0], GREEDY)
        bad = GREEDY.replace(logits_processors=[Raises(error, 1)], speculation={"method": "none"})
        good, failed = await asyncio.gather(one(llm, prompts[0], GREEDY), one(llm, prompts[1], bad))
        assert good.token_ids == wanted.token_ids
        assert failed.finish_reason == "error" and type(error).__name__ in failed.error
        assert llm.is_alive
        await asyncio.to_thread(llm.close)

    asyncio.run(main())


class Ends(Proposer):
    """Raises in one of its hooks."""

    name: ClassVar[str] = "ends"
    observes: ClassVar[bool] = True
    hook: ClassVar[str]
    error: ClassVar[BaseException]

    def _raise(self, hook: str) -> None:
        if hook == self.hook:
            raise self.error

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        self._raise("propose")
        return [chain([7], self.name) for _ in rows]

    def observe(self, *_: Any) -> None:
        self._raise("observe")

    def leaving(self, *_: Any) -> None:
        self._raise("leaving")


class EndsRule(Rule):
    """Raises."""

    lossless = True
    error: ClassVar[BaseException]

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("no")], ids=repr)
@pytest.mark.parametrize("where", ["propose", "observe", "leaving", "rule"])
def test_a_plugin_cannot_end_the_engine_of_others(tiny: TinyModels, error: BaseException, where: str) -> None:
    """A drafter that fails costs its requests their drafts; a rule fails the requests that name it."""
    Ends.hook, Ends.error, EndsRule.error = where, error, error
    register_proposer("ends", Ends)
    register_verifier("ends", EndsRule)

    async def main() -> None:
        llm = shared_by_others(tiny, {"method": "ends", "num_speculative_tokens": 2})
        prompts = random_prompts(2, seed=4)
        wanted = await one(llm, prompts[0], GREEDY)
        bad = GREEDY.replace(speculation={"method": "ends"})
        if where == "rule":
            bad = GREEDY.replace(temperature=1.0, speculation={"rule": "ends"})
        good, found = await asyncio.gather(one(llm, prompts[0], GREEDY), one(llm, prompts[1], bad))
        assert good.token_ids == wanted.token_ids
        assert (await one(llm, prompts[0], GREEDY)).token_ids == wanted.token_ids  # after they have left
        if where == "rule":
            assert found.finish_reason == "error" and type(error).__name__ in found.error
        else:
            assert found.finish_reason == "length" and len(found.token_ids) == 20
            assert set(llm.stats().drafter_failures) == {f"ends.{where}"}
        assert llm.is_alive
        await asyncio.to_thread(llm.close)

    asyncio.run(main())


@pytest.fixture
def alarm() -> Iterator[int]:
    """A signal whose handler raises `Late`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Late

    number = getattr(signal, "SIGALRM", signal.SIGINT)
    before = signal.signal(number, late)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize("where", ["books", "processor", "before"])
def test_a_time_limit_by_a_signal_leaves_a_usable_engine(
    make_llm: Callable[..., LLM], alarm: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, it reaches the caller. Nobody takes it for an error of the engine or of a request."""
    llm = make_llm()
    prompts = random_prompts(5, seed=3)
    wanted = token_ids(llm.generate(prompts, GREEDY))
    handler = signal.getsignal(alarm)
    calls = 0

    def ring(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            signal.raise_signal(alarm)

    def rings(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        ring()
        return logits

    reserve, add = KVManager.reserve, llm._alive().core.add
    with monkeypatch.context() as patch:
        if where == "books":
            patch.setattr(KVManager, "reserve", lambda *a, **k: (reserve(*a, **k), ring())[0])
        elif where == "before":
            calls = 4
            patch.setattr(llm._alive().core, "add", lambda request: (add(request), ring())[0])
        params = GREEDY.replace(logits_processors=[rings]) if where == "processor" else GREEDY
        with pytest.raises(Late):
            llm.generate(prompts, params)
    assert calls >= 7 and signal.getsignal(alarm) is handler
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    assert token_ids(llm.generate(prompts, GREEDY)) == wanted


def test_handlers_run_at_once_and_what_they_raise_waits(alarm: int) -> None:
    came_to = "nothing"
    with pytest.raises(Late), WholeSteps() as steps:
        signal.raise_signal(alarm)
        with pytest.raises(Late):  # a second one does not wait
            signal.raise_signal(alarm)
        assert not steps.broken_off
        with pytest.raises(Late):
            steps.check()
        assert steps.broken_off
        steps.check()
        signal.raise_signal(alarm)  # the end raises it
        came_to = "the end"
    assert came_to == "the end"
    ran: list[int] = []

    def once(number: int, frame: FrameType | None) -> None:
        ran.append(number)
        signal.signal(number, signal.SIG_IGN)

    signal.signal(alarm, once)
    with WholeSteps():
        signal.raise_signal(alarm)
        assert ran == [alarm]
    assert signal.getsignal(alarm) is signal.SIG_IGN


def test_signals_are_the_main_threads(alarm: int) -> None:
    handler = signal.getsignal(alarm)
    found: list[bool] = []

    def elsewhere() -> None:
        with WholeSteps():
            found.append(signal.getsignal(alarm) is handler)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [True]

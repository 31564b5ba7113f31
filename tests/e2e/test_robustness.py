"""Bad input and failures in mid-flight: the request concerned is told, nothing else is disturbed."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from draftwise import (
    LLM,
    ConfigError,
    EngineDeadError,
    LLMEngine,
    ModelLoadError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from draftwise.engine.group import RequestGroup
from draftwise.engine.interrupts import WholeSteps
from draftwise.engine.outputs import CompletionOutput
from draftwise.engine.progress import RequestProgress
from draftwise.kv.manager import KVManager
from draftwise.propose.base import DraftRow, Proposer
from draftwise.runner.local import LocalExecutor
from draftwise.types import EMPTY_PROPOSAL, Proposal, chain
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import VOCAB, TinyModels

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class RaisingProposer(Proposer):
    """Fails for requests whose prompt starts with an even token, after a few good drafts."""

    name: ClassVar[str] = "raising"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        if any(row.token_ids_np[0] % 2 == 0 and row.num_tokens > row.num_prompt + 3 for row in rows):
            raise RuntimeError("out of ideas")
        return [chain([3] * min(2, row.budget, row.max_depth), self.name) for row in rows]


class BrokenTreeProposer(Proposer):
    """Proposes what is no tree."""

    name: ClassVar[str] = "broken"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal((1, 2), (1, -1), self.name) for _ in rows]


class OutOfVocabulary(Proposer):
    name: ClassVar[str] = "out_of_vocabulary"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [chain([VOCAB], self.name) for _ in rows]


class SilentProposer(Proposer):
    """Never has a guess."""

    name: ClassVar[str] = "silent"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [EMPTY_PROPOSAL for _ in rows]


@pytest.mark.parametrize("cls", [RaisingProposer, BrokenTreeProposer, OutOfVocabulary, SilentProposer])
def test_a_failing_drafter_costs_speculation_only(make_llm: Callable[..., LLM], cls: type[Proposer]) -> None:
    prompts = random_prompts(6, seed=1)
    wanted = token_ids(make_llm().generate(prompts, GREEDY))
    path = f"{cls.__module__}.{cls.__name__}"
    llm = make_llm(speculative_config={"method": path, "num_speculative_tokens": 2})
    outputs = llm.generate(prompts, GREEDY)
    assert token_ids(outputs) == wanted
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)
    failures = llm.stats().drafter_failures.get(f"{path}.propose", 0)
    if cls is RaisingProposer:  # the others of the batch went on drafting
        even = [p["prompt_token_ids"][0] % 2 == 0 for p in prompts]
        assert failures == sum(even) and 0 < sum(even) < len(prompts)
        plain = [o.metrics.speculation.steps_by_method.get("none", 0) for o in outputs]
        assert [steps > 10 for steps in plain] == even
    else:
        assert failures == (0 if cls is SilentProposer else len(prompts))


def test_a_raising_logits_processor_fails_its_request_alone(make_llm: Callable[..., LLM]) -> None:
    def fails_later(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > 12:
            raise ValueError("no more")
        return logits

    prompts = random_prompts(4, seed=2, high=8)
    wanted = token_ids(make_llm().generate(prompts, GREEDY))
    llm = make_llm(
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    )
    params = [GREEDY, GREEDY.replace(logits_processors=[fails_later]), GREEDY, GREEDY]
    outputs = llm.generate(prompts, params)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "no more" in (outputs[1].outputs[0].error or "")
    assert [t for i, t in enumerate(token_ids(outputs)) if i != 1] == [
        t for i, t in enumerate(wanted) if i != 1
    ]
    assert token_ids(llm.generate(prompts, GREEDY)) == wanted


def test_logprobs_beside_a_logits_processor_that_raises(make_llm: Callable[..., LLM]) -> None:
    """Everybody asked for logprobs: the others get theirs, in the step that fails and after it."""

    def fails_later(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(ids) > 12:
            raise ValueError("no more")
        return logits

    prompts = random_prompts(4, seed=2, high=8)
    asked = GREEDY.replace(logprobs=2)
    llm = make_llm(
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    )
    wanted = llm.generate(prompts, asked)
    outputs = llm.generate(
        prompts, [asked, asked.replace(logprobs=1, logits_processors=[fails_later]), asked, asked]
    )
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length", "length"]
    for i in (0, 2, 3):
        ours, theirs = outputs[i].outputs[0], wanted[i].outputs[0]
        assert ours.token_ids == theirs.token_ids and len(ours.logprobs or ()) == 20
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert list(one) == list(other)
            assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()])


def test_invalid_requests_are_refused_before_anything_runs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_kv_blocks=16, max_model_len=128)
    good: dict[str, Any] = {"prompt_token_ids": [3, 4, 5]}
    for prompt, message in (
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [3, VOCAB]}, f"token id {VOCAB} is out of range"),
        ({"prompt_token_ids": [-1]}, "out of range"),
        ({"prompt_token_ids": list(range(3, 53)) * 3}, "max_model_len"),
        ({"prompt_token_ids": "abc"}, "list of integers"),
        ({"prompt_token_ids": [1.5]}, "integers"),
        ({"prompt_tokens": [1]}, "did you mean"),
        ("text", "no tokenizer"),
        (7, "a prompt is"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([good, prompt], GREEDY)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="cache slots"):
        llm.generate([good], GREEDY.replace(max_tokens=100))
    for speculation, message in (
        ({"metod": "ngram"}, "did you mean 'method'"),
        ({"method": "ngrams"}, "did you mean 'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": 64}, "from 0 to 63"),
        ({"method": "ngram", "speculative_token_tree": [[0], [1]]}, "chains only"),
        ({"rule": "rejecton"}, "did you mean 'rejection'"),
        ({"rule": "synthetic"}, "synthetic_acceptance"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([good], GREEDY.replace(speculation=speculation))
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate([good, good], [GREEDY])
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([good], GREEDY.replace(logit_bias={VOCAB: 1.0}))
    assert llm.stats().num_steps == 0
    assert llm.generate([good], GREEDY)[0].finished


def test_models_that_cannot_be_loaded_say_why(tiny: TinyModels, tmp_path: Path) -> None:
    def load(path: Path | str, **options: Any) -> LLM:
        options = {"dtype": "float32", **options}
        return LLM(str(path), skip_tokenizer_init=True, device="cpu", **options)

    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path)
    broken = tmp_path / "truncated"
    shutil.copytree(tiny.target, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(broken)
    wrong = tmp_path / "wrong"
    shutil.copytree(tiny.target, wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\."):
        load(wrong)
    (wrong / "config.json").write_text(json.dumps(config | {"dtype": "int7"}))
    with pytest.raises(ModelLoadError, match=r"config\.json names dtype 'int7'"):
        load(wrong, dtype="auto")
    with pytest.raises(ConfigError, match="vocabulary"):
        load(tiny.target, speculative_config={"model": tiny.other_vocab, "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        load(tiny.target, max_num_seq=3)
    with pytest.raises(ConfigError, match="max_model_len"):
        load(tiny.target, max_model_len=100_000)


@pytest.mark.parametrize("option", [{"num_kv_blocks": 2**31 - 1}, {"kv_cache_memory": "1000TiB"}])
def test_a_cache_that_memory_cannot_hold(make_llm: Callable[..., LLM], option: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"no memory for a K/V cache of .* lower kv_cache_memory or num_kv_blocks"
    ):
        make_llm(**option, block_size=1024, skip_tokenizer_init=True)


def test_a_broken_engine_says_so(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    assert llm._engine is not None

    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    for name in ("forward_logits", "logits_alone"):
        setattr(llm._engine.model, name, explode)
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate(random_prompts(1), GREEDY)
    with pytest.raises(EngineDeadError):
        llm.generate(random_prompts(1), GREEDY)


def test_interrupted_generation_leaves_a_usable_engine(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    prompts = random_prompts(5, seed=3)
    wanted = token_ids(llm.generate(prompts, GREEDY))
    calls = 0

    def interrupt(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return logits

    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY.replace(logits_processors=[interrupt]))
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    assert token_ids(llm.generate(prompts, GREEDY)) == wanted


def test_a_bar_counts_no_requests_of_a_call_that_was_broken_off(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    prompts = random_prompts(5, seed=3)

    def interrupt(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY.replace(logits_processors=[interrupt]), use_tqdm=False)
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(RequestProgress, "update", lambda self, *said: seen.append(said))
    llm.generate(prompts[:2], GREEDY, use_tqdm=True)
    assert sum(finished for _, finished in seen) == 2


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_ctrl_c_in_the_middle_of_the_books(
    make_llm: Callable[..., LLM], ahead: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the scheduler plans, behind the call that took blocks: the step is finished first, however often
    somebody presses the keys."""
    llm = make_llm(async_scheduling=ahead)
    prompts = random_prompts(5, seed=3)
    wanted = token_ids(llm.generate(prompts, GREEDY))
    reserve, calls = KVManager.reserve, 0

    def interrupting(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        done = reserve(*arguments, **named)
        if calls == 7:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return done

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(KVManager, "reserve", interrupting)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, GREEDY)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls >= 7
    llm.check_integrity()
    assert token_ids(llm.generate(prompts, GREEDY)) == wanted
    assert llm.stats().num_used_blocks == 0


def test_ctrl_c_in_the_last_step_of_a_stepped_engine(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs come with the next call: otherwise the request would stay unfinished for ever."""
    # also where tests run in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = LLMEngine(tiny.target, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64)
    try:
        core = engine._alive().core
        step = core.step

        def interrupted() -> Any:
            updates = step()
            if any(update.finished for update in updates):
                signal.raise_signal(signal.SIGINT)
            return updates

        monkeypatch.setattr(core, "step", interrupted)
        engine.add_request("r", [3, 4, 5], GREEDY)
        outputs, interrupts = [], 0
        for _ in range(60):
            if not engine.has_unfinished_requests():
                break
            try:
                outputs += engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1 and outputs[-1].finished
        assert len(outputs[-1].outputs[0].token_ids) == 20
        assert engine.get_num_unfinished_requests() == 0
    finally:
        signal.signal(signal.SIGINT, before)
        engine.close()


@pytest.mark.parametrize("where", ["add", "cancel", "output"])
def test_ctrl_c_between_the_steps_of_a_stepped_engine(tiny: TinyModels, where: str) -> None:
    """A prompt is queued whole or not at all, stopped whole, and no output is lost."""
    # also where tests run in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine = LLMEngine(tiny.target, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64)
    two = GREEDY.replace(n=2)

    def finished() -> dict[str, RequestOutput]:
        found: dict[str, RequestOutput] = {}
        for _ in range(60):
            if not engine.has_unfinished_requests():
                return found
            found.update((output.request_id, output) for output in engine.step())
        raise AssertionError("never finishes")

    try:
        core = engine._alive().core
        engine.add_request("r", [3, 4, 5], two)
        wanted = [sample.token_ids for sample in finished()["r"].outputs]
        owner: Any = RequestGroup if where == "output" else core
        real = getattr(owner, where)

        def interrupted(*arguments: Any) -> Any:
            done = real(*arguments)
            if where != "output" or arguments[0].finished:
                setattr(owner, where, real)
                signal.raise_signal(signal.SIGINT)
            return done

        found: dict[str, RequestOutput] = {}
        if where != "add":
            engine.add_request("r", [3, 4, 5], two)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                if where == "add":
                    engine.add_request("r", [3, 4, 5], two)
                elif where == "cancel":
                    engine.step()
                    engine.abort_request("r")
                else:
                    found = finished()
        found = finished()
        if where == "cancel":
            assert not found
        else:
            assert [sample.token_ids for sample in found["r"].outputs] == wanted
        assert engine.get_num_unfinished_requests() == 0
        engine.add_request("r", [3, 4, 5], two)
        assert [sample.token_ids for sample in finished()["r"].outputs] == wanted
        core.check_integrity()
    finally:
        signal.signal(signal.SIGINT, before)
        engine.close()


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_stepped_engine_whose_step_fails(tiny: TinyModels, error: BaseException) -> None:
    """Behind the commit of its tokens, of which the scheduler does not hear: going on would leave out a token."""
    engine = LLMEngine(tiny.target, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64)

    def outputs() -> dict[str, CompletionOutput]:
        found = {}
        while engine.has_unfinished_requests():
            found.update((output.request_id, output.outputs[0]) for output in engine.step())
        return found

    try:
        engine.add_request("whole", [3, 4, 5], GREEDY)
        wanted = outputs()["whole"].token_ids
        executor = engine._alive().core.executor
        assert isinstance(executor, LocalExecutor)
        engine.add_request("cut", [3, 4, 5], GREEDY)
        engine.step()

        execute = executor._execute

        def explode(*plan: Any, **named: Any) -> None:
            execute(*plan, **named)
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "_execute", explode)
            wanted_error = EngineDeadError if isinstance(error, RuntimeError) else KeyboardInterrupt
            with pytest.raises(wanted_error):
                outputs()
        if wanted_error is EngineDeadError:
            with pytest.raises(EngineDeadError, match="has failed"):
                engine.has_unfinished_requests()
            return
        assert outputs()["cut"].token_ids == wanted  # it goes on
        engine._alive().core.check_integrity()
    finally:
        engine.close()


def test_a_second_ctrl_c_does_not_wait() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), WholeSteps():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), WholeSteps():  # after the last step
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_grows_with_finished_requests(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    llm = make_llm(
        speculative_config=[
            {"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 3},
            {"method": "ngram", "num_speculative_tokens": 3},
        ],
        max_num_seqs=4,
    )
    engine = llm._engine
    assert engine is not None
    for method in ("draft_model", "ngram"):
        llm.generate(random_prompts(30, seed=4), GREEDY.replace(speculation={"method": method}))
    llm.generate(random_prompts(1), GREEDY)  # the executor learns of the last ones with the next step
    scheduler = engine.core.scheduler
    assert not scheduler._requests and not scheduler._running and not scheduler._waiting
    executor = engine.core.executor
    assert len(executor._rows) <= 1  # type: ignore[attr-defined]
    ngram = executor._drafting._proposers["ngram"]  # type: ignore[attr-defined]
    assert len(ngram._indexes) <= 1


def test_memory_is_what_the_blocks_say(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    llm = make_llm(
        kv_cache_memory=1 << 20, speculative_config={"model": tiny.far, "num_speculative_tokens": 2}
    )
    engine = llm._engine
    assert engine is not None
    storage = engine.core.executor._storage  # type: ignore[attr-defined]
    drafter = engine.core.executor._drafting._proposers["draft_model"]._storage  # type: ignore[attr-defined]
    assert storage.nbytes + drafter.nbytes == llm.stats().kv_cache_bytes <= 1 << 20
    assert llm.stats().kv_cache_bytes > 0.99 * (1 << 20)


def test_priorities_and_cancellation(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=1)
    prompts = random_prompts(3, seed=5)
    outputs = llm.generate(prompts, GREEDY, priority=[2, 1, 0])
    ends = [o.metrics.arrival_time + (o.metrics.e2e or 0) for o in outputs]
    assert ends[2] < ends[1] < ends[0]

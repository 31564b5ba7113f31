"""Steps planned while the ones before them run: the text is that of the engine that waits, with every method, through
preemption, chunked prompts, stop tokens, and cancellations in the middle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwise import LLM, AsyncLLM, SamplingParams
from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.controller import Controller, most_nodes
from draftwise.errors import EngineDeadError
from draftwise.runner.threaded import ThreadedExecutor
from draftwise.types import Speculation, StepResult
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target
from tests.fakes.fake_executor import LateExecutor

TIGHT: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 52, "max_num_batched_tokens": 48}
RULES = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=5 + i, ignore_eos=True) for i in range(10)],
    "coupled": [
        SamplingParams(temperature=0.9, max_tokens=12, stop_token_ids=(i % VOCAB,), min_tokens=3, seed=i)
        for i in range(10)
    ],
}


class Engines:
    def __init__(self, root: Path) -> None:
        self.target = make_target(root)
        self.families = make_families(root)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(8)]
        prompts += [prompts[2], [*prompts[5], 1]]  # prefix hits
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        with LLM(self.target, **self.options()) as llm:
            self.plain = {rule: token_ids(llm.generate(self.prompts, RULES[rule])) for rule in RULES}
        self._made: dict[tuple[str, bool], LLM] = {}

    def options(self, **more: Any) -> dict[str, Any]:
        base = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 256,
            "speculation_control": "static",
        }
        return base | more

    def get(self, family: str, late: bool) -> LLM:
        """``late``: the device runs a step when its result is waited for, and not before."""
        llm = self._made.get((family, late))
        if llm is None:
            options = self.options(speculative_config=self.families[family], async_scheduling=True, **TIGHT)
            llm = self._made[family, late] = LLM(self.target, **options)
            core = llm._engine.core  # type: ignore[union-attr]
            assert isinstance(core.executor, ThreadedExecutor)
            if late:
                core.executor = LateExecutor(core.executor.inner)
        return llm

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_text_is_that_of_plain_decoding(engines: Engines, case: tuple[str, str, str]) -> None:
    family, method, shape = case
    for late in (False, True):
        llm = engines.get(family, late)
        for rule, params in RULES.items():
            speculation = {"method": method, **SHAPES[shape]}
            outputs = llm.generate(engines.prompts, [p.replace(speculation=speculation) for p in params])
            assert token_ids(outputs) == engines.plain[rule], (rule, late)
            llm.check_integrity()
            assert not llm.stats().drafter_failures
            drafts = [o.metrics.speculation.num_drafts for o in outputs]
            assert sum(drafts) > 0


def test_steps_do_overlap_and_nothing_is_left(engines: Engines) -> None:
    options = engines.options(
        speculative_config=engines.families["methods"][:1], async_scheduling=True, **TIGHT
    )
    with LLM(engines.target, **{**options, "num_kv_blocks": 20}) as llm:
        core = llm._engine.core  # type: ignore[union-attr]
        assert isinstance(core.executor, ThreadedExecutor)
        core.executor = late = LateExecutor(core.executor.inner)
        outputs = llm.generate(engines.prompts, RULES["greedy"])
        assert token_ids(outputs) == engines.plain["greedy"]
        assert late.most == 2 and llm.stats().num_preemptions > 0
        while core.has_work:
            core.step()
        assert not late.queue and core.scheduler.kv.num_used == 0


def test_rejection_draws_the_same(engines: Engines) -> None:
    """Noise depends on what was committed, which a late scheduler does not change."""
    params = [
        SamplingParams(
            temperature=1.0, max_tokens=12, seed=i, speculation={"method": "draft_model", "rule": "rejection"}
        )
        for i in range(10)
    ]
    options = engines.options(speculative_config=engines.families["methods"][:1])
    with (
        LLM(engines.target, **options) as llm,
        LLM(engines.target, async_scheduling=True, **options) as ahead,
    ):
        assert token_ids(llm.generate(engines.prompts, params)) == token_ids(
            ahead.generate(engines.prompts, params)
        )


def test_cancelling_in_the_middle_disturbs_nobody(engines: Engines) -> None:
    options = engines.options(
        speculative_config=engines.families["methods"][:1], async_scheduling=True, **TIGHT
    )
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, output_kind="delta")

    async def one(llm: AsyncLLM, i: int) -> tuple[int, ...]:
        got: list[int] = []
        stop_at = 3 if i % 2 else 99
        async for output in llm.generate(engines.prompts[i], params):
            got += output.outputs[0].token_ids
            if len(got) >= stop_at:
                break
        return tuple(got)

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(engines.target, **options) as llm:
            got = await asyncio.gather(*(one(llm, i) for i in range(10)))
            llm.check_integrity()
            return got

    with LLM(engines.target, **engines.options()) as llm:
        wanted = token_ids(llm.generate(engines.prompts, params.replace(output_kind="cumulative")))
    for i, got in enumerate(asyncio.run(run())):
        assert got == wanted[i][: len(got)] and len(got) >= (3 if i % 2 else 14)


def test_a_failing_step_kills_the_engine(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engines.target, **engines.options(async_scheduling=True))
    executor = llm._engine.core.executor  # type: ignore[union-attr]
    assert isinstance(executor, ThreadedExecutor)

    def broken(plan: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(executor.inner, "execute", broken)
    with pytest.raises(EngineDeadError, match="no device"):
        llm.generate(engines.prompts, RULES["greedy"])


def test_an_interrupted_wait_leaves_the_engine_usable(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a result is waited for."""
    with LLM(engines.target, **engines.options(async_scheduling=True)) as llm:
        core = llm._engine.core  # type: ignore[union-attr]
        submit, waits = core.executor.submit, iter(range(100))

        class Interrupted(Future[StepResult]):
            def __init__(self, inner: Future[StepResult]) -> None:
                super().__init__()
                self._inner = inner

            def result(self, timeout: float | None = None) -> StepResult:
                if next(waits) == 3:
                    raise KeyboardInterrupt
                return self._inner.result()

        monkeypatch.setattr(core.executor, "submit", lambda plan: Interrupted(submit(plan)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(engines.prompts, RULES["greedy"])
        assert token_ids(llm.generate(engines.prompts, RULES["greedy"])) == engines.plain["greedy"]
        llm.check_integrity()


class Whim(Controller):
    """Drafts, verifies and tells drafters by chance."""

    def __init__(self) -> None:
        self._random = random.Random(5)
        self.resting: set[int] = set()

    def begin(self, batch_size: int) -> None:
        self.resting = {rid for rid in range(1000) if self._random.random() < 0.3}

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        most = most_nodes(speculation, batch_size, {})
        return 0 if rid in self.resting else self._random.randint(0, most)

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        return self._random.randint(0, num_proposed)


@pytest.mark.parametrize("kind", ["whim", "adaptive"])
@pytest.mark.parametrize("family", ["methods", "other forms"])
def test_text_does_not_depend_on_who_drafts(engines: Engines, family: str, kind: str) -> None:
    for late in (False, True):
        llm = engines.get(family, late)
        methods = [spec["method"] for spec in engines.families[family]]
        scheduler = llm._engine.core.scheduler  # type: ignore[union-attr]
        static = scheduler._controller
        observing = {"eagle", "eagle3", "mtp"}
        scheduler._controller = (
            Whim() if kind == "whim" else AdaptiveController(None, {"ngram", "suffix"}, observing, ahead=True)
        )
        try:
            for rule, params in RULES.items():
                mixed = [
                    p.replace(speculation={"method": methods[i % len(methods)]}) for i, p in enumerate(params)
                ]
                assert token_ids(llm.generate(engines.prompts, mixed)) == engines.plain[rule], (rule, late)
                llm.check_integrity()
        finally:
            scheduler._controller = static


def test_adaptive_control_is_there_if_asked_for(engines: Engines) -> None:
    options = engines.options(speculative_config=engines.families["methods"][:1], async_scheduling=True)
    with LLM(engines.target, **{**options, "speculation_control": "adaptive"}) as llm:
        for _ in range(2):
            assert token_ids(llm.generate(engines.prompts, RULES["greedy"])) == engines.plain["greedy"]
        control = llm.stats().control
        assert control.mode == "adaptive" and control.decisions > 0


def test_grammars_stop_strings_and_logprobs() -> None:
    """On the embedded model, which has a tokenizer."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 24, "structured_outputs": {"regex": r"[a-z]{3,8}\([a-z, ]*\)"}},
        {"temperature": 0.0, "max_tokens": 24, "stop": ["\n"], "logprobs": 1},
        {"temperature": 0.8, "max_tokens": 24, "seed": 3, "stop": ["return", "):"], "prompt_logprobs": 1},
        {"temperature": 0.0, "max_tokens": 12, "bad_words": ["self"], "repetition_penalty": 1.1},
    ]
    params = [SamplingParams(**given) for given in options]
    prompts = ["def parse(text):\n    return ", "import os, ", "class Reader:\n    def read(self", "def f("]
    found = []
    for ahead in (False, True):
        with LLM(
            num_kv_blocks=256, max_model_len=256, async_scheduling=ahead, speculation_control="static"
        ) as llm:
            outputs = llm.generate(prompts, params)
            found.append(
                [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]
            )
            assert outputs[1].outputs[0].logprobs is not None and outputs[2].prompt_logprobs is not None
            llm.check_integrity()
    assert found[0] == found[1]

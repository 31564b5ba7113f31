"""The seams that other executors will use: a plan survives serialisation, time comes from outside."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from draftwise import LLM, SamplingParams
from draftwise.runner.executor import Executor
from draftwise.types import StepPlan, StepResult
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels


class Remote(Executor):
    """Stands for an executor in another process: everything crosses as bytes."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.largest_decode = 0

    def execute(self, plan: StepPlan) -> StepResult:
        data = pickle.dumps(plan)
        if not plan.new:
            self.largest_decode = max(self.largest_decode, len(data))
        result: StepResult = pickle.loads(pickle.dumps(self.inner.execute(pickle.loads(data))))
        return result

    def close(self) -> None:
        self.inner.close()


def test_plans_and_results_can_be_sent_elsewhere(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=30,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        stop_token_ids=[60],
    )
    prompts = random_prompts(8, seed=1)
    spec = {"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 3}
    wanted = make_llm(speculative_config=spec).generate(prompts, params)
    llm = make_llm(speculative_config=spec, num_kv_blocks=48, max_num_batched_tokens=20, max_num_seqs=8)
    assert llm._engine is not None
    remote = Remote(llm._engine.core.executor)
    llm._engine.core.executor = remote
    outputs = llm.generate(prompts, params)
    assert token_ids(outputs) == token_ids(wanted)
    # A diff, not the state: a decoding step of eight requests costs little however long they are.
    assert 0 < remote.largest_decode < 2000


def test_time_comes_from_the_clock(tiny: TinyModels) -> None:
    from draftwise.config import resolve_engine_config
    from draftwise.engine.builder import build_engine

    now = 100.0

    def clock() -> float:
        return now

    config = resolve_engine_config(
        model=tiny.target, dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_blocks=16
    )
    engine = build_engine(config, clock)
    group = engine.processor.group(
        {"prompt_token_ids": [3, 4, 5]}, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
    for request in group.requests:
        engine.core.add(request)
    while engine.core.has_work:
        now += 2.0
        engine.core.step()
    metrics = group.output().metrics
    assert (metrics.arrival_time, metrics.queue_time, metrics.ttft) == (100.0, 2.0, 2.0)
    assert (metrics.itl, metrics.e2e) == (2.0, 6.0)

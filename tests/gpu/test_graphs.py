"""CUDA's own graphs: engines on a device say the same with and without them, with every method that drafts at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.graphs.decoder import GraphedDecoder
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import VOCAB, make_families, make_target

pytestmark = pytest.mark.gpu

METHODS = ["none", "draft_model", "eagle", "eagle3", "mtp", "ngram"]
RULES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    "coupled": SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True, seed=5),
}


class Engines:
    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(6)]
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        target, families = make_target(root), make_families(root)
        options: dict[str, Any] = {
            "dtype": "float32",
            "device": "cuda",
            "batch_invariant": True,
            "skip_tokenizer_init": True,
            "num_kv_blocks": 64,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
            "speculation_control": "static",
            "speculative_config": [s for s in families["methods"] if s["method"] in METHODS],
        }
        self.eager = LLM(target, enforce_eager=True, async_scheduling=False, **options)
        self.graphed = LLM(target, async_scheduling=False, **options)
        self.ahead = LLM(target, async_scheduling=True, **options)
        self.piecewise = LLM(
            target, async_scheduling=False, compilation_config={"cudagraph_mode": "PIECEWISE"}, **options
        )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWISE_KERNELS", "triton")
        made = Engines(tmp_path_factory.mktemp("gpu"))
        yield made
        for llm in (made.eager, made.graphed, made.ahead, made.piecewise):
            llm.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_text_with_graphs_is_that_without(engines: Engines, method: str, rule: str) -> None:
    params = RULES[rule].replace(speculation={"method": method})
    plain = RULES[rule].replace(speculation={"method": "none"})
    wanted = token_ids(engines.eager.generate(engines.prompts, plain))
    assert token_ids(engines.eager.generate(engines.prompts, params)) == wanted
    assert token_ids(engines.graphed.generate(engines.prompts, params)) == wanted
    assert token_ids(engines.ahead.generate(engines.prompts, params)) == wanted
    assert token_ids(engines.piecewise.generate(engines.prompts, params)) == wanted


def test_decoding_is_replayed(engines: Engines) -> None:
    model = engines.graphed._engine.model  # type: ignore[union-attr]
    assert isinstance(model, GraphedDecoder)
    before = model.num_replays
    engines.graphed.generate(engines.prompts[:1], RULES["greedy"].replace(speculation={"method": "none"}))
    assert model.num_replays - before >= 15


def test_prompts_are_passes_in_pieces(engines: Engines) -> None:
    for llm in (engines.graphed, engines.piecewise):
        model = llm._engine.model  # type: ignore[union-attr]
        assert isinstance(model, GraphedDecoder)
        before = model.num_piecewise
        llm.generate([{"prompt_token_ids": [i % VOCAB for i in range(20)]}], RULES["greedy"])
        assert model.num_piecewise > before


@pytest.mark.parametrize("kind", ["graphed", "piecewise"])
def test_replays_do_not_wait_for_the_device(engines: Engines, kind: str) -> None:
    from draftwise.models.inputs import RowInput, build_step_input

    engine = getattr(engines, kind)._engine
    assert engine is not None and isinstance(engine.model, GraphedDecoder)
    storage: Any = engine.core.executor._storage
    row = RowInput([3], 5, np.arange(4, dtype=np.int32))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():  # as the executor has it: the graphs' buffers were made so
            for _ in range(2):
                batch = build_step_input([row], storage.block_size, engine.model.inputs_on)
                engine.model.forward_logits(batch, storage, [0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3"])
def test_steps_that_stay_on_the_device_wait_for_nothing(engines: Engines, method: str) -> None:
    executor: Any = engines.ahead._engine.core.executor  # type: ignore[union-attr]
    waits, steps = [], []
    for tokens in (12, 12, 44):  # enough that as many drafts follow the prompt
        params = RULES["greedy"].replace(max_tokens=tokens, speculation={"method": method})
        before = executor.inner.seats.num_steps
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engines.ahead.generate([{"prompt_token_ids": [1, 2, 3]}], params)
        torch.cuda.set_sync_debug_mode("default")
        waits.append(len(caught))
        steps.append(executor.inner.seats.num_steps - before)
    assert steps[2] > steps[1] + 4 and waits[2] == waits[1]

"""Steps that stay on the device: the text of the engine that waits, with every method and rule, through chunked
prompts, preemption, cancellation, stop tokens, and runs that begin and end. The graphs here need no GPU, and refuse to
capture whatever would read a value on the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.kernels.torch_ops import TorchOps
from draftwise.runner.resident import ResidentRuns
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import VOCAB, make_families, make_target
from tests.fakes.fake_graphs import FakeGraphs

METHODS = ["none", "draft_model", "eagle", "eagle3", "mtp"]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9},
    "rejection": {"temperature": 1.0},
    "block": {"temperature": 0.8},
}


class Engines:
    def __init__(self, root: Path) -> None:
        self.target = make_target(root)
        self.families = make_families(root)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(6)]
        prompts += [prompts[2], [*prompts[5], 1]]  # prefix hits
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        self.chosen = [s for s in self.families["methods"] if s["method"] in METHODS]
        self.waiting = self.make()
        self.ahead = self.make(async_scheduling=True)

    def make(self, **options: Any) -> LLM:
        base: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 128,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 48,
            "speculation_control": "static",
            "speculative_config": self.chosen,
            "compilation_config": {"cudagraph_mode": "FULL"},
        }
        return LLM(self.target, **(base | options))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwise.models.loader.default_ops", ops)
        patch.setattr("draftwise.engine.builder.backend_for", lambda device: FakeGraphs())
        made = Engines(tmp_path_factory.mktemp("resident"))
        yield made
        made.waiting.close()
        made.ahead.close()


def runs(llm: LLM) -> ResidentRuns:
    assert llm._engine is not None
    executor: Any = llm._engine.core.executor
    found: ResidentRuns = executor.inner._runs
    assert found is not None
    return found


def params_of(rule: str, method: str, **more: Any) -> list[SamplingParams]:
    speculation = {"method": method} | ({} if rule == "greedy" or method == "none" else {"rule": rule})
    options = {"max_tokens": 14, "ignore_eos": True} | RULES[rule] | more
    return [SamplingParams(seed=5 + i, speculation=speculation, **options) for i in range(8)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_text_is_that_of_the_engine_that_waits(engines: Engines, method: str, rule: str) -> None:
    params = params_of(rule, method)
    wanted = engines.waiting.generate(engines.prompts, params)
    before = runs(engines.ahead).num_steps
    found = engines.ahead.generate(engines.prompts, params)
    assert token_ids(found) == token_ids(wanted)
    assert runs(engines.ahead).num_steps > before
    for one, other in zip(found, wanted, strict=True):
        assert one.metrics.speculation.num_accepted_tokens == other.metrics.speculation.num_accepted_tokens
    engines.ahead.check_integrity()

"""An engine of two ranks with a drafter of every method, and what it says without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from draftwise import LLM, SamplingParams
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import SHAPES, VOCAB, make_families, make_target

RULES = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)] * 7,
    "coupled": [
        SamplingParams(temperature=0.9, top_p=0.97, max_tokens=16, ignore_eos=True, seed=i) for i in range(7)
    ],
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_kv_blocks": 24,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 6,
    "speculation_control": "static",
    "worker_timeout": 60,
}


class Pair:
    """An engine of two ranks with all methods, and what it says without them."""

    def __init__(self, root: Path, **options: Any) -> None:
        """``options``: besides `OPTIONS`."""
        self.target = make_target(root)
        self.family = make_families(root)["methods"]
        self.llm = LLM(
            self.target,
            tensor_parallel_size=2,
            speculative_config=self.family,
            keep_trace=True,
            **OPTIONS,
            **options,
        )
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 40))).tolist() for _ in range(5)]
        prompts += [prompts[2], [*prompts[4], 1]]  # prefix hits
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        plain = {"method": "none"}
        self.plain = {
            rule: token_ids(self.llm.generate(self.prompts, [p.replace(speculation=plain) for p in params]))
            for rule, params in RULES.items()
        }

    def check(self, method: str, shape: str) -> None:
        """A method's greedy and coupled text is that of plain decoding, through chunks, prefix hits and preemption."""
        llm = self.llm
        llm.reset_prefix_cache()
        llm.reset_drafters()
        before = llm.stats().num_preemptions
        accepted = 0
        for rule, params in RULES.items():
            asked = [p.replace(speculation={"method": method, **SHAPES[shape]}) for p in params]
            outputs = llm.generate(self.prompts, asked)
            assert token_ids(outputs) == self.plain[rule]
            accepted += sum(len(step.accepted_nodes) for o in outputs for step in o.outputs[0].trace or ())
        assert accepted > 2
        assert not llm.stats().drafter_failures
        assert llm.stats().num_preemptions > before
        llm.check_integrity()

    def draw(self, method: str) -> None:
        """Rejection draws what it draws on both ranks: a digest that differs would end the engine."""
        speculation = {"method": method, "num_speculative_tokens": 3, "rule": "rejection"}
        params = SamplingParams(
            temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, speculation=speculation
        )
        outputs = self.llm.generate(self.prompts[:3], params)
        assert [len(ids) for ids in token_ids(outputs)] == [24] * 3
        assert sum(len(step.draft_tokens) for o in outputs for step in o.outputs[0].trace or ()) > 9

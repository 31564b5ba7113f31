"""An engine of two ranks with a drafter of every method, and what it says without them."""

from __future__ import annotations

import functools
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
        self.is_closed = False
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

    def draw(self, method: str, shape: str) -> None:
        """Rejection draws on ranks what it draws in one process: q's rows reach the rank that verifies, and the noise
        is keyed. Text depends on what was drafted here, so that plain decoding is no measure; a digest that differs
        between ranks would end the engine."""
        speculation = {"method": method, "rule": "rejection", **SHAPES[shape]}
        asked = [
            SamplingParams(temperature=0.9, seed=i, max_tokens=16, ignore_eos=True, speculation=speculation)
            for i in range(len(self.prompts))
        ]
        said = []
        for llm in (self.one_process, self.llm):
            llm.reset_prefix_cache()
            llm.reset_drafters()
            outputs = llm.generate(self.prompts, asked)
            drafted = [tuple(step.draft_tokens) for o in outputs for step in o.outputs[0].trace or ()]
            said.append((token_ids(outputs), drafted))
            assert sum(map(len, drafted)) > 9 and not llm.stats().drafter_failures
        assert said[0] == said[1]
        self.llm.check_integrity()

    @functools.cached_property
    def one_process(self) -> LLM:
        """The same target and drafters without ranks."""
        return LLM(self.target, speculative_config=self.family, keep_trace=True, **OPTIONS)

    def close(self) -> None:
        """End both engines."""
        self.is_closed = True
        self.llm.close()
        if "one_process" in self.__dict__:
            self.one_process.close()

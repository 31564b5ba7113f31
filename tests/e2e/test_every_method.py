"""Every method in every shape: the text is that of plain decoding, greedily and under the coupled rule, alone and among
others, through chunked prompts, prefix hits and preemption. Sampled rules: tests/statistical/test_every_method.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwise import LLM, SamplingParams
from draftwise.propose.registry import resolve_proposer
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target

PLACES: dict[str, dict[str, Any]] = {
    "batch 1": {"max_num_seqs": 1},
    "batch 8": {"max_num_seqs": 8, "num_kv_blocks": 36, "max_num_batched_tokens": 48},
}
LOOKS_UP = {"ngram", "suffix", "synthetic"}  # drafts without a pass of its own
RULES = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 10,
    "coupled": [
        SamplingParams(temperature=0.9, top_p=0.97, max_tokens=20, ignore_eos=True, seed=i) for i in range(10)
    ],
}


class Engines:
    """Engines over one target, made when they are first asked for, and what plain decoding says."""

    def __init__(self, root: Path) -> None:
        self.target = make_target(root)
        self._families = make_families(root)
        self._made: dict[tuple[str, str], LLM] = {}
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(8)]
        prompts += [prompts[2], [*prompts[5], 1]]  # prefix hits
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        with self._llm() as llm:
            self.plain = {rule: token_ids(llm.generate(self.prompts, RULES[rule])) for rule in RULES}

    def get(self, family: str, place: str) -> LLM:
        llm = self._made.get((family, place))
        if llm is None:
            specs = self._families[family]
            llm = self._llm(speculative_config=specs, keep_trace=True, **PLACES[place])
            self._made[family, place] = llm
        return llm

    def _llm(self, **options: Any) -> LLM:
        base: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 256,
            "speculation_control": "static",
        }
        return LLM(self.target, **(base | options))

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("every"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("case", "rule", "place"),
    [
        pytest.param(
            case,
            rule,
            place,
            id=f"{case_id(case)}-{rule}-{place}",
            # each case in one place and under one rule, in turns; --all: with all of them
            marks=[] if i % 4 == 2 * j + k else [pytest.mark.slow],
        )
        for i, case in enumerate(CASES)
        for j, rule in enumerate(RULES)
        for k, place in enumerate(PLACES)
    ],
)
def test_text_is_that_of_plain_decoding(
    engines: Engines, case: tuple[str, str, str], rule: str, place: str
) -> None:
    family, method, shape = case
    llm = engines.get(family, place)
    llm.reset_prefix_cache()
    llm.reset_drafters()
    before = llm.stats()
    asked = [p.replace(speculation={"method": method, **SHAPES[shape]}) for p in RULES[rule]]
    steps = []
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(engines.prompts, asked)
        assert token_ids(outputs) == engines.plain[rule]
        llm.check_integrity()
        steps += [step for o in outputs for step in o.outputs[0].trace or () if step.draft_tokens]
    assert len(steps) > 30
    assert not llm.stats().drafter_failures
    assert sum(len(step.accepted_nodes) for step in steps) > 2, "accepted drafts, too"
    if shape != "chain":
        paths = {step.accepted_nodes for step in steps}
        assert any(path != tuple(range(len(path))) for path in paths), "compaction was needed"
    after = llm.stats()
    assert (after.draft_forward_time > before.draft_forward_time) == (method not in LOOKS_UP)
    if place == "batch 8":
        assert after.num_preemptions > before.num_preemptions


def test_nothing_is_left_out() -> None:
    """Whatever says that it drafts trees stands among the cases as such."""
    for method in {method for family, method, _ in CASES if family == "methods"} - {
        "hybrid"
    }:  # decides when it is made
        shapes = {shape for family, m, shape in CASES if (family, m) == ("methods", method)}
        cls = resolve_proposer(method)
        assert ("static" in shapes) == cls.drafts_trees, method
        assert ("dynamic" in shapes) == cls.drafts_dynamic_trees, method

"""Every method in every shape, sampled under the rejection rule by whole engines: the joint distribution of the first
three tokens is the target's.

The statistic and its threshold are those of `test_end_to_end`: under the null hypothesis it is passed less than once in
10^7. Detectable: with 1,800 trials and df near 47, d = sum((observed - p) ** 2 / p) of 0.042, a shift of 21 % of the
probability of every cell; what draws children in the wrong way is off by far more (`test_negative_controls`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target
from tests.statistical.test_end_to_end import LENGTH, PROMPT, chi_square, exact

from draftwise import LLM, SamplingParams

TRIALS = 1_800
PARAMS = SamplingParams(max_tokens=LENGTH + 1)


class Engines:
    """One per family and number of requests at once, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.target = make_target(root)
        self.exact = exact(self.target, PARAMS)
        self._families = make_families(root)
        self._made: dict[tuple[str, int], LLM] = {}

    def get(self, family: str, batch: int) -> LLM:
        llm = self._made.get((family, batch))
        if llm is None:
            llm = LLM(
                self.target,
                dtype="float32",
                device="cpu",
                skip_tokenizer_init=True,
                max_num_seqs=batch,
                num_kv_blocks=512,
                seed=21,
                speculation_control="static",
                speculative_config=self._families[family],
            )
            self._made[family, batch] = llm
        return llm

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("every"))
    yield made
    made.close()


def outputs_follow(engines: Engines, case: tuple[str, str, str], batch: int, trials: int) -> None:
    family, method, shape = case
    params = PARAMS.replace(speculation={"method": method, "rule": "rejection", **SHAPES[shape]})
    counts = np.zeros(VOCAB**LENGTH)
    accepted = 0
    for output in engines.get(family, batch).generate([{"prompt_token_ids": PROMPT}] * trials, params):
        a, b, c = output.outputs[0].token_ids[:LENGTH]
        counts[(a * VOCAB + b) * VOCAB + c] += 1
        accepted += output.metrics.speculation.num_accepted_tokens
    assert accepted > 0.01 * trials, "nothing was accepted: the test would show nothing"
    statistic, threshold = chi_square(counts, engines.exact)
    assert statistic < threshold
    # Negative control: the same counts are far from a slightly wrong target.
    wrong: Any = engines.exact**1.3
    statistic, threshold = chi_square(counts, wrong / wrong.sum())
    assert statistic > threshold


ELSEWHERE = {
    ("methods", "draft_model", "chain"),
    ("methods", "ngram", "chain"),
}
"""By rejection in `test_end_to_end`, with more trials."""
KIN = {
    ("methods", "draft_model", "dynamic"),  # as hybrid
    ("methods", "hybrid", "static"),  # as draft_model
    ("methods", "eagle", "chain"),  # as eagle3
    ("methods", "eagle", "static"),  # as eagle3
    ("methods", "mtp", "static"),  # as three layers
    ("other forms", "mtp", "dynamic"),  # as one layer
    ("methods", "dflash", "static"),  # as dspark
    ("other forms", "dflash", "dynamic"),  # as dflash
    ("methods", "dflash", "chain"),  # as dspark
    ("methods", "early_exit", "static"),  # as draft_model
    ("methods", "early_exit", "dynamic"),  # as hybrid
    ("methods", "suffix", "chain"),  # as ngram
    ("methods", "suffix", "static"),
    ("methods", "synthetic", "chain"),
    ("other forms", "mtp", "chain"),  # as one layer
}
"""What a drafter of the same kind draws as well; every method and every form of it keeps one shape or more."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case_id(case), marks=[pytest.mark.slow] if case in ELSEWHERE | KIN else [])
        for case in CASES
    ],
)
def test_outputs_follow_the_target(engines: Engines, case: tuple[str, str, str]) -> None:
    outputs_follow(engines, case, 64, TRIALS)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_alone_and_among_a_few(engines: Engines, case: tuple[str, str, str], batch: int) -> None:
    """Smaller batches take other ways through drafters: loops in one native call."""
    outputs_follow(engines, case, batch, TRIALS)

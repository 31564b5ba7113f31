"""Whole engines with Medusa heads: the joint distribution of the first tokens is the target's. The statistic, its
threshold and what it detects are those of `test_end_to_end`. All slow: quick ones of each shape are in
`test_every_method`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.medusa import random_heads, save_medusa
from tests.statistical.test_end_to_end import (
    LENGTH,
    MANY,
    PROMPT,
    VOCAB,
    chi_square,
    exact,
    folders,
)

from draftwise import LLM, SamplingParams

__all__ = ["folders"]

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


_RULE = {"rule": "rejection"}
_DYNAMIC = {"speculative_dynamic_tree": {"top_k": 3, "depth": 3}, "num_speculative_tokens": 6}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "static tree, few tokens": (_RULE | {"speculative_token_tree": TREE}, {"temperature": 0.6, "top_k": 5}),
    "chain": (_RULE, {}),
    "dynamic tree": (_RULE | _DYNAMIC, {}),
    "block": ({"rule": "block"}, {}),
    "static tree": (_RULE | {"speculative_token_tree": TREE}, {}),
}


@pytest.mark.parametrize(
    ("speculation", "more", "trials"),
    [pytest.param(*case, MANY, id=f"{name}, many", marks=pytest.mark.slow) for name, case in CASES.items()],
)
def test_outputs_follow_the_target(
    folders: tuple[str, str, str],
    tmp_path: Path,
    speculation: dict[str, Any],
    more: dict[str, Any],
    trials: int,
) -> None:
    target, *_ = folders
    heads = save_medusa(tmp_path, random_heads(32, VOCAB, heads=3, seed=1), 3)
    params = SamplingParams(max_tokens=LENGTH + 1, speculation={"method": "medusa", **speculation}, **more)
    with LLM(
        target,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_seqs=256,
        num_kv_blocks=1024,
        seed=13,
        speculation_control="static",
        speculative_config={"model": heads},
    ) as llm:
        counts = np.zeros(VOCAB**LENGTH)
        accepted = 0
        for output in llm.generate([{"prompt_token_ids": PROMPT}] * trials, params):
            a, b, c = output.outputs[0].token_ids[:LENGTH]
            counts[(a * VOCAB + b) * VOCAB + c] += 1
            accepted += output.metrics.speculation.num_accepted_tokens
    p = exact(target, params)
    assert accepted > 0.02 * trials, "nothing was accepted: the test would show nothing"
    statistic, threshold = chi_square(counts, p)
    assert statistic < threshold
    wrong = p**1.15
    statistic, threshold = chi_square(counts, wrong / wrong.sum())
    assert statistic > threshold

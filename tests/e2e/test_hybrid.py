"""Whole engines with the hybrid drafter: same text as plain decoding, and a model that stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DYNAMIC = {"speculative_dynamic_tree": {"top_k": 4, "depth": 4}, "num_speculative_tokens": 12}


def hybrid(model: str, **more: Any) -> dict[str, Any]:
    inner = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    return {
        "method": "hybrid",
        "hybrid_drafter": inner,
        "hybrid_min_match": 2,
        "num_speculative_tokens": 8,
        **more,
    }


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "more", [{}, {"hybrid_lookup": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}]
)
def test_output_is_that_of_plain_decoding(
    make_llm: Callable[..., LLM], tiny: TinyModels, batch: int, more: dict[str, Any]
) -> None:
    prompts = random_prompts(8, seed=2)
    coupled = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, ignore_eos=True, seed=i) for i in range(8)
    ]
    plain = make_llm()
    wanted, seeded = token_ids(plain.generate(prompts, GREEDY)), token_ids(plain.generate(prompts, coupled))
    llm = make_llm(speculative_config=hybrid(tiny.near, **more), max_num_seqs=batch)
    outputs = llm.generate(prompts, GREEDY)
    assert token_ids(outputs) == wanted
    methods = {m for o in outputs for m in o.metrics.speculation.steps_by_method}
    assert {"draft_model", more.get("hybrid_lookup", "suffix")} <= methods
    assert token_ids(llm.generate(prompts, coupled)) == seeded
    tree = llm.generate(prompts, GREEDY.replace(speculation=DYNAMIC))
    assert token_ids(tree) == wanted
    assert any("hybrid" in o.metrics.speculation.steps_by_method for o in tree)
    assert token_ids(llm.generate(prompts, [p.replace(speculation=DYNAMIC) for p in coupled])) == seeded
    static = {"speculative_token_tree": [[0], [1], [0, 0], [1, 0]]}
    assert token_ids(llm.generate(prompts, GREEDY.replace(speculation=static))) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 11, "max_num_seqs": 5},
        {"num_kv_blocks": 30, "max_num_seqs": 6},
    ],
)
def test_the_model_is_right_after_steps_of_look_up(
    make_llm: Callable[..., LLM], tiny: TinyModels, options: dict[str, Any]
) -> None:
    """The draft model is the target: whatever it drafts is accepted, unless it read slots nobody filled."""
    llm = make_llm(speculative_config=hybrid(tiny.target), keep_trace=True, **options)
    prompts = random_prompts(10, seed=4, low=20)
    for params, least in (
        (GREEDY, 0.97),
        (GREEDY.replace(temperature=0.8), 0.97),
        # the likeliest nodes need not reach the last level
        (GREEDY.replace(speculation={"speculative_dynamic_tree": {"top_k": 2, "depth": 3}}), 0.85),
    ):
        llm.reset_drafters()
        outputs = llm.generate(prompts, params)
        steps = [step for o in outputs for step in o.outputs[0].trace or ()]
        modelled = [step for step in steps if step.method in ("draft_model", "hybrid") and step.draft_tokens]
        full = [s for s in modelled if len(s.accepted_nodes) >= min(3, _depth(s.draft_parents))]
        assert len(modelled) > 20
        assert len(full) >= least * len(modelled), params
        if params.speculation is None:
            assert any(step.method == "suffix" for step in steps)


def _depth(parents: tuple[int, ...]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)

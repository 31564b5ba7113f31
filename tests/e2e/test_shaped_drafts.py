"""top_p, top_k, min_p and penalties leave drafting in one native call: what most people sample with must not cost the
speed."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from tests.native import native_or_skip

SHAPES: list[dict[str, Any]] = [
    {"top_p": 0.95},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.9, "repetition_penalty": 1.1},
    {"bad_words": ["self"], "logit_bias": {5: 1.5}},
]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_nothing_is_drawn_token_by_token(method: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()

    def refuse(*given: object, **more: object) -> None:
        raise AssertionError("drawn between two passes")

    monkeypatch.setattr("draftwise.propose.heads.proposer.draw_next", refuse)
    monkeypatch.setattr("draftwise.propose.models.proposer.draw_next", refuse)
    params = [
        SamplingParams(
            temperature=0.8,
            max_tokens=16,
            ignore_eos=True,
            seed=i,
            speculation={"method": method, "rule": rule},
            **given,
        )
        for i, given in enumerate(SHAPES)
    ]
    with LLM(num_kv_blocks=64, max_model_len=128, speculation_control="static") as llm:
        outputs = llm.generate(["def main(argv):\n    "] * len(params), params)
        for output in outputs:
            # a proposer that raises costs its request the drafts of all later steps
            assert output.metrics.speculation.num_drafts >= 3
        again = llm.generate(["def main(argv):\n    "], params[0])
        assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        # allowed tokens decide what comes: they are looked at in between, which fails here
        for given in ({"allowed_token_ids": [5, 6, 7]}, {"logit_bias": {5: 9.0}}):
            steered = params[0].replace(**given)
            assert llm.generate(["def main(argv):\n    "], steered)[0].metrics.speculation.num_drafts == 0

"""Trees drafted by models: static and dynamic ones, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]
STATIC: dict[str, Any] = {"speculative_token_tree": TREE}
DYNAMIC: dict[str, Any] = {
    "speculative_dynamic_tree": {"top_k": 4, "depth": 5},
    "num_speculative_tokens": 12,
}
SHAPES = pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])


def engine(make_llm: Callable[..., LLM], tiny: TinyModels, **options: Any) -> LLM:
    return make_llm(
        speculative_config={"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 4},
        keep_trace=True,
        **options,
    )


@SHAPES
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"num_kv_blocks": 40, "max_num_seqs": 8},
        {"max_num_batched_tokens": 19, "max_num_seqs": 5},
        {"enable_prefix_caching": False, "max_num_seqs": 18},
    ],
    ids=["batch 8", "batch 1", "preemption", "chunks", "no prefix cache"],
)
def test_output_equals_plain_decoding(
    make_llm: Callable[..., LLM],
    tiny: TinyModels,
    shape: dict[str, Any],
    seeded: bool,
    options: dict[str, Any],
) -> None:
    prompts = random_prompts(8, seed=41)
    prompts += [dict(p) for p in prompts[:3]]  # prefix hits
    if options.get("max_num_seqs") == 18:
        prompts += random_prompts(8, seed=42)  # more than are expanded together
    params = [
        SamplingParams(
            temperature=0.9 if seeded else 0.0,
            top_p=0.95,
            max_tokens=28,
            ignore_eos=True,
            seed=i if seeded else None,
        )
        for i in range(len(prompts))
    ]
    plain = token_ids(make_llm().generate(prompts, params))
    llm = engine(make_llm, tiny, **options)
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(
            prompts, [p.replace(speculation={"method": "draft_model", **shape}) for p in params]
        )
        assert token_ids(outputs) == plain
        llm.check_integrity()
    steps = [step for o in outputs for step in o.outputs[0].trace or ()]
    accepted = [step.accepted_nodes for step in steps]
    assert len({len(path) for path in accepted}) >= 4, "paths of many lengths"
    assert any(path != tuple(range(len(path))) for path in accepted), "compaction was needed"
    if "num_kv_blocks" in options:
        assert llm.stats().num_preemptions > 0

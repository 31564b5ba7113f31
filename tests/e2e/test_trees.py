"""Random trees through a whole engine: path compaction, tree attention and verification, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from draftwise import LLM, SamplingParams, register_proposer
from draftwise.config import registry
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tree_proposer import oracle_from_outputs, tree_proposer

Draw = Literal["fixed", "independent", "without_replacement"]
DRAWS: list[Draw] = ["fixed", "independent", "without_replacement"]


@pytest.fixture
def register() -> Iterator[Callable[[str, Any], None]]:
    before = dict(registry._registered)
    yield register_proposer
    registry._registered.clear()
    registry._registered.update(before)


def tree_engine(
    make_llm: Callable[..., LLM],
    register: Callable[[str, Any], None],
    wanted: dict[tuple[int, ...], tuple[int, ...]],
    nodes: int = 12,
    **options: Any,
) -> LLM:
    """An engine with one tree drafter per way of drawing, all of which have seen the answers."""
    for draw in DRAWS:
        register(f"tree_{draw}", tree_proposer(oracle_from_outputs(wanted), draw, sharpness=3.0))
    config = [{"method": f"tree_{draw}", "num_speculative_tokens": nodes} for draw in DRAWS]
    return make_llm(speculative_config=config, keep_trace=True, **options)


@pytest.mark.parametrize(("temperature", "seeded"), [(0.0, False), (0.9, True)], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 40, "max_num_seqs": 6}, {"max_num_batched_tokens": 19, "max_num_seqs": 5}],
    ids=["roomy", "preemption", "chunks"],
)
def test_output_equals_plain_decoding(
    make_llm: Callable[..., LLM],
    register: Callable[[str, Any], None],
    temperature: float,
    seeded: bool,
    options: dict[str, Any],
) -> None:
    prompts = random_prompts(9, seed=31)
    params = [
        SamplingParams(
            temperature=temperature, top_p=0.95, max_tokens=30, ignore_eos=True, seed=i if seeded else None
        )
        for i in range(len(prompts))
    ]
    plain = token_ids(make_llm().generate(prompts, params))
    answers = {tuple(p["prompt_token_ids"]): ids for p, ids in zip(prompts, plain, strict=True)}
    llm = tree_engine(make_llm, register, answers, **options)
    for draw in DRAWS:
        outputs = llm.generate(prompts, [p.replace(speculation={"method": f"tree_{draw}"}) for p in params])
        assert token_ids(outputs) == plain, draw
        llm.check_integrity()
        steps = [step for o in outputs for step in o.outputs[0].trace or ()]
        accepted = [step.accepted_nodes for step in steps]
        assert len({len(path) for path in accepted}) >= 4, "paths of many lengths"
        assert any(path and path != tuple(range(len(path))) for path in accepted), "compaction was needed"
    if "num_kv_blocks" in options:
        assert llm.stats().num_preemptions > 0


def test_trees_next_to_chains_and_plain_requests(
    make_llm: Callable[..., LLM], register: Callable[[str, Any], None]
) -> None:
    prompts = random_prompts(8, seed=32)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    plain = token_ids(make_llm().generate(prompts, greedy))
    answers = {tuple(p["prompt_token_ids"]): ids for p, ids in zip(prompts, plain, strict=True)}
    llm = tree_engine(make_llm, register, answers, nodes=63)
    methods = ["tree_fixed", "ngram", "none", "tree_without_replacement"]
    mixed = [greedy.replace(speculation={"method": methods[i % 4]}) for i in range(len(prompts))]
    assert token_ids(llm.generate(prompts, mixed)) == plain


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampling_by_rejection_runs_and_accepts(
    make_llm: Callable[..., LLM], register: Callable[[str, Any], None], draw: Draw, rule: str
) -> None:
    """Distributions are tested at the verifier; here: whole trees reach it, some drafts are kept and some not."""
    prompts = random_prompts(6, seed=33)
    params = SamplingParams(temperature=0.7, max_tokens=30, ignore_eos=True, seed=1)
    guesses = token_ids(make_llm().generate(prompts, params.replace(temperature=0)))
    answers = {tuple(p["prompt_token_ids"]): ids for p, ids in zip(prompts, guesses, strict=True)}
    llm = tree_engine(make_llm, register, answers)
    chosen = params.replace(speculation={"method": f"tree_{draw}", "rule": rule})
    outputs = llm.generate(prompts, chosen)
    counts = [o.metrics.speculation for o in outputs]
    drafted = sum(c.num_draft_tokens for c in counts)
    accepted = sum(c.num_accepted_tokens for c in counts)
    assert 0 < accepted < drafted
    assert all(len(ids) == 30 for ids in token_ids(outputs))

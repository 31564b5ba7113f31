"""Suffix decoding through whole engines: nothing changes but the speed, and repetition is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.propose.lookup.suffix import SuffixProposer
from tests.e2e.conftest import random_prompts, token_ids

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SUFFIX = {"method": "suffix", "num_speculative_tokens": 15}
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]


def proposer_of(llm: LLM) -> SuffixProposer:
    """The engine's own, after a step that carries what finished last."""
    llm.generate([{"prompt_token_ids": [1]}], GREEDY.replace(max_tokens=1, speculation={"method": "none"}))
    engine: Any = llm._engine
    found = engine.core.executor._drafting._proposers["suffix"]
    assert isinstance(found, SuffixProposer)
    return found


def as_tree(llm: LLM) -> None:
    """Let it draft dynamic trees."""
    engine: Any = llm._engine
    engine.core.executor._drafting._proposers["suffix"] = SuffixProposer(tree=True, max_spec_factor=2.0)


@pytest.mark.parametrize("shape", ["chain", "given tree", "dynamic tree"])
@pytest.mark.parametrize(("temperature", "seeded"), [(0.0, False), (0.7, True)], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 40, "max_num_seqs": 6}, {"max_num_batched_tokens": 40, "max_num_seqs": 8}],
    ids=["roomy", "preemption", "chunks"],
)
def test_output_equals_plain_decoding(
    make_llm: Callable[..., LLM], temperature: float, seeded: bool, options: dict[str, Any], shape: str
) -> None:
    prompts = random_prompts(9, seed=51)
    params = [
        SamplingParams(
            temperature=temperature, top_k=8, max_tokens=30, ignore_eos=True, seed=i if seeded else None
        )
        for i in range(len(prompts))
    ]
    plain = token_ids(make_llm().generate(prompts, params))
    config = SUFFIX if shape != "given tree" else {"method": "suffix", "speculative_token_tree": TREE}
    llm = make_llm(speculative_config=config, keep_trace=True, **options)
    if shape == "dynamic tree":
        as_tree(llm)
    for _ in range(2):  # the second time it has seen the answers
        outputs = llm.generate(prompts, params)
        assert token_ids(outputs) == plain
        llm.check_integrity()
    counts = [o.metrics.speculation for o in outputs]
    drafted = sum(c.num_draft_tokens for c in counts)
    accepted = sum(c.num_accepted_tokens for c in counts)
    assert drafted > 100
    assert accepted > 50
    if shape != "chain":
        parents = [step.draft_parents for o in outputs for step in o.outputs[0].trace or ()]
        assert any(p != tuple(range(-1, len(p) - 1)) for p in parents), "some drafts are no chains"
    if "num_kv_blocks" in options:
        assert llm.stats().num_preemptions > 0
        assert proposer_of(llm).num_cached_tokens == 2 * 9 * 30, "a preempted output is there once, all of it"


def test_sampling_by_rejection_accepts_and_rejects(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(speculative_config=SUFFIX)
    params = SamplingParams(temperature=0.8, top_k=4, max_tokens=30, ignore_eos=True)
    for rule in ("rejection", "block"):
        outputs = [
            llm.generate(random_prompts(6, seed=52), params.replace(speculation={"rule": rule}))
            for _ in range(3)
        ]
        counts = [o.metrics.speculation for o in outputs[-1]]
        assert 0 < sum(c.num_accepted_tokens for c in counts) < sum(c.num_draft_tokens for c in counts)


def test_acceptance_after_ten_repeats(make_llm: Callable[..., LLM]) -> None:
    """vLLM's own test: the same requests again and again; acceptance rises and ends over 0.8."""
    llm = make_llm(speculative_config={**SUFFIX, "suffix_decoding_max_spec_factor": 2.0})
    prompts = random_prompts(4, seed=53)
    rates, lengths = [], []
    for _ in range(10):
        counts = [o.metrics.speculation for o in llm.generate(prompts, GREEDY)]
        rates.append(sum(c.num_accepted_tokens for c in counts) / sum(c.num_draft_tokens for c in counts))
        lengths.append(sum(40 / c.num_drafts for c in counts) / len(counts))
    assert rates[-1] > 0.8
    assert rates[-1] >= rates[0]
    assert lengths[-1] > 4, "tokens per step"


def test_drafters_forget_on_request(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(speculative_config=SUFFIX)
    prompts = random_prompts(4, seed=55)
    steps = []
    for _ in range(3):
        before = llm.stats().num_steps
        llm.generate(prompts, GREEDY)
        steps.append(llm.stats().num_steps - before)
        if len(steps) == 2:
            llm.reset_drafters()
    assert steps[0] == steps[2] > steps[1], "as at first, though the second time was quicker"


def test_the_configuration_that_users_bring(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(tensor_parallel_size=1, enforce_eager=True, speculative_config=SUFFIX)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8] * 5}], GREEDY)
    assert set(output.metrics.speculation.steps_by_method) <= {"suffix", "none"}
    assert output.metrics.speculation.num_drafts > 0


def test_always_available_and_free_until_used(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompts = random_prompts(3, seed=54)
    plain = llm.generate(prompts, GREEDY)
    assert proposer_of(llm)._global is None
    asked = llm.generate(prompts, GREEDY.replace(speculation={"method": "suffix"}))
    assert token_ids(asked) == token_ids(plain)
    assert proposer_of(llm).num_cached_tokens == 3 * 40


def test_what_comes_after_a_stop_token_is_not_learned(make_llm: Callable[..., LLM]) -> None:
    """A step may accept drafts behind a stop token; they were never delivered and must not be drafted again."""
    llm = make_llm(speculative_config=SUFFIX)
    prompt = {"prompt_token_ids": [9, 8, 7]}
    (whole,) = llm.generate([prompt], GREEDY)  # learned: the text goes on behind the token that stops below
    text = whole.outputs[0].token_ids
    stop = next(t for i, t in enumerate(text) if i >= 12 and t not in text[:i])
    until = text.index(stop) + 1
    before = proposer_of(llm).num_cached_tokens
    (cut,) = llm.generate([prompt], GREEDY.replace(ignore_eos=False, stop_token_ids=[stop]))
    assert cut.outputs[0].token_ids == text[:until]
    assert proposer_of(llm).num_cached_tokens == before + until


def test_cancelled_requests_leave_nothing_behind(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(speculative_config={**SUFFIX, "suffix_decoding_max_cached_requests": 2})
    for seed in range(4):
        llm.generate(random_prompts(5, seed=seed), GREEDY.replace(max_tokens=6))
    proposer = proposer_of(llm)
    assert proposer.num_cached_requests == 2
    assert not proposer._requests

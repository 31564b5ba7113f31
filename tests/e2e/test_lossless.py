"""Speculation changes nothing but the speed: whole engines, compared with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.fakes.tiny import VOCAB, TinyModels, save_llama

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def drafters(tiny: TinyModels, k: int = 4) -> list[dict[str, Any]]:
    return [
        {"method": "draft_model", "model": tiny.near, "num_speculative_tokens": k},
        {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1},
        {"method": "synthetic", "num_speculative_tokens": k},
    ]


def with_method(params: SamplingParams, method: str, **more: Any) -> SamplingParams:
    return params.replace(speculation={"method": method, **more})


def test_plain_decoding_equals_transformers(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    import transformers

    reference = transformers.LlamaForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    prompts = random_prompts(4, seed=1)
    outputs = make_llm().generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        wanted = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == tuple(wanted[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "roomy"),
        ({"num_kv_blocks": 32, "max_num_seqs": 8}, "preemption"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 8}, "chunked prefill"),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_kv_blocks": 40}, "chunks and preemption"),
        ({"enable_prefix_caching": False, "num_kv_blocks": 32}, "no prefix cache"),
    ],
)
def test_greedy_with_every_method_equals_greedy_without(
    make_llm: Callable[..., LLM], plain_text: PlainText, tiny: TinyModels, options: dict[str, Any], name: str
) -> None:
    prompts = random_prompts(16, seed=2)
    prompts += [dict(p) for p in prompts[:4]]  # prefix hits
    wanted = [plain_text([p], GREEDY)[0] for p in prompts]  # each alone, in an engine of its own
    llm = make_llm(speculative_config=drafters(tiny), **options)
    for method in ("none", "draft_model", "ngram", "synthetic"):
        outputs = llm.generate(prompts, with_method(GREEDY, method))
        assert token_ids(outputs) == wanted, (name, method)
        llm.check_integrity()
        if method != "none":
            assert sum(o.metrics.speculation.num_drafts for o in outputs) > 0
    if "preemption" in name:
        assert llm.stats().num_preemptions > 0
    tree = llm.generate(prompts, with_method(GREEDY, "synthetic", speculative_token_tree=TREE))
    assert token_ids(tree) == wanted
    # Every request with another method, in one batch.
    methods = ["none", "draft_model", "ngram", "synthetic"]
    mixed = [with_method(GREEDY, methods[i % 4]) for i in range(len(prompts))]
    assert token_ids(llm.generate(prompts, mixed)) == wanted


def test_draft_equal_to_target_is_accepted(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    llm = make_llm(
        speculative_config={"method": "draft_model", "model": tiny.target, "num_speculative_tokens": 4}
    )
    prompts = random_prompts(8, seed=3)
    for params in (
        GREEDY,
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True, seed=5),
        SamplingParams(max_tokens=40, ignore_eos=True, speculation={"rule": "block"}),
    ):
        outputs = llm.generate(prompts, params)
        drafted = sum(o.metrics.speculation.num_draft_tokens for o in outputs)
        accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
        assert accepted >= 0.98 * drafted, params


def only_even(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Even tokens after odd ones: what may come depends on the token before."""
    out = logits.clone()
    out[(ids[-1]) % 2 :: 2] = -float("inf")
    return out


LOOKED_AT: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": list(range(5, 50, 3))},
    "biased": {"logit_bias": {7: 5.0, 11: 4.0, 12: -3.0, 30: 6.0}},
    "penalised": {
        "allowed_token_ids": list(range(5, 60)),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
    },
    "processed": {"logits_processors": [only_even]},
}
"""What a drafter looks at between its draws, token by token."""


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_draft_equal_to_target_is_accepted_token_by_token(
    make_llm: Callable[..., LLM], tiny: TinyModels, name: str, rule: str, shape: str
) -> None:
    """Logits of another step, K/V in another place, or a path that is not looked at would hardly ever be accepted."""
    llm = make_llm(
        speculative_config={"method": "draft_model", "model": tiny.target, "num_speculative_tokens": 4},
        speculation_control="static",
    )
    # the first ones of a tree are a chain: where the drafter is right, a path of 3
    tree = {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]} if shape == "tree" else {}
    drawn = {"temperature": 0.0} if rule == "greedy" else {"temperature": 1.0, "top_p": 0.95, "seed": 5}
    speculation = tree if rule == "greedy" else {"rule": rule, **tree}
    params = SamplingParams(
        max_tokens=29, ignore_eos=True, speculation=speculation, **drawn, **LOOKED_AT[name]
    )
    outputs = llm.generate(random_prompts(6, seed=3), params)
    counts = [o.metrics.speculation for o in outputs]
    accepted = sum(c.num_accepted_tokens for c in counts)
    if shape == "chain":
        assert accepted >= 0.98 * sum(c.num_draft_tokens for c in counts)
    else:
        assert accepted >= 0.98 * 3 * sum(c.num_drafts for c in counts)


def test_acceptance_survives_chunks_prefix_hits_and_preemption(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    """A draft model that reads slots nobody filled would still be lossless, but hardly ever right."""
    spec = {"method": "draft_model", "model": tiny.target, "num_speculative_tokens": 3}
    prompts = random_prompts(10, seed=4, low=20)
    for options in (
        {"max_num_batched_tokens": 11, "max_num_seqs": 5},
        {"num_kv_blocks": 30, "max_num_seqs": 6},
    ):
        llm = make_llm(speculative_config=spec, **options)
        # First without drafting, so that the prefix cache holds blocks the drafter never filled.
        llm.generate(prompts, with_method(GREEDY.replace(max_tokens=5), "none"))
        outputs = llm.generate(prompts, GREEDY)
        drafted = sum(o.metrics.speculation.num_draft_tokens for o in outputs)
        accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
        assert drafted > 100
        assert accepted >= 0.98 * drafted, options
        assert llm.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("batch", [1, 8])
def test_coupled_text_depends_on_the_seed_alone(
    make_llm: Callable[..., LLM], tiny: TinyModels, batch: int
) -> None:
    prompts = random_prompts(8, seed=5)
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, ignore_eos=True, seed=i) for i in range(8)
    ]
    wanted = token_ids(make_llm().generate(prompts, params))
    assert wanted != token_ids(
        make_llm().generate(prompts, [p.replace(seed=100 + i) for i, p in enumerate(params)])
    )
    llm = make_llm(speculative_config=drafters(tiny), max_num_seqs=batch)
    for method in ("none", "ngram", "draft_model"):
        for k in range(1, 7) if method != "none" else (0,):
            changed = [with_method(p, method, num_speculative_tokens=k) for p in params]
            assert token_ids(llm.generate(prompts, changed)) == wanted, (method, k)
    changed = [with_method(p, "synthetic", speculative_token_tree=TREE) for p in params]
    assert token_ids(llm.generate(prompts, changed)) == wanted


def everything() -> list[SamplingParams]:
    """Parameters that look at history or change logits, each alone and together, with a seed."""

    def halve_even(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[::2] *= 0.5 if len(ids) % 2 else 0.8
        return logits

    base = SamplingParams(temperature=0.8, max_tokens=24, seed=11, ignore_eos=True)
    return [
        base.replace(repetition_penalty=1.7),
        base.replace(presence_penalty=1.0, frequency_penalty=0.7),
        base.replace(presence_penalty=1, frequency_penalty=1),
        base.replace(min_p=0.1, logit_bias={5: 3.0, 7: -100.0}),
        base.replace(allowed_token_ids=list(range(10, 50)), top_k=12),
        base.replace(logits_processors=[halve_even]),
        base.replace(min_tokens=10, ignore_eos=False, stop_token_ids=list(range(3, 20))),
        base.replace(top_p=0.7, top_k=20, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.4),
        base.replace(temperature=0, repetition_penalty=1.5, logits_processors=[halve_even]),
    ]


def test_all_sampling_parameters_work_with_speculation(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    params = everything()
    prompts = random_prompts(len(params), seed=6)
    wanted = token_ids(make_llm().generate(prompts, params))
    llm = make_llm(speculative_config=drafters(tiny))
    for method in ("draft_model", "ngram"):
        outputs = llm.generate(prompts, [with_method(p, method) for p in params])
        assert token_ids(outputs) == wanted, method
    outputs = llm.generate(
        prompts, [with_method(p, "synthetic", speculative_token_tree=TREE) for p in params]
    )
    assert token_ids(outputs) == wanted


def test_logprobs_equal_those_without_speculation(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    prompts = random_prompts(6, seed=7)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    plain = make_llm().generate(prompts, params)
    llm = make_llm(
        speculative_config=drafters(tiny), max_num_batched_tokens=16, num_kv_blocks=48, max_num_seqs=6
    )
    for method in ("draft_model", "ngram"):
        for a, b in zip(plain, llm.generate(prompts, with_method(params, method)), strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            _equal_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)
            _equal_logprobs(a.prompt_logprobs, b.prompt_logprobs)
            assert len(b.prompt_logprobs or ()) == len(b.prompt_token_ids)


def _equal_logprobs(left: Any, right: Any) -> None:
    assert len(left) == len(right)
    for one, two in zip(left, right, strict=True):
        if one is None:
            assert two is None
            continue
        assert list(one) == list(two)
        for token in one:
            assert one[token].rank == two[token].rank
            assert one[token].logprob == pytest.approx(two[token].logprob, abs=1e-4)


def test_prompt_logprobs_equal_transformers(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    import transformers

    reference = transformers.LlamaForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    prompt = random_prompts(1, seed=8, low=30)[0]
    ids = torch.tensor([prompt["prompt_token_ids"]])
    with torch.no_grad():
        wanted = reference(ids).logits[0].log_softmax(-1)
    output = make_llm(max_num_batched_tokens=8, max_num_seqs=2).generate(
        [prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    )[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for i, token in enumerate(prompt["prompt_token_ids"][1:], 1):
        entry = output.prompt_logprobs[i]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(wanted[i - 1, token]), abs=1e-4)


def test_prompt_logprobs_of_long_chunks_equal_transformers(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """A chunk's logits are made 256 rows at a time."""
    import transformers

    target = save_llama(tmp_path / "long", seed=6, max_position_embeddings=640)
    reference = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = np.random.default_rng(4).integers(3, VOCAB, 530).tolist()
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    for rows in (1024, 300, 256):
        llm = make_llm(model=target, max_num_batched_tokens=rows, max_model_len=600)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        [output] = llm.generate([{"prompt_token_ids": ids}], params)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
        found, best = [], []
        for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            found.append(entry[token].logprob)
            best.append(max(value.logprob for value in entry.values()))
        assert found == pytest.approx(wanted[range(529), ids[1:]].tolist(), abs=1e-4)
        assert best == pytest.approx(wanted[:529].amax(-1).tolist(), abs=1e-4)


def test_samples_of_one_prompt_differ_and_are_reproducible(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    prompt = random_prompts(1, seed=9)
    params = SamplingParams(n=4, temperature=1.0, max_tokens=16, seed=1, ignore_eos=True)
    plain = make_llm().generate(prompt, params)[0]
    llm = make_llm(speculative_config=drafters(tiny))
    spec = llm.generate(prompt, params)[0]
    samples = [o.token_ids for o in plain.outputs]
    assert len(set(samples)) == 4
    assert [o.token_ids for o in spec.outputs] == samples
    assert [o.index for o in spec.outputs] == [0, 1, 2, 3]
    assert llm.generate(prompt, params.replace(n=1))[0].outputs[0].token_ids == samples[0]

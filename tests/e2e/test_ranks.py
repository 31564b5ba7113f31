"""Two processes share a model: every method gives the text of plain decoding, through chunks, prefix hits, preemption
and trees; and logits are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError, RequestError
from draftwise.kernels.select import native_reason
from tests.e2e.conftest import token_ids
from tests.e2e.rank_pairs import OPTIONS, RULES, Pair
from tests.fakes.block import BlockShape, random_weights, save_block
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_target
from tests.fakes.tiny import save_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


METHODS = [case for case in CASES if case[0] == "methods"]


def in_turns(other: int) -> list[Any]:
    """Cases of every method: as a chain and in one form of trees, by turns; --all: in all. ``other``: 0 or 1, which
    form comes first."""
    return [
        pytest.param(
            case,
            id=case_id(case),
            marks=[pytest.mark.slow] if case[2] == ("static", "dynamic")[(i // 3 + other) % 2] else [],
        )
        for i, case in enumerate(METHODS)
    ]


# the other form of trees than where draws are compared
@pytest.mark.parametrize("case", in_turns(1))
def test_every_method_says_what_plain_decoding_says(pair: Pair, case: tuple[str, str, str]) -> None:
    _, method, shape = case
    pair.check(method, shape)


# Tokens of "synthetic" go with a request's number, which is another one in each engine.
@pytest.mark.parametrize(
    "case",
    [case for case in in_turns(0) if case.values[0][1] != "synthetic"],
)
def test_rejection_draws_what_one_process_draws(pair: Pair, case: tuple[str, str, str]) -> None:
    _, method, shape = case
    pair.draw(method, shape)


@pytest.fixture(scope="module")
def one_drafts(pair: Pair) -> Iterator[LLM]:
    """An engine whose drafters are on rank 0 alone."""
    alone = [spec | {"draft_tensor_parallel_size": 1} for spec in pair.family if spec["method"] in ALONE]
    with LLM(
        pair.target, tensor_parallel_size=2, speculative_config=alone, keep_trace=True, **OPTIONS
    ) as made:
        yield made


ALONE = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "dflash", "hybrid")


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        # each method in one shape, by turns; --all: in all
        pytest.param(method, shape, marks=[] if shape == ("chain", "static")[i % 2] else [pytest.mark.slow])
        for i, method in enumerate(ALONE)
        for shape in ("chain", "static", "dynamic")
    ],
)
def test_one_rank_drafts_for_all(pair: Pair, one_drafts: LLM, method: str, shape: str) -> None:
    one_drafts.reset_prefix_cache()
    accepted = 0
    for rule, params in RULES.items():
        asked = [p.replace(speculation={"method": method, **SHAPES[shape]}) for p in params]
        outputs = one_drafts.generate(pair.prompts, asked)
        assert token_ids(outputs) == pair.plain[rule]
        accepted += sum(len(step.accepted_nodes) for o in outputs for step in o.outputs[0].trace or ())
    sampled = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True,
                             speculation={"method": method, "rule": "rejection", **SHAPES[shape]})  # fmt: skip
    one_drafts.generate(pair.prompts[:3], sampled)  # distributions travel, too
    assert accepted > 2 and not one_drafts.stats().drafter_failures
    one_drafts.check_integrity()


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"domino": (6, 8, 0)}, id="domino"),
        # nothing of this head is divided among ranks
        pytest.param({"markov": "gated", "from_root": True}, id="gated", marks=pytest.mark.slow),
    ],
)
def test_block_drafters_draft_what_one_process_drafts(
    pair: Pair, tmp_path: Path, form: dict[str, Any]
) -> None:
    """Domino's unit reads the target's embedding, of which each rank has some rows; a Markov head brings its own."""
    shape = BlockShape(vocab=VOCAB, target_layers=(0, 2), num_target_layers=3, mask=VOCAB - 1, **form)
    if shape.markov:
        shape = replace(shape, form="deepspec")
    folder = save_block(tmp_path / "drafter", shape, random_weights(shape, seed=5, scale=0.15))
    spec = {"method": "dflash", "model": folder, "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    drafts = []
    for size in (1, 2):
        with LLM(
            pair.target, tensor_parallel_size=size, speculative_config=spec, keep_trace=True, **OPTIONS
        ) as llm:
            outputs = llm.generate(pair.prompts[:4], params)
            assert not llm.stats().drafter_failures
        drafts.append([[step.draft_tokens for step in o.outputs[0].trace or ()] for o in outputs])
    assert drafts[0] == drafts[1] and sum(map(len, drafts[0])) > 20


def test_logits_are_those_of_one_process(pair: Pair) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=2
    )
    with LLM(pair.target, **OPTIONS) as alone:
        one = alone.generate(pair.prompts, params)
        assert alone.guarantees.same_bits == (native_reason_of_float32() is None)
    two = pair.llm.generate(pair.prompts, params)
    assert pair.llm.guarantees.same_bits == (native_reason_of_float32() is None)
    compared = 0
    for a, b in zip(one, two, strict=True):
        for mine, theirs in zip(a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=True):
            assert mine.keys() == theirs.keys()
            for token, value in mine.items():
                assert abs(value.logprob - theirs[token].logprob) < 1e-4
                compared += 1
    assert compared >= 7 * 12 * VOCAB


def native_reason_of_float32() -> str | None:
    return native_reason(torch.float32, torch.device("cpu"))


def test_what_cannot_be_divided_is_said_before_anything_is_started(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    with pytest.raises(ConfigError, match="num_attention_heads 4 cannot be divided by 3"):
        LLM(target, tensor_parallel_size=3, **OPTIONS)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 8 tokens are too few for"):
        LLM(make_target(tmp_path / "more", num_attention_heads=16, num_key_value_heads=16, vocab_size=8,
                        hidden_size=64), tensor_parallel_size=16, **OPTIONS)  # fmt: skip
    early = {"method": "early_exit", "draft_tensor_parallel_size": 1}
    with pytest.raises(ConfigError, match="'early_exit' drafts with the target's own layers"):
        LLM(target, tensor_parallel_size=2, speculative_config=early, **OPTIONS)
    with pytest.raises(ConfigError, match="enable_expert_parallel: LlamaForCausalLM has no experts"):
        LLM(target, tensor_parallel_size=2, enable_expert_parallel=True, **OPTIONS)
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        LLM(target, pipeline_parallel_size=2, **OPTIONS)


_WITHOUT_LIBRARY = """
import sys
from draftwise import LLM, SamplingParams
options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64}
params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
prompts = [{"prompt_token_ids": [1, 2, 3, 4]}, {"prompt_token_ids": [5, 6]}]
texts = []
for size in (1, 2):
    with LLM(sys.argv[1], tensor_parallel_size=size, speculative_config={"method": "ngram"}, **options) as llm:
        texts.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
assert texts[0] == texts[1], texts
print("the same")
"""


@pytest.mark.slow
def test_without_native_kernels_sums_go_through_torch_distributed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_LIBRARY, make_target(tmp_path)],
        env=os.environ | {"DRAFTWISE_CPU_LIBRARY": str(tmp_path / "none.so")},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "the same" in done.stdout, done.stderr[-3000:]


def steep(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that ranks can import."""
    return logits * 1.5


def test_functions_of_requests_go_to_the_ranks_if_they_can(pair: Pair) -> None:
    one = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logits_processors=(steep,))
    plain = one.replace(logits_processors=())
    assert token_ids(pair.llm.generate(pair.prompts[:2], one)) == token_ids(
        pair.llm.generate(pair.prompts[:2], plain)
    )
    with pytest.raises(RequestError, match=r"logits_processors: .* cannot be sent to ranks"):
        pair.llm.generate(pair.prompts[:1], one.replace(logits_processors=(lambda ids, logits: logits,)))


SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("", {"quantization": "int8", "dtype": "bfloat16"}),
    "int4": ("", {"quantization": "int4_weight_only", "dtype": "bfloat16"}),
    "steps planned ahead": ("", {"async_scheduling": True}),
    "an int8 cache": ("", {"kv_cache_dtype": "int8"}),
    "an fp8 cache": ("", {"kv_cache_dtype": "fp8"}),
    "experts": ("mixtral", {}),
    "experts by rank": (
        "mixtral",
        {"enable_expert_parallel": True, "quantization": "int8", "dtype": "bfloat16"},
    ),
    "norms over all heads": ("olmoe", {}),
    "put together from a trace": ("gpt_neox", {}),
    "put together, with experts": ("dots1", {}),
    "put together, experts by rank": ("dots1", {"enable_expert_parallel": True}),
    "latent attention": ("deepseek_v3", {"tensor_parallel_size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_other_kinds_of_models_and_engines(tmp_path: Path, name: str) -> None:
    from tests.fakes.architectures import save, small

    kind, options = SLOW[name]
    if kind:
        save(small(kind), tmp_path / "model")
        target, most = str(tmp_path / "model"), 250
    else:
        target, most = save_llama(tmp_path / "model", 3, hidden_size=64, intermediate_size=128), VOCAB
    rng = np.random.default_rng(1)
    prompts = [{"prompt_token_ids": rng.integers(3, most, 20).tolist() * 2} for _ in range(4)]
    drafters = [
        {"method": "draft_model", "model": target, "num_speculative_tokens": 3},
        {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4},
    ]
    base = OPTIONS | {"num_kv_blocks": 48, "tensor_parallel_size": 2, "speculative_config": drafters}
    with LLM(target, **(base | options)) as llm:
        params = SamplingParams(
            temperature=0.0, max_tokens=20, ignore_eos=True, speculation={"method": "none"}
        )
        plain = token_ids(llm.generate(prompts, params))
        for method in ("draft_model", "ngram"):
            found = llm.generate(prompts, params.replace(speculation={"method": method}))
            assert token_ids(found) == plain, method
        assert llm.stats().speculation.num_accepted_tokens > 10
        llm.check_integrity()

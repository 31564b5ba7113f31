"""Self-speculation: the target's first layers draft on the target's own K/V."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, ConfigError, SamplingParams
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels, save_llama

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SPEC = {"method": "early_exit", "num_speculative_tokens": 3, "draft_num_layers": 1}
OPTIONS = [
    {},
    {"num_kv_blocks": 32, "max_num_seqs": 8},  # preemption
    {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_kv_blocks": 40},  # chunks, too
]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target of four layers of which the last two add nothing: its first two say what it says."""
    import transformers

    folder = save_llama(tmp_path_factory.mktemp("shallow") / "target", seed=6, num_hidden_layers=4)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", OPTIONS)
def test_output_is_that_of_plain_decoding(
    make_llm: Callable[..., LLM], tiny: TinyModels, options: dict[str, Any]
) -> None:
    prompts = random_prompts(10, seed=2)
    prompts += [dict(p) for p in prompts[:3]]  # prefix hits
    coupled = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    plain, llm = make_llm(), make_llm(speculative_config=SPEC, **options)
    outputs = llm.generate(prompts, GREEDY)
    assert token_ids(outputs) == token_ids(plain.generate(prompts, GREEDY))
    assert sum(o.metrics.speculation.num_drafts for o in outputs) > 0
    assert token_ids(llm.generate(prompts, coupled)) == token_ids(plain.generate(prompts, coupled))
    for tree in (
        {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
        {"speculative_dynamic_tree": {"top_k": 4, "depth": 4}, "num_speculative_tokens": 8},
    ):
        assert token_ids(llm.generate(prompts, GREEDY.replace(speculation=tree))) == token_ids(outputs)
        seeded = [p.replace(speculation=tree) for p in coupled]
        assert token_ids(llm.generate(prompts, seeded)) == token_ids(plain.generate(prompts, coupled))
    mixed = [GREEDY.replace(speculation={"method": m}) for m in ("early_exit", "ngram", "suffix", "none")] * 4
    assert token_ids(llm.generate(prompts, mixed[: len(prompts)])) == token_ids(outputs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_say_what_the_target_says_are_accepted(
    make_llm: Callable[..., LLM], shallow: str, options: dict[str, Any], dtype: str
) -> None:
    """Nothing is caught up, so any slot the drafter reads wrongly shows: in chunks, prefix hits, preemptions, after
    steps without drafting and behind accepted trees."""
    llm = make_llm(model=shallow, dtype=dtype, speculative_config=[SPEC | {"draft_num_layers": 2}], **options)
    prompts = random_prompts(8, seed=3, low=12)
    llm.generate(prompts, GREEDY.replace(max_tokens=5, speculation={"method": "none"}))
    llm.generate(
        prompts, GREEDY.replace(speculation={"method": "suffix", "speculative_token_tree": [[0], [1]]})
    )
    for params in (
        GREEDY,
        GREEDY.replace(temperature=0.8),
        GREEDY.replace(temperature=0.8, seed=3),
        GREEDY.replace(speculation={"num_speculative_tokens": 1}),
        GREEDY.replace(speculation={"speculative_token_tree": [[0], [0, 0], [0, 0, 0]]}),
    ):
        outputs = llm.generate(prompts, params)
        drafted = sum(o.metrics.speculation.num_draft_tokens for o in outputs)
        accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
        assert drafted > 60, "drafts get the rows that others leave"
        assert accepted >= 0.97 * drafted, params


def test_first_layers_are_those_of_the_model(tiny: TinyModels) -> None:
    """Hidden states and logits against the Transformers model with its last layer taken away."""
    import transformers

    reference = transformers.LlamaForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    reference.model.layers = reference.model.layers[:1]
    model = load_model(tiny.target, dtype=torch.float32, device=torch.device("cpu"))
    part = model.first_layers(1)
    assert part.config.num_layers == 1 and model.config.num_layers == 2
    kv = KVStorage(model.kv_layout(), 4, 8, torch.float32, torch.device("cpu"))
    ids = list(range(5, 25))
    with torch.inference_mode():
        table = np.arange(4, dtype=np.int32)
        batch = build_step_input([RowInput(ids, 0, table)], 8, torch.device("cpu"))
        whole = model.forward(batch, kv).hidden.clone()
        stored = [t.clone() for i in range(2) for t in kv.layer(i)]
        _, logits = part.forward_logits(batch, kv)
        wanted = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    # It wrote what the whole model had written, bit for bit, and the whole model still works.
    assert all(
        torch.equal(a, b) for a, b in zip(stored, [t for i in range(2) for t in kv.layer(i)], strict=True)
    )
    assert torch.equal(model.forward(batch, kv).hidden, whole)


def test_what_cannot_work_is_refused(make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="draft_num_layers: 2 layers would draft for a target of 2; at most 1"
    ):
        make_llm(speculative_config=SPEC | {"draft_num_layers": 2})
    with pytest.raises(ConfigError, match="two layers or more"):
        make_llm(model=tiny.far, speculative_config={"method": "early_exit"})
    with pytest.raises(ConfigError, match="draft_num_layers: only for method 'early_exit'"):
        make_llm(speculative_config={"method": "ngram", "draft_num_layers": 1})
    with pytest.raises(ConfigError, match="contradicts method 'early_exit'"):
        make_llm(speculative_config={"method": "early_exit", "model": tiny.near})
    assert make_llm(speculative_config={"method": "layerskip"}).config.default_method == "early_exit"

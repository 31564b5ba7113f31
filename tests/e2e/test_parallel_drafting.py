"""Draft models that fill in mask tokens, and draft models with another vocabulary: whole engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftwise import LLM, ConfigError, SamplingParams
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import VOCAB, TinyModels, save_llama

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MASK = VOCAB - 1


@pytest.fixture(scope="module")
def pard(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pard") / "model"
    shutil.copytree(tiny.near, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return str(folder)


def spec(model: str, k: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model", "model": model, "num_speculative_tokens": k, "parallel_drafting": True, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 1},
        {"num_kv_blocks": 32, "max_num_seqs": 8},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    ],
)
def test_parallel_drafts_change_nothing(
    make_llm: Callable[..., LLM], tiny: TinyModels, pard: str, options: dict[str, Any]
) -> None:
    prompts = random_prompts(8, seed=2)
    coupled = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, ignore_eos=True, seed=i) for i in range(8)
    ]
    plain, llm = make_llm(), make_llm(speculative_config=spec(pard), **options)
    outputs = llm.generate(prompts, GREEDY)
    assert token_ids(outputs) == token_ids(plain.generate(prompts, GREEDY))
    assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 0
    assert token_ids(llm.generate(prompts, coupled)) == token_ids(plain.generate(prompts, coupled))
    rejection = SamplingParams(max_tokens=20, ignore_eos=True, speculation={"rule": "block"}, min_p=0.01)
    assert sum(o.metrics.speculation.num_drafts for o in llm.generate(prompts, rejection)) > 0


def test_drafts_are_the_argmax_behind_root_and_masks(
    make_llm: Callable[..., LLM], tiny: TinyModels, pard: str
) -> None:
    """Against the Transformers model: the first draft of every step, mask by mask, after steps of all lengths."""
    import transformers

    reference = transformers.LlamaForCausalLM.from_pretrained(pard, dtype=torch.float32)
    llm = make_llm(speculative_config=spec(pard, 3), keep_trace=True, max_num_batched_tokens=16)
    checked = 0
    for prompt, output in zip(
        prompts := random_prompts(4, seed=5, low=20), llm.generate(prompts, GREEDY), strict=True
    ):
        text = list(prompt["prompt_token_ids"])
        for step in output.outputs[0].trace or ():
            if step.draft_tokens:
                with torch.inference_mode():
                    logits = reference(torch.tensor([[*text, MASK, MASK]])).logits[0, -3:]
                wanted = logits.argmax(-1).tolist()
                assert list(step.draft_tokens) == wanted[: len(step.draft_tokens)]
                checked += len(step.draft_tokens)
            text += step.token_ids
    assert checked > 100


def test_what_cannot_work_is_refused(make_llm: Callable[..., LLM], tiny: TinyModels, pard: str) -> None:
    with pytest.raises(ConfigError, match="names no mask token"):
        make_llm(speculative_config=spec(tiny.near))
    with pytest.raises(ConfigError, match="speculative_token_tree: parallel_drafting drafts chains"):
        make_llm(speculative_config=spec(pard, 2, speculative_token_tree=[[0], [1]]))
    with pytest.raises(ConfigError, match="parallel_drafting: only for method 'draft_model'"):
        make_llm(speculative_config={"method": "ngram", "parallel_drafting": True})
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab: needs the target's tokenizer"):
        other = {"method": "draft_model", "model": tiny.other_vocab, "use_heterogeneous_vocab": True}
        make_llm(speculative_config=other)


# ------------------------------------------------------------------------------------ another vocabulary


def _save_tokenizer(folder: str, words: list[str]) -> None:
    import tokenizers
    import transformers

    vocabulary = {"<unk>": 0} | {word: i + 1 for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(
        folder
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and the same model with its words in another order: the last ten of them missing, five others there."""
    import transformers

    root = tmp_path_factory.mktemp("pair")
    target = save_llama(root / "target", seed=3)
    words = [f"w{i}" for i in range(1, VOCAB)]
    _save_tokenizer(target, words)
    model = transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    order = torch.cat(
        [torch.tensor([0]), 1 + torch.randperm(VOCAB - 11, generator=torch.Generator().manual_seed(0))]
    )
    draft = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**(model.config.to_dict() | {"vocab_size": VOCAB - 5}))
    )
    state = dict(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.randn(VOCAB - 5, state[name].shape[1], generator=torch.Generator().manual_seed(1)) * 0.2
        rows[: len(order)] = state[name][order]
        state[name] = rows
    draft.load_state_dict(state)
    draft.save_pretrained(root / "draft")
    _save_tokenizer(
        str(root / "draft"), [words[i - 1] for i in order[1:].tolist()] + [f"x{i}" for i in range(5)]
    )
    return target, str(root / "draft")


def test_a_draft_model_of_another_vocabulary(make_llm: Callable[..., LLM], pair: tuple[str, str]) -> None:
    target, draft = pair
    config = {
        "method": "draft_model", "model": draft, "num_speculative_tokens": 3, "use_heterogeneous_vocab": True,
    }  # fmt: skip
    prompts = random_prompts(8, seed=6, low=10)
    plain = make_llm(model=target)
    with pytest.raises(ConfigError, match=r"must be the same \(or use_heterogeneous_vocab"):
        make_llm(model=target, speculative_config=config | {"use_heterogeneous_vocab": False})
    llm = make_llm(model=target, speculative_config=config, skip_tokenizer_init=False)
    coupled = GREEDY.replace(temperature=0.9, seed=3)
    for params in (GREEDY, coupled):
        outputs = llm.generate(prompts, params)
        assert token_ids(outputs) == token_ids(plain.generate(prompts, params))
        drafted = sum(o.metrics.speculation.num_draft_tokens for o in outputs)
        accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
        assert 0 < accepted < 0.5 * drafted  # right unless it lacks the token, or read one that it lacks
    # Where only shared tokens are said, the two are the same model.
    shared = [
        {"prompt_token_ids": [t if t < VOCAB - 10 else 3 for t in p["prompt_token_ids"]]} for p in prompts
    ]
    for params in (GREEDY, coupled, GREEDY.replace(temperature=0.7)):
        outputs = llm.generate(shared, params.replace(allowed_token_ids=list(range(1, VOCAB - 10))))
        drafted = sum(o.metrics.speculation.num_draft_tokens for o in outputs)
        assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 0.97 * drafted > 50
    for more in (
        {"rule": "rejection"},
        {"speculative_token_tree": [[0], [1], [0, 0]]},
        {"speculative_dynamic_tree": True, "num_speculative_tokens": 6},
    ):
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, speculation=more)
        outputs = llm.generate(prompts, params)
        assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 0
    tree = {"speculative_token_tree": [[0], [1], [0, 0]]}
    assert token_ids(llm.generate(prompts, GREEDY.replace(speculation=tree))) == token_ids(
        plain.generate(prompts, GREEDY)
    )

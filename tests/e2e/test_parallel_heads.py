"""P-EAGLE heads in whole engines: the same text as plain decoding, and the very drafts of the head with its masks over
the whole text at once. What a mask row left in the cache and a token's row did not overwrite would show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftwise import LLM, ConfigError, SamplingParams
from draftwise.errors import RequestError
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.e2e.test_heads import EAGLE3, OPTIONS, Target, check_drafts, greedy
from tests.fakes.heads import ReferenceHead, random_weights, save_head
from tests.fakes.tiny import VOCAB, TinyModels

K = 4
SHAPES = {
    "one layer": replace(EAGLE3, mask_token=VOCAB - 1),
    "two layers": replace(
        EAGLE3, mask_token=2, layers=2, norm_before_residual=True, norm_before_fc=True, draft_vocab=None
    ),
}
Heads = dict[str, tuple[str, ReferenceHead]]


@pytest.fixture(scope="module")
def target(tiny: TinyModels) -> Target:
    return Target(tiny.target)


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Name -> (folder, reference) of random heads."""
    found = {}
    for name, shape in SHAPES.items():
        weights = random_weights(shape, seed=5)
        folder = save_head(tmp_path_factory.mktemp("heads") / "head", shape, weights)
        found[name] = (folder, ReferenceHead(shape, weights, target.embedding, target.output))
    return found


def engine(
    make_llm: Callable[..., LLM], folder: str, spec: dict[str, Any] | None = None, **options: Any
) -> LLM:
    config = {"model": folder, "num_speculative_tokens": K, **(spec or {})}
    return make_llm(speculative_config=config, speculation_control="static", keep_trace=True, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param(
            options,
            name,
            id=f"{place}-{name}",
            # each place with every other form, in turns; --all: with all
            marks=[pytest.mark.slow] if (i + j) % 2 else [],
        )
        for i, (place, options) in enumerate(OPTIONS.items())
        for j, name in enumerate(SHAPES)
    ],
)
def test_drafts_are_those_over_the_whole_text(
    make_llm: Callable[..., LLM],
    plain_text: PlainText,
    target: Target,
    heads: Heads,
    name: str,
    options: dict[str, Any],
) -> None:
    folder, reference = heads[name]
    prompts = random_prompts(7, seed=51)
    prompts += [dict(prompts[0]), {"prompt_token_ids": prompts[1]["prompt_token_ids"][:-3]}]
    plain = plain_text(prompts, greedy(24))
    llm = engine(make_llm, folder, **options)
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, greedy(24))
        assert token_ids(outputs) == plain
        for prompt, output in zip(prompts, outputs, strict=True):
            check_drafts(target, reference, prompt["prompt_token_ids"], output.outputs[0])
    if options.get("num_kv_blocks") == 44:
        assert llm.stats().num_preemptions > 0
    llm.check_integrity()


def test_a_prefix_of_another_method_leaves_a_gap(
    make_llm: Callable[..., LLM], target: Target, heads: Heads
) -> None:
    folder, reference = heads["one layer"]
    llm = engine(make_llm, folder)
    prompt = random_prompts(1, seed=53, low=30)[0]["prompt_token_ids"]
    llm.generate([{"prompt_token_ids": prompt}], greedy(1, speculation={"method": "none"}))
    for more in ([3, 4, 5], [6, 7, 8]):
        longer = [*prompt, *more]
        output = llm.generate([{"prompt_token_ids": longer}], greedy(14))[0]
        assert output.num_cached_tokens >= len(prompt) - 3
        check_drafts(target, reference, longer, output.outputs[0], first=output.num_cached_tokens + 1)


def test_steps_with_changing_numbers_of_drafts(
    make_llm: Callable[..., LLM], target: Target, heads: Heads
) -> None:
    """Masks lie further out in some steps than in others, and in some there are none."""
    folder, reference = heads["two layers"]
    ranges = [[1, 1, K], [2, 2, 1], [3, 64, 0]]
    llm = engine(make_llm, folder, {"num_speculative_tokens_per_batch_size": ranges})
    prompts = random_prompts(4, seed=54, high=30)
    params = [greedy(n) for n in (70, 60, 12, 50)]
    outputs = llm.generate(prompts, params)
    assert token_ids(outputs) == token_ids(make_llm().generate(prompts, params))
    for prompt, output in zip(prompts[:2], outputs, strict=False):
        assert len({len(step.draft_tokens) for step in output.outputs[0].trace or ()}) >= 2
        check_drafts(target, reference, prompt["prompt_token_ids"], output.outputs[0], least=2)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sequences", [1, 8])
def test_seeded_text_equals_plain_decoding(
    make_llm: Callable[..., LLM], heads: Heads, name: str, sequences: int
) -> None:
    prompts = random_prompts(6, seed=55)
    params = [
        SamplingParams(
            temperature=0.8 * (i % 3 > 0), top_p=0.9, max_tokens=20, ignore_eos=True, seed=i,
            frequency_penalty=0.4 * (i > 3),
        )
        for i in range(6)
    ]  # fmt: skip
    plain = token_ids(make_llm().generate(prompts, params))
    llm = engine(make_llm, heads[name][0], max_num_seqs=sequences, num_kv_blocks=60)
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert token_ids(outputs) == plain
    assert sum(o.metrics.speculation.num_draft_tokens for o in outputs) > 100


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_drafts_come_from_the_heads_distribution(
    make_llm: Callable[..., LLM], heads: Heads, rule: str
) -> None:
    folder, reference = heads["one layer"]
    llm = engine(make_llm, folder, {"rejection_sample_method": rule})
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=3)
    outputs = llm.generate(random_prompts(6, seed=56), params)
    drafted = {t for o in outputs for step in o.outputs[0].trace or () for t in step.draft_tokens}
    assert len(drafted) > 20 and drafted <= set(reference.target_ids.tolist())


def test_accepted_drafts_take_the_places_of_masks(
    make_llm: Callable[..., LLM], target: Target, heads: Heads
) -> None:
    """With three tokens to choose from many drafts are accepted, and every one has its own K/V afterwards."""
    folder, reference = heads["two layers"]
    allowed = [9, 20, 31]
    llm = engine(make_llm, folder)
    prompts = random_prompts(4, seed=57, low=10)
    accepted = [0] * K
    for prompt, output in zip(
        prompts, llm.generate(prompts, greedy(40, allowed_token_ids=allowed)), strict=True
    ):
        tokens = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        features = reference.combine(target.states(tokens))
        end = len(prompt["prompt_token_ids"])
        for step in output.outputs[0].trace or ():
            if step.draft_tokens:
                logits = reference.masked_logits(tokens[:end], features[: end - 1], len(step.draft_tokens))
                wanted = [allowed[i] for i in logits[:, allowed].argmax(dim=-1).tolist()]
                assert list(step.draft_tokens) == wanted, f"behind {end} tokens"
                for depth in range(len(step.token_ids) - 1):
                    accepted[depth] += 1
            end += len(step.token_ids)
    assert accepted[1] > 5, "drafts of masks, too"


def test_trees_are_refused(make_llm: Callable[..., LLM], heads: Heads) -> None:
    folder, _ = heads["one layer"]
    with pytest.raises(ConfigError, match="speculative_dynamic_tree: parallel_drafting drafts chains"):
        engine(make_llm, folder, {"speculative_dynamic_tree": True})
    llm = engine(make_llm, folder)
    for more in ({"speculative_token_tree": [[0], [1]]}, {"speculative_dynamic_tree": True}):
        with pytest.raises(RequestError, match="tree"):
            llm.generate(random_prompts(1, seed=1), greedy(4, speculation=more))

"""Trees drafted by models: static and dynamic ones, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError, RequestError
from draftwise.propose.heads import proposer as heads
from draftwise.propose.models import proposer as models
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.tiny import VOCAB, TinyModels

TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]
STATIC: dict[str, Any] = {"speculative_token_tree": TREE}
DYNAMIC: dict[str, Any] = {
    "speculative_dynamic_tree": {"top_k": 4, "depth": 5},
    "num_speculative_tokens": 12,
}
STEADY: dict[str, Any] = {"speculation_control": "static", "keep_trace": True}
SHAPES = pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])


def engine(make_llm: Callable[..., LLM], tiny: TinyModels, **options: Any) -> LLM:
    return make_llm(
        speculative_config={"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 4},
        **STEADY,
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
    plain_text: PlainText,
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
    plain = plain_text(prompts, params)
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


def test_requests_of_every_shape_share_a_batch(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    prompts = random_prompts(10, seed=43)
    kinds: list[dict[str, Any]] = [
        {"method": "draft_model", **STATIC},
        {"method": "draft_model", **DYNAMIC},
        {"method": "draft_model", "num_speculative_tokens": 3},
        {"method": "ngram"},
        {"method": "none"},
        {"method": "draft_model", "speculative_dynamic_tree": True},
        {"method": "draft_model", "speculative_token_tree": [[0], [1]]},
        {
            "method": "draft_model",
            "speculative_dynamic_tree": {"top_k": 32, "depth": 3},
            "num_speculative_tokens": 63,
        },
    ]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=25,
            ignore_eos=True,
            repetition_penalty=1.1 if i == 5 else 1.0,
        )
        for i in range(10)
    ]
    plain = token_ids(make_llm().generate(prompts, params))
    llm = engine(make_llm, tiny)
    for turn in range(3):
        mixed = [p.replace(speculation=kinds[(i + turn) % len(kinds)]) for i, p in enumerate(params)]
        assert token_ids(llm.generate(prompts, mixed)) == plain


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 50, "max_num_seqs": 5}, {"num_kv_blocks": 36, "max_num_seqs": 6}],
    ids=["roomy", "chunks", "preemption"],
)
def test_a_drafter_that_is_the_target_is_right_on_every_level(
    make_llm: Callable[..., LLM], tiny: TinyModels, seeded: bool, options: dict[str, Any]
) -> None:
    """Would show a drafter that reads slots nobody filled, or other nodes' K/V: the first path of the tree is the
    target's own text."""
    llm = make_llm(
        speculative_config={"method": "draft_model", "model": tiny.target, **STATIC},
        **STEADY,
        **options,
    )
    prompts = random_prompts(8, seed=44, low=20)
    params = [
        SamplingParams(
            temperature=0.9 if seeded else 0.0, max_tokens=41, ignore_eos=True, seed=i if seeded else None
        )
        for i in range(8)
    ]
    # First without drafting, so that the prefix cache holds blocks the drafter never filled.
    llm.generate(prompts, [p.replace(max_tokens=5, speculation={"method": "none"}) for p in params])
    outputs = llm.generate(prompts, params)
    steps = [step for o in outputs for step in o.outputs[0].trace or () if step.draft_tokens]
    depth = [max(_depths(step.draft_parents)) for step in steps]
    accepted = [len(step.accepted_nodes) for step in steps]
    assert max(depth) == 4 and len(steps) > 30
    assert sum(accepted) >= 0.98 * sum(depth)
    if "num_kv_blocks" in options:
        assert llm.stats().num_preemptions > 0


def _depths(parents: tuple[int, ...]) -> list[int]:
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def test_trees_accept_more_than_chains_of_the_same_depth(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    llm = engine(make_llm, tiny)
    prompts = random_prompts(8, seed=45)
    lengths = {}
    for name, shape in {
        "chain": {"num_speculative_tokens": 4},
        "static": STATIC,
        "dynamic": {"speculative_dynamic_tree": {"top_k": 4, "depth": 4}, "num_speculative_tokens": 16},
    }.items():
        params = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, speculation={"method": "draft_model", **shape}
        )
        counts = [o.metrics.speculation for o in llm.generate(prompts, params)]
        lengths[name] = sum(c.num_accepted_tokens for c in counts) / sum(c.num_drafts for c in counts)
    assert lengths["chain"] < lengths["static"] < lengths["dynamic"] < 4


def test_near_the_end_and_the_model_length(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    """Trees get shallow where few tokens may come, and end with the drafter's context."""
    prompts = random_prompts(4, seed=46, low=100, high=150)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    plain = token_ids(make_llm(max_model_len=170).generate(prompts, params))
    llm = make_llm(
        max_model_len=170,
        speculative_config={"method": "draft_model", "model": tiny.near, "max_model_len": 160},
        **STEADY,
    )
    for shape in (STATIC, DYNAMIC):
        outputs = llm.generate(prompts, params.replace(speculation={"method": "draft_model", **shape}))
        assert token_ids(outputs) == plain
        assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
        depths = [
            max(_depths(step.draft_parents))
            for o in outputs
            for step in o.outputs[0].trace or ()
            if step.draft_tokens
        ]
        assert min(depths) < max(depths) <= (4 if shape is STATIC else 5)
        assert all(not (o.outputs[0].trace or ())[-1].draft_tokens for o in outputs), (
            "past the drafter's context"
        )


def test_what_is_wrong_with_a_tree_is_said_by_name(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    llm = engine(make_llm, tiny)
    prompt = random_prompts(1)
    for speculation, words in (
        ({"speculative_dynamic_tree": {"top_k": 20, "depth": 7}}, "at most 64"),
        ({"speculative_dynamic_tree": {"topk": 3}}, "did you mean 'top_k'"),
        (
            {"speculative_dynamic_tree": True, "speculative_token_tree": [[0]]},
            "contradicts speculative_token_tree",
        ),
        ({"speculative_dynamic_tree": True, "num_speculative_tokens": 64}, "from 0 to 63"),
        ({"method": "ngram", "speculative_dynamic_tree": True}, "no trees for speculative_dynamic_tree"),
    ):
        params = SamplingParams(speculation={"method": "draft_model", **speculation})
        with pytest.raises(RequestError, match=words):
            llm.generate(prompt, params)
    with pytest.raises(ConfigError, match=r"speculative_dynamic_tree.*'ngram' drafts no dynamic trees"):
        make_llm(speculative_config={"method": "ngram", "speculative_dynamic_tree": True})


def test_a_request_overrides_the_tree_of_the_configuration(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    llm = make_llm(speculative_config={"method": "draft_model", "model": tiny.near, **DYNAMIC}, **STEADY)
    prompt = random_prompts(1, seed=47)

    def most(**speculation: Any) -> tuple[int, bool]:
        """Nodes of the largest tree, and whether all of them are chains."""
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=speculation)
        trace = llm.generate(prompt, params)[0].outputs[0].trace or ()
        chains = all(step.draft_parents == tuple(range(-1, len(step.draft_parents) - 1)) for step in trace)
        return max(len(step.draft_tokens) for step in trace), chains

    assert most() == (12, False)
    assert most(num_speculative_tokens=5) == (5, False)
    assert most(**STATIC) == (9, False)
    assert most(speculative_dynamic_tree=False, num_speculative_tokens=3) == (3, True)
    assert most(speculative_dynamic_tree={"top_k": 2, "depth": 3}, num_speculative_tokens=20) == (10, False)


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_the_native_expansion_drafts_the_same_trees(
    make_llm: Callable[..., LLM],
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
) -> None:
    """One native call against level by level in Python, for every way of choosing children that it knows."""
    model = tiny.near
    if method != "draft_model":
        more: dict[str, Any] = {"feature_layers": (0, 1, 2), "draft_vocab": 47} if method == "eagle3" else {}
        shape = HeadShape(method, 32, 32, VOCAB, **more)
        model = save_head(tmp_path / method, shape, random_weights(shape, seed=5))
    llm = make_llm(
        speculative_config={"method": method, "model": model, "num_speculative_tokens": 4}, **STEADY
    )
    prompts = random_prompts(6, seed=48)
    large = {"speculative_dynamic_tree": {"top_k": 9, "depth": 7}, "num_speculative_tokens": 60}

    def drafted() -> list[Any]:
        out = []
        for shape in (STATIC, DYNAMIC, large):
            params = [
                SamplingParams(
                    temperature=0.7 * (i % 3),
                    seed=i,
                    max_tokens=25,
                    ignore_eos=True,
                    speculation={"method": method, "rule": ("coupled", "rejection")[i // 3], **shape},
                )
                for i in range(6)
            ]
            llm.reset_prefix_cache()
            outputs = llm.generate(prompts, params)
            out.append(
                [[(s.draft_tokens, s.draft_parents) for s in o.outputs[0].trace or ()] for o in outputs]
            )
        return out

    at_once = drafted()
    calls = 0

    def refuse(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1

    for ways in ("native_draws", "forest_draws"):
        monkeypatch.setattr(models if method == "draft_model" else heads, ways, refuse)
    assert drafted() == at_once
    assert calls > 10

"""Block drafters of all families: drafts are those of the papers' models over the whole text, in every published form,
whatever was cached, cut or preempted; text is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError, ModelLoadError
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.e2e.test_heads import OPTIONS, Target
from tests.fakes.block import BlockShape, ReferenceBlock, random_weights, save_block
from tests.fakes.tiny import VOCAB, TinyModels

FORMS = {
    "z-lab": BlockShape(vocab=VOCAB),
    "windows": BlockShape(vocab=VOCAB, layers=3, windows=(6, 6, None)),
    "windows, not causal": BlockShape(vocab=VOCAB, windows=(9, 9), causal=False, scale=0.7, softcap=3.0),
    "jetspec": BlockShape(vocab=VOCAB, causal=True),
    "one layer": BlockShape(vocab=VOCAB, layers=1, windows=(None,), target_layers=(1,)),
    "deepspec": BlockShape(
        "deepspec", vocab=VOCAB, from_root=True, own=True, target_layers=(-1, 1), softcap=3.0
    ),
    "dspark": BlockShape("deepspec", vocab=VOCAB, from_root=True, own=True, markov="vanilla"),
    "dspark, gated": BlockShape("deepspec", vocab=VOCAB, from_root=True, own=True, markov="gated"),
    "dspark, rnn": BlockShape("deepspec", vocab=VOCAB, from_root=True, own=True, markov="rnn"),
    "speculators": BlockShape("speculators", vocab=VOCAB, own=True, draft_vocab=47),
    "speculators, dspark": BlockShape(
        "speculators", vocab=VOCAB, own=True, draft_vocab=47, from_root=True, markov="vanilla"
    ),
    "dflash2": BlockShape(vocab=VOCAB, windows=(9, 9), selector=(6, 5), conv=(2, 8)),
    "dflash2, speculators": BlockShape(
        "speculators", vocab=VOCAB, windows=(None, 9), selector=(4, 3), conv=(3, 4), layers=2
    ),
    "domino": BlockShape(vocab=VOCAB, domino=(7, 5, 1)),
    "domino, from the root": BlockShape(vocab=VOCAB, domino=(6, 8, 0), from_root=True),
    "domino, speculators": BlockShape("speculators", vocab=VOCAB, own=True, draft_vocab=47, domino=(6, 8, 0)),
}
K = 4


class Remembering(ReferenceBlock):
    """The paper's model takes longest of all; what it drafts behind a text is the same in every test."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def draft(self, tokens: list[int], features: torch.Tensor, count: int) -> list[int]:
        assert count == K
        drafts = self._known.get(tuple(tokens))
        if drafts is None:
            drafts = self._known[tuple(tokens)] = super().draft(tokens, features, count)
        return drafts


@pytest.fixture(scope="module")
def target(tiny: TinyModels) -> Target:
    return Target(tiny.target)


@pytest.fixture(scope="module")
def drafters(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, ReferenceBlock]]:
    root = tmp_path_factory.mktemp("blocks")
    found = {}
    for i, (name, shape) in enumerate(FORMS.items()):
        weights = random_weights(shape, seed=i + 3)
        folder = save_block(root / f"drafter-{i}", shape, weights)
        found[name] = (folder, Remembering(shape, weights, target.embedding, target.output))
    return found


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def engine(make_llm: Callable[..., LLM], folder: str, **options: Any) -> LLM:
    spec = {"model": folder, **options.pop("spec", {"num_speculative_tokens": K})}
    return make_llm(speculative_config=spec, speculation_control="static", keep_trace=True, **options)


def check_drafts(target: Target, drafter: ReferenceBlock, prompt: list[int], output: Any) -> int:
    """Compare the first steps' drafts and some more; returns how many."""
    tokens = [*prompt, *output.token_ids]
    features = drafter.features(target.states(tokens))
    end, checked = len(prompt), 0
    for step in output.trace:
        if step.draft_tokens and (checked < 3 or end % 3 == 0):
            # a block has always room for K, whatever is wanted of it
            wanted = drafter.draft(tokens[:end], features[: end - 1], K)[: len(step.draft_tokens)]
            assert list(step.draft_tokens) == wanted, f"behind {end} tokens"
            checked += 1
        end += len(step.token_ids)
    return checked


# Places and forms are independent: one form in every place, each form in one of these two; --all: another form in every
# place, too, and each form in both.
EVERYWHERE = ("z-lab", "dspark, rnn")
FOR_ALL = ("chunks", "preemption")


@pytest.mark.parametrize(
    ("options", "form"),
    [
        pytest.param(
            options,
            form,
            marks=[] if form == EVERYWHERE[0] or options == FOR_ALL[i % 2] else [pytest.mark.slow],
        )
        for options in OPTIONS
        for i, form in enumerate(FORMS)
        if form in EVERYWHERE or options in FOR_ALL
    ],
)
def test_drafts_are_those_over_the_whole_text(
    make_llm: Callable[..., LLM],
    plain_text: PlainText,
    target: Target,
    drafters: dict[str, tuple[str, ReferenceBlock]],
    form: str,
    options: str,
) -> None:
    folder, reference = drafters[form]
    prompts = random_prompts(7, seed=51)
    prompts += [dict(prompts[0]), {"prompt_token_ids": prompts[1]["prompt_token_ids"][:-3]}]
    plain = plain_text(prompts, greedy(24))
    llm = engine(make_llm, folder, **OPTIONS[options])
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, greedy(24))
        assert token_ids(outputs) == plain
        checked = [
            check_drafts(target, reference, prompt["prompt_token_ids"], output.outputs[0])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        assert min(checked) >= 1 and sum(checked) >= 2 * len(checked), "nothing was compared"
    if options == "preemption":
        assert llm.stats().num_preemptions > 0
    assert not llm.stats().drafter_failures


def test_features_are_what_it_drafts_from(
    make_llm: Callable[..., LLM], target: Target, drafters: dict[str, tuple[str, ReferenceBlock]]
) -> None:
    """The control: a drafter whose features are lost drafts something else, and is seen."""
    folder, reference = drafters["z-lab"]
    llm = engine(make_llm, folder)
    drafting: Any = llm._engine.core.executor._drafting  # type: ignore[union-attr]
    head = drafting._proposers["dflash"]._passes.head
    combine = head.combine
    head.combine = lambda output, rows: torch.zeros_like(combine(output, rows))
    prompt = random_prompts(1, seed=3)[0]
    output = llm.generate([prompt], greedy(24))[0].outputs[0]
    with pytest.raises(AssertionError, match="behind"):
        check_drafts(target, reference, prompt["prompt_token_ids"], output)


@pytest.mark.parametrize(
    "form",
    [
        "z-lab",
        pytest.param("dspark", marks=pytest.mark.slow),  # as the next two, in parts
        "dspark, rnn",
        "speculators, dspark",
        "dflash2",
        "domino",
    ],
)
def test_nodes_of_a_tree_are_the_blocks_best(
    make_llm: Callable[..., LLM],
    plain_text: PlainText,
    target: Target,
    drafters: dict[str, tuple[str, ReferenceBlock]],
    form: str,
) -> None:
    """A static tree: rank r below a path is the r-th best token of that place, given the path."""
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
    folder, reference = drafters[form]
    llm = engine(make_llm, folder, spec={"speculative_token_tree": paths})
    prompts = random_prompts(4, seed=8)
    plain = plain_text(prompts, greedy(20))
    outputs = llm.generate(prompts, greedy(20))
    assert token_ids(outputs) == plain
    checked = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        features = reference.features(target.states(tokens))
        end = len(prompt["prompt_token_ids"])
        for step in output.outputs[0].trace or ():
            if len(step.draft_tokens) == len(paths):
                found: dict[tuple[int, ...], int] = {}
                on_path: list[tuple[int, ...]] = []
                ranks: dict[tuple[int, ...], int] = {}
                for token, parent in zip(step.draft_tokens, step.draft_parents, strict=True):
                    above = on_path[parent] if parent >= 0 else ()
                    path = (*above, ranks.get(above, 0))
                    ranks[above] = ranks.get(above, 0) + 1
                    on_path.append(path)
                    found[path] = token
                hidden = reference.places(tokens[:end], features[: end - 1], max(map(len, paths)))
                for path, token in found.items():
                    drafts = [found[path[: i + 1]] for i in range(len(path) - 1)]
                    logits = reference.logits_of(hidden, tokens[:end], drafts)
                    best = reference.target_ids[logits.topk(path[-1] + 1).indices[path[-1]]]
                    assert token == int(best), f"node {path} behind {end} tokens"
                checked += 1
            end += len(step.token_ids)
    assert checked > 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra": {"dflash_config": {"target_layer_ids": [0, 7], "mask_token_id": 60}}}, "another target"),
        ({"extra": {"dflash_config": {"target_layer_ids": [0, 1]}}}, "mask_token_id"),
        ({"extra": {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 61}}}, "mask token 61"),
        ({"extra": {"num_target_layers": 9}}, "num_target_layers 9"),
        ({"extra": {"is_neox_style": False}}, "is_neox_style"),
        ({"extra": {"vocab_size": 99}}, "vocab_size 99"),
        ({"form": "deepspec", "markov": "vanilla", "extra": {"markov_head_type": "odd"}}, "'odd'"),
        ({"selector": (4, 99), "conv": (2, 8)}, "selector_top_k 99"),
        ({"extra": {"projector_type": "odd"}}, "projector_type 'odd'"),
        ({"domino": (4, 4, -1)}, "pure_draft_prefix_len -1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    make_llm: Callable[..., LLM], tmp_path: Any, changes: dict[str, Any], words: str
) -> None:
    shape = BlockShape(**{"vocab": VOCAB, **changes})
    folder = save_block(tmp_path / "drafter", shape, random_weights(shape))
    with pytest.raises(ModelLoadError, match=words):
        engine(make_llm, folder)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("layers.0.attention_conv.base_kernel", "DFlash2's convolutions .* are not whole"),
        ("prefix_gru.weight_ih_l0", "projector_type domino"),
        ("mask_embedding", "a mask embedding"),
    ],
)
def test_kin_that_draft_otherwise_are_refused_by_name(
    make_llm: Callable[..., LLM], tmp_path: Any, tensor: str, words: str
) -> None:
    shape = BlockShape(vocab=VOCAB)
    folder = save_block(tmp_path / "drafter", shape, random_weights(shape) | {tensor: torch.zeros(3)})
    with pytest.raises(ModelLoadError, match=words):
        engine(make_llm, folder)


def test_a_block_has_room_for_so_many_drafts(
    make_llm: Callable[..., LLM], drafters: dict[str, tuple[str, ReferenceBlock]]
) -> None:
    folder, _ = drafters["z-lab"]
    llm = make_llm(speculative_config={"model": folder})
    assert llm.config.speculative[0].num_speculative_tokens == 4, "of a block of five"
    with pytest.raises(ConfigError, match=r"num_speculative_tokens 5 .* room for \(4\)"):
        engine(make_llm, folder, spec={"num_speculative_tokens": 5})
    with pytest.raises(ConfigError, match="a path of 5 tokens"):
        engine(make_llm, folder, spec={"speculative_token_tree": [[0] * (i + 1) for i in range(5)]})


@pytest.mark.parametrize(
    "shape",
    [
        {"speculative_token_tree": [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]},
        {"speculative_dynamic_tree": {"top_k": 6, "depth": 3}, "num_speculative_tokens": 12},
    ],
    ids=["static", "dynamic"],
)
def test_a_tree_wider_than_a_path_selector_has_candidates(
    make_llm: Callable[..., LLM], drafters: dict[str, tuple[str, ReferenceBlock]], shape: dict[str, Any]
) -> None:
    """Three candidates a place: a fourth sibling would be a token of probability 0. Text is plain decoding's."""
    folder, _ = drafters["dflash2, speculators"]
    prompts = random_prompts(4, seed=9)
    for params in (greedy(20), greedy(20).replace(temperature=0.9, seed=4)):  # with a seed: coupled
        plain = token_ids(make_llm().generate(prompts, params.replace(speculation={"method": "none"})))
        llm = engine(make_llm, folder, spec=shape)
        outputs = llm.generate(prompts, params)
        assert token_ids(outputs) == plain
        assert not llm.stats().drafter_failures
        assert sum(o.metrics.speculation.num_draft_tokens for o in outputs) > 40
    for rule in ("rejection", "block"):
        sampled = greedy(20).replace(temperature=0.9, seed=4, speculation={"rule": rule})
        llm = engine(make_llm, folder, spec=shape)
        llm.generate(prompts, sampled)
        assert not llm.stats().drafter_failures

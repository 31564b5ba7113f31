"""A head trained to know a text by heart: nearly every draft is accepted, whatever happens to the request on the way.
Features that got lost, stale or shifted would show as an acceptance that collapses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.propose.heads.features import FeatureSource
from draftwise.propose.heads.passes import HeadPasses
from draftwise.propose.heads.state import Features
from draftwise.runner.rounds import RoundSteps
from draftwise.types import IntArray, TargetOutput
from tests.e2e.conftest import random_prompts
from tests.e2e.test_heads import Target
from tests.fakes.heads import HeadShape, ReferenceHead, memorise, random_weights, save_head
from tests.fakes.tiny import VOCAB, TinyModels

K = 4
TEXTS = 2
LENGTH = 40
SHAPES = {
    "eagle": HeadShape("eagle", 32, 32, VOCAB, inner=64, own_head=True),
    "eagle3": HeadShape(
        "eagle3", 32, 32, VOCAB, inner=64, feature_layers=(0, 1, 2), norm_output=True, fc_norm=True
    ),
}


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def texts(tiny: TinyModels) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the target says behind them."""
    prompts = random_prompts(TEXTS, seed=61, low=16, high=28)
    with LLM(
        tiny.target,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        speculation_control="static",
    ) as llm:
        outputs = llm.generate(prompts, greedy())
    return [
        (p["prompt_token_ids"], list(o.outputs[0].token_ids)) for p, o in zip(prompts, outputs, strict=True)
    ]


# every run: the head that reads more features; drafts of both are compared with a reference in test_heads.py
@pytest.fixture(scope="module", params=[pytest.param("eagle", marks=pytest.mark.slow), "eagle3"])
def trained(
    request: pytest.FixtureRequest,
    tiny: TinyModels,
    texts: Sequence[tuple[list[int], list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, str]:
    """Method and folder of a head that knows the texts."""
    torch.set_num_threads(1)  # a second one only waits: the head is tiny
    target, shape = Target(tiny.target), SHAPES[request.param]
    head = ReferenceHead(shape, random_weights(shape, seed=8, scale=0.15), target.embedding, target.output)
    known = []
    for prompt, answer in texts:
        tokens = [*prompt, *answer]
        known.append((torch.tensor(tokens), target.states(tokens)))
    weights = memorise(head, known, unrolls=K, steps=120, lr=6e-3)
    return request.param, save_head(tmp_path_factory.mktemp("trained"), shape, weights)


def acceptance(outputs: Sequence[Any]) -> float:
    """Share of drafts that were accepted."""
    steps = [step for o in outputs for step in o.outputs[0].trace]
    drafted = sum(len(step.draft_tokens) for step in steps)
    assert drafted >= 24, "nothing was drafted"
    return float(sum(len(step.accepted_nodes) for step in steps) / drafted)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 9},
    "preemption": {"num_kv_blocks": 26},
    "fewer drafts in a batch": {"table": [[1, 1, K], [2, 64, 2]]},
}

TREES: dict[str, dict[str, Any]] = {
    "static": {
        "speculative_token_tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
    },
    "dynamic": {"speculative_dynamic_tree": {"top_k": 3, "depth": K}, "num_speculative_tokens": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_nearly_every_draft_is_accepted(
    make_llm: Callable[..., LLM],
    trained: tuple[str, str],
    texts: Sequence[tuple[list[int], list[int]]],
    name: str,
) -> None:
    method, folder = trained
    options = dict(OPTIONS[name])
    spec = {"method": method, "model": folder, "num_speculative_tokens": K}
    if "table" in options:
        spec["num_speculative_tokens_per_batch_size"] = options.pop("table")
    llm = make_llm(speculative_config=spec, speculation_control="static", keep_trace=True, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in texts]
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, greedy())
        assert [list(o.outputs[0].token_ids) for o in outputs] == [answer for _, answer in texts]
        assert acceptance(outputs) >= 0.95
    if name == "preemption":
        assert llm.stats().num_preemptions > 0
    # a hit in the middle of an answer
    outputs = llm.generate(
        [{"prompt_token_ids": [*prompt, *answer[:17]]} for prompt, answer in texts],
        greedy().replace(max_tokens=LENGTH - 17),
    )
    assert acceptance(outputs) >= 0.95


@pytest.mark.parametrize("shape", TREES)
def test_trees_accept_as_much(
    make_llm: Callable[..., LLM],
    trained: tuple[str, str],
    texts: Sequence[tuple[list[int], list[int]]],
    shape: str,
) -> None:
    """A tree has several guesses, of which one per depth is right. In the static one the right path is nodes 0, 3, 6
    and 8: features of the nodes between are those of rejected drafts."""
    method, folder = trained
    spec = {"method": method, "model": folder, **TREES[shape]}
    llm = make_llm(speculative_config=spec, speculation_control="static", keep_trace=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in texts], greedy())
    # the last steps have room for fewer
    steps = [step for o in outputs for step in (o.outputs[0].trace or ())[:-2] if step.draft_tokens]
    assert sum(len(step.accepted_nodes) for step in steps) / len(steps) >= 0.95 * K
    if shape == "static":
        assert any(step.accepted_nodes == (0, 3, 6, 8) for step in steps)


# ------------------------------------------------------------------------------------------ negative controls


def _only_the_last_row(patch: pytest.MonkeyPatch) -> None:
    """No catching up: rows of tokens that came without drafting, or in chunks, stay empty."""
    patch.setattr(HeadPasses, "first_missing", staticmethod(lambda track, stop: stop - 1))
    patch.setattr(HeadPasses, "fill", lambda self, requests: None)


def _another_tokens_features(patch: pytest.MonkeyPatch) -> None:
    """Rows of the batch are mistaken for their neighbours."""
    real = FeatureSource.wait
    patch.setattr(RoundSteps, "run", lambda self, plan, rows: None)  # native code would not be mistaken

    def wait(self: FeatureSource, output: TargetOutput, rows_np: IntArray, *more: Any) -> Features:
        return real(self, output, np.maximum(rows_np - 1, 0), *more)

    patch.setattr(FeatureSource, "wait", wait)


BREAKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], float]] = {
    "no catching up": (_only_the_last_row, {"max_num_batched_tokens": 9}, 0.6),
    "other rows": (_another_tokens_features, {}, 0.6),
}


@pytest.mark.parametrize("name", BREAKS)
def test_acceptance_collapses_if_features_are_lost(
    make_llm: Callable[..., LLM],
    trained: tuple[str, str],
    texts: Sequence[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The tests above see what they look for; the text is the same whatever the drafts."""
    method, folder = trained
    breaks, options, most = BREAKS[name]
    breaks(monkeypatch)
    spec = {"method": method, "model": folder, "num_speculative_tokens": K}
    llm = make_llm(speculative_config=spec, speculation_control="static", keep_trace=True, **options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in texts], greedy())
    assert [list(o.outputs[0].token_ids) for o in outputs] == [answer for _, answer in texts]
    assert acceptance(outputs) < most

"""Trees as drafters really make them (`draft_trees`): whatever shape they take, the output is the target's.

The negative controls do what looks harmless: sample children as q says, then keep the best by the drafter's
probabilities (re-ranking what was drawn), or take the fourth child drawn where the shape skips the third. With the
2,500 trials of every run their statistic is 3.5 times the limit and more. What is caught: `test_lossless`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.fakes.tree_model import ScriptedTreeModel, draft_row
from world import Drafter, World, assert_caught, assert_same_distribution, simulate

from draftwise.config.trees import DynamicTree
from draftwise.propose.trees.expansion import draft_trees
from draftwise.propose.trees.growth import StaticTree, TreeTask
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import IntArray, Proposal

SHAPE = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 0]]
DYNAMIC = DynamicTree(top_k=3, depth=3)
RULES = ("rejection", "block", "coupled")


def drafter(nodes: int = 63, own_vocab: int | None = None, **kind: Any) -> Drafter:
    """Trees of one kind for all trials, in one call. ``own_vocab``: the drafter speaks the first tokens alone."""

    def make(
        world: World, rule: str, states: Sequence[SamplingState], known: Sequence[IntArray]
    ) -> list[Proposal]:
        tasks = [
            TreeTask(
                draft_row(
                    world.vocab, rid=i, tokens=ids.tolist(), rule=rule, params=s.params, state=s, **kind
                ),
                nodes,
                63,
            )
            for i, (s, ids) in enumerate(zip(states, known, strict=True))
        ]
        model = ScriptedTreeModel(world.draft[:, :own_vocab])
        vocab_map = None if own_vocab is None else torch.arange(own_vocab)
        return draft_trees(model, tasks, model.root_logits(tasks), name="test", vocab_map=vocab_map)

    return make


MAKERS = {
    "static": drafter(tree=SHAPE),
    "dynamic": drafter(dynamic=DYNAMIC, nodes=7),
    "one node": drafter(dynamic=DYNAMIC, nodes=1),
}
DYNAMIC_OF_6, DYNAMIC_OF_8 = (drafter(dynamic=DYNAMIC, nodes=nodes) for nodes in (6, 8))
SHAPES = ("static", "dynamic")
SLOW = pytest.mark.slow


_QUICK = {
    ("static", "rejection"), ("static", "coupled"), ("dynamic", "block"), ("dynamic", "coupled"), ("one node", "block"),
}  # fmt: skip
"""Each shape with children that are drawn and with fixed ones; block judges trees by rejection."""


@pytest.mark.parametrize(
    ("maker", "rule", "temperature"),
    [  # every pair of two
        pytest.param(
            maker, rule, (0.6, 1.0)[(i + j) % 2], marks=[] if (maker, rule) in _QUICK else pytest.mark.slow
        )
        for i, maker in enumerate(MAKERS)
        for j, rule in enumerate(RULES)
    ],
)
def test_drafted_trees(maker: str, rule: str, temperature: float, trials: int) -> None:
    world = World.random(5, seed=51)
    params = SamplingParams(temperature=temperature)
    out = simulate(world, rule, trials, 3, params=params, drafter=MAKERS[maker])
    assert out.accepted > out.steps / 3
    assert_same_distribution(out.cells(5), world.exact(params, 3))


@pytest.mark.parametrize("make", [MAKERS["static"], pytest.param(DYNAMIC_OF_6, marks=SLOW)], ids=SHAPES)
def test_with_all_parameters(make: Drafter, trials: int) -> None:
    """Truncation leaves fewer children than the shape wants; penalties depend on each node's path."""
    world = World.random(5, seed=52, spread=1.0)
    params = SamplingParams(
        temperature=0.9, top_k=3, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2
    )
    out = simulate(world, "rejection", trials, 3, params=params, drafter=make)
    assert_same_distribution(out.cells(5), world.exact(params, 3))


def test_siblings_that_q_has_no_float32_for(trials: int) -> None:
    """At a low temperature all of q is the first child's; the next ones are drawn from what rounded to 0."""
    target, draft = torch.tensor([0.0, 0.0, -9.0, -9.0, 0.005]), torch.tensor([-2.0, -3.0, 0.0, -9.0, -3.0])
    world = World(target.expand(5, 5), draft.expand(5, 5))
    params = SamplingParams(temperature=0.01)
    out = simulate(world, "rejection", trials, 2, params=params, drafter=drafter(tree=[[0], [1], [2]]))
    assert_same_distribution(out.cells(5), world.exact(params, 2))


@pytest.mark.parametrize("rule", ["rejection", pytest.param("coupled", marks=SLOW)])
def test_a_draft_vocabulary_without_one_allowed_token(rule: str, trials: int) -> None:
    world = World.random(6, seed=56)
    params = SamplingParams(allowed_token_ids=[3, 4, 5])
    make = drafter(own_vocab=3, tree=[[0], [1], [0, 0]])
    out = simulate(world, rule, trials, 2, params=params, drafter=make)
    assert_same_distribution(out.cells(6), world.exact(params, 2))


@pytest.mark.parametrize("make", [pytest.param(MAKERS["static"], marks=SLOW), DYNAMIC_OF_8], ids=SHAPES)
def test_trees_cut_without_looking(make: Drafter, trials: int) -> None:
    """What a controller does: verify the first n nodes."""
    world = World.random(5, seed=53)
    out = simulate(world, "rejection", trials, 3, drafter=make, cut=lambda trial, step: (trial + step) % 8)
    assert_same_distribution(out.cells(5), world.exact(SamplingParams(), 3))


def reranked(make: Drafter, keep: int) -> Drafter:
    """Keep the ``keep`` drawn nodes that the drafter finds likeliest along their paths."""

    def biased(
        world: World, rule: str, states: Sequence[SamplingState], known: Sequence[IntArray]
    ) -> list[Proposal]:
        return [_best(proposal, keep) for proposal in make(world, rule, states, known)]

    return biased


def _best(proposal: Proposal, keep: int) -> Proposal:
    assert proposal.q is not None
    scores: list[float] = []
    for i, parent in enumerate(proposal.parents):
        own = float(proposal.q[proposal.q_rows[i], proposal.tokens[i]])
        scores.append(own * (scores[parent] if parent >= 0 else 1.0))
    kept = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep])
    index = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return Proposal(
        tuple(proposal.tokens[i] for i in kept),
        tuple(index[proposal.parents[i]] for i in kept),
        proposal.method,
        proposal.draw,
        proposal.q,
        tuple(proposal.q_rows[i] for i in kept),
    )


def test_reranking_what_was_drawn_is_caught(trials: int) -> None:
    world = World.random(4, seed=54)
    make = drafter(tree=[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
    exact = world.exact(SamplingParams(), 3)
    assert_same_distribution(simulate(world, "rejection", trials, 3, drafter=make).cells(4), exact)
    assert_caught(simulate(world, "rejection", trials, 3, drafter=reranked(make, 3)).cells(4), exact)


def test_skipping_ranks_of_what_was_drawn_is_caught(monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    world = World.random(5, seed=55, noise=2.0)
    make = drafter(tree=[[0], [2]])
    exact = world.exact(SamplingParams(), 2)
    assert_same_distribution(simulate(world, "rejection", trials, 2, drafter=make).cells(5), exact)
    real: Callable[..., None] = StaticTree.__init__

    def by_rank(self: Any, member: int, task: TreeTask, sampled: bool) -> None:
        real(self, member, task, sampled)
        self._ranks = list(task.row.speculation.tree_ranks or ())

    monkeypatch.setattr(StaticTree, "__init__", by_rank)
    assert_caught(simulate(world, "rejection", trials, 2, drafter=make).cells(5), exact)

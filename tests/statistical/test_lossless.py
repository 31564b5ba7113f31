"""Every lossless rule: the joint distribution of several tokens, over several steps, is exactly the target's.

Power: the limit (`world.threshold`) is an excess of 85 over the 64 cells of three tokens from four. A bias that
moves each cell by a relative r adds trials * r^2: with 2,500 trials r = 18% is caught, with the 10,000 of the slow
tests 9%, and much less where it is concentrated (of 125 cells, 21% and 10%). What rules do wrong is off by more: the
negative controls next door, with as few trials, are beyond the limit by half as much again and more, most by a factor
of 4 to 36. Chance alone fails a test
once in more than 10^7 runs, and the seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world import CHAINS, PROMPT, World, assert_same_distribution, simulate

from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import DrawKind, Proposal, Verification
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch

TREES = (
    (-1, -1, 0, 0, 1, 2),  # root -> {a -> {c -> f, d}, b -> e}
    (-1, 0, -1, 0, -1, 2),  # siblings not next to each other
    (-1, -1, -1),
    (-1, 0, 1, 1, 1, 0),
)


@pytest.mark.parametrize(
    ("rule", "k", "temperature"),
    [  # every pair of two
        ("rejection", 1, 0.6), ("rejection", 3, 1.0), pytest.param("block", 1, 1.0, marks=pytest.mark.slow),
        ("block", 3, 0.6), pytest.param("coupled", 1, 0.6, marks=pytest.mark.slow), ("coupled", 3, 1.0),
    ],
)  # fmt: skip
def test_chains(rule: str, k: int, temperature: float, trials: int) -> None:
    world = World.random(4, seed=k)
    params = SamplingParams(temperature=temperature)
    out = simulate(world, rule, trials, 3, shapes=[CHAINS[k]], params=params, first_seed=1000)
    assert 0.3 < out.accepted / out.drafted < 0.97
    assert_same_distribution(out.cells(4), world.exact(params, 3))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_point_mass_chains(rule: str, trials: int) -> None:
    world = World.random(4, seed=8)
    params = SamplingParams(temperature=0.8)
    out = simulate(world, rule, trials, 3, draw="fixed", params=params)
    assert out.accepted > out.steps / 4
    assert_same_distribution(out.cells(4), world.exact(params, 3))


@pytest.mark.parametrize(
    ("temperature", "draw"),
    [
        (0.6, "independent"), (1.0, "without_replacement"), (0.6, "fixed"),
        pytest.param(1.0, "independent", marks=pytest.mark.slow),
        pytest.param(0.6, "without_replacement", marks=pytest.mark.slow),
        pytest.param(1.0, "fixed", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_trees(draw: DrawKind, temperature: float, trials: int) -> None:
    world = World.random(4, seed=21)
    params = SamplingParams(temperature=temperature)
    out = simulate(world, "rejection", trials, 3, shapes=TREES, draw=draw, params=params)
    assert out.accepted > out.steps / 2
    assert_same_distribution(out.cells(4), world.exact(params, 3))


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_trees_under_other_rules(rule: str, trials: int) -> None:
    """Block judges trees by rejection; coupled walks any tree."""
    world = World.random(4, seed=22)
    params = SamplingParams()
    draw: DrawKind = "without_replacement" if rule == "block" else "fixed"
    out = simulate(world, rule, trials, 3, shapes=TREES, draw=draw, params=params)
    assert_same_distribution(out.cells(4), world.exact(params, 3))


@pytest.mark.parametrize("draw", [pytest.param("independent", marks=pytest.mark.slow), "without_replacement"])
def test_more_siblings_than_support(draw: DrawKind, trials: int) -> None:
    """Independent siblings repeat themselves; a hopeless drafter makes every rejection path walk."""
    world = World.random(3, seed=4, noise=3.0)
    params = SamplingParams()
    out = simulate(world, "rejection", trials, 3, shapes=[(-1, -1, -1, 0, 1)], draw=draw, params=params)
    assert_same_distribution(out.cells(3), world.exact(params, 3))


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_draft_length_that_varies_without_looking(rule: str, trials: int) -> None:
    """A budget may cut proposals anywhere, as long as it does not look at the drawn tokens."""
    world = World.random(4, seed=31)
    params = SamplingParams()
    out = simulate(world, rule, trials, 4, params=params, cut=lambda trial, step: (trial + step) % 4)
    assert_same_distribution(out.cells(4), world.exact(params, 4))


def test_trees_cut_without_looking(trials: int) -> None:
    """Any prefix of the node order is a tree; a sibling that was cut leaves the others' rounds as they are."""
    world = World.random(4, seed=32)
    params = SamplingParams()
    out = simulate(
        world,
        "rejection",
        trials,
        3,
        shapes=TREES,
        draw="without_replacement",
        cut=lambda trial, step: trial % 6,
    )
    assert_same_distribution(out.cells(4), world.exact(params, 3))


def test_siblings_beyond_an_empty_q(trials: int) -> None:
    """q holds two tokens; the third and fourth sibling are drawn uniformly from the untried ones. One token
    of five, not three of four: a relative error of 12 % in every cell is caught, by many 6 %."""
    target = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15])
    q = torch.tensor([[0.6, 0.4, 0.0, 0.0, 0.0]])
    rng = np.random.default_rng(5)
    requests = []
    for trial in range(trials):
        first = int(rng.random() >= 0.6)
        rest = rng.permutation([2, 3, 4])
        tokens = (first, 1 - first, int(rest[0]), int(rest[1]))
        proposal = Proposal(tokens, (-1,) * 4, "test", "without_replacement", q, (0,) * 4)
        state = SamplingState(
            SamplingParams(), seed=trial, sample_index=0, token_ids_np=PROMPT, num_prompt=1, vocab_size=5
        )
        requests.append(VerifyRequest(state, proposal, 5 * trial, "rejection", PROMPT))
    counts = np.zeros(5, dtype=np.int64)
    for result in verify_batch(target.log().repeat(5 * trials, 1), requests):
        assert isinstance(result, Verification)
        counts[result.token_ids[0]] += 1
    assert_same_distribution(counts, target.double().numpy() / float(target.double().sum()))


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_all_parameters_together(rule: str, trials: int) -> None:
    """Penalties see the history each position would have; truncation applies to p and q alike."""
    world = World.random(5, seed=41, spread=1.0)
    params = SamplingParams(
        temperature=0.9, top_p=0.95, top_k=4, min_p=0.02, presence_penalty=0.7, frequency_penalty=0.4,
        repetition_penalty=1.2, logit_bias={2: 0.8}, allowed_token_ids=(0, 1, 2, 4),
    )  # fmt: skip
    out = simulate(world, rule, trials, 3, shapes=[CHAINS[2]], params=params)
    assert_same_distribution(out.cells(5), world.exact(params, 3))

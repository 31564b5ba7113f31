"""Coupled: the output is a function of (target, prompt, parameters, seed); the drafter cannot be seen in it."""

from __future__ import annotations

import numpy as np
import pytest
from world import CHAINS, World, simulate

from draftwise.sampling.params import SamplingParams

LENGTH = 12


@pytest.mark.parametrize("trials", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_same_tokens_whatever_was_drafted(trials: int) -> None:
    """Not a token differs in any trial, so that their number is no question of chance."""
    world = World.random(16, seed=1, noise=0.6)
    other = World(world.target, World.random(16, seed=2).draft)
    trees = [(-1, -1, 0, 1, 0, -1), (-1, 0, 0, 1)]
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5, top_k=9),
    ):
        plain = simulate(world, "coupled", trials, LENGTH, shapes=[()], params=params)
        assert plain.steps == trials * LENGTH
        accepted = []
        for drafter in (world, other):
            for shapes in ([CHAINS[1]], [CHAINS[4]], trees):
                for draw in ("independent", "fixed"):
                    out = simulate(
                        drafter, "coupled", trials, LENGTH, shapes=shapes, draw=draw, params=params
                    )
                    assert np.array_equal(out.tokens, plain.tokens)
                    accepted.append(out.accepted / out.steps)
        assert max(accepted) > 1.0 > min(accepted)  # the drafters did differ


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_samples_and_seeds_differ(rule: str) -> None:
    world = World.random(16, seed=1)
    a = simulate(world, rule, 50, LENGTH, first_seed=0).tokens
    b = simulate(world, rule, 50, LENGTH, first_seed=50).tokens
    assert np.array_equal(a, simulate(world, rule, 50, LENGTH, first_seed=0).tokens)
    assert (a == b).mean() < 0.6
    assert len({tuple(row) for row in np.concatenate([a, b])}) == 100

"""How much is accepted: what the papers promise, measured.

Limits are five standard errors, on one side or both: chance passes one less than once in 1.7 million tests. With 2,500
trials that is 5 % of a rate of one half, with the 10,000 of the slow tests 2.5 %; block and rejection, which could be
taken for one another, are 11 % of a token apart in `test_block_gains_where_tokens_compensate`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from world import CHAINS, World, simulate

from draftwise.sampling.params import SamplingParams
from draftwise.types import DrawKind


def mean_and_error(lengths: list[int]) -> tuple[float, float]:
    return float(np.mean(lengths)), float(np.std(lengths) / math.sqrt(len(lengths)))


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_block_keeps_at_least_as_much_as_rejection(seed: int, trials: int) -> None:
    world = World.random(4, seed=seed)
    block = mean_and_error(simulate(world, "block", trials, 1, shapes=[CHAINS[4]]).first_lengths)
    standard = mean_and_error(simulate(world, "rejection", trials, 1, shapes=[CHAINS[4]]).first_lengths)
    assert block[0] > standard[0] - 5 * (block[1] + standard[1])


def test_block_gains_where_tokens_compensate(trials: int) -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: rejection keeps 2/3 + 4/9 = 10/9, block 11/9 (section 2 of the
    paper)."""
    world = World(torch.tensor([[1.0, 2.0]] * 2).log(), torch.tensor([[2.0, 1.0]] * 2).log())
    for rule, kept in (("rejection", 10 / 9), ("block", 11 / 9)):
        mean, error = mean_and_error(simulate(world, rule, trials, 1, shapes=[CHAINS[2]]).first_lengths)
        assert abs(mean - 1 - kept) < 5 * error, rule


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_perfect_drafter_is_always_right(rule: str, temperature: float) -> None:
    world = World.random(5, seed=6)
    same = World(world.target, world.target)
    out = simulate(same, rule, 1000, 4, params=SamplingParams(temperature=temperature))
    assert out.accepted / out.drafted >= 0.98


def test_rejection_accepts_one_minus_total_variation(trials: int) -> None:
    world = World.random(6, seed=12)
    p, q = world.target[0].softmax(-1), world.draft[0].softmax(-1)
    expected = float(torch.minimum(p, q).sum())
    out = simulate(world, "rejection", trials, 1, shapes=[CHAINS[1]])
    rate = np.mean(np.array(out.first_lengths) - 1)
    assert abs(rate - expected) < 6 * math.sqrt(expected * (1 - expected) / trials)


def test_coupled_matches_at_least_as_promised(trials: int) -> None:
    """(1 - d)/(1 + d) for total variation d (Daliri, Musco, Suresh, theorem 1)."""
    for seed in range(4):
        world = World.random(6, seed=seed)
        p, q = world.target[0].softmax(-1), world.draft[0].softmax(-1)
        d = float(1 - torch.minimum(p, q).sum())
        out = simulate(world, "coupled", trials, 1, shapes=[CHAINS[1]])
        rate = np.mean(np.array(out.first_lengths) - 1)
        bound = (1 - d) / (1 + d)
        assert rate > bound - 5 * math.sqrt(bound * (1 - bound) / trials)
        assert rate < 1 - d + 5 * math.sqrt(d * (1 - d) / trials)  # no coupling beats maximal coupling


def test_siblings_are_accepted_as_often_as_computed(trials: int) -> None:
    """Independent siblings: round j accepts with sum_x min(p_j, q), p_{j+1} = norm(max(p_j - q, 0))."""
    world = World.random(6, seed=2)
    p, q = world.target[0].double().softmax(-1), world.draft[0].double().softmax(-1)
    refused = 1.0
    for m in range(1, 4):
        refused *= 1 - float(torch.minimum(p, q).sum())
        p = (p - q).clamp(min=0)
        p /= p.sum()
        lengths = simulate(world, "rejection", trials, 1, shapes=[(-1,) * m]).first_lengths
        assert abs(np.mean(lengths) - (2 - refused)) < 5 * math.sqrt(refused * (1 - refused) / trials), m


@pytest.mark.parametrize("draw", ["without_replacement", "fixed"])
def test_distinct_siblings_are_accepted_more(draw: DrawKind) -> None:
    world = World.random(6, seed=2, noise=1.5)
    one, four = (
        np.mean(simulate(world, "rejection", 3000, 1, shapes=[(-1,) * m], draw=draw).first_lengths)
        for m in (1, 4)
    )
    assert four > one + 0.06  # five standard errors

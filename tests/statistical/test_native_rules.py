"""The rules as native kernels: the joint distribution of several tokens is exactly the target's, and wrong rules are
caught. See test_lossless.py for what a test notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.native import native_or_skip
from world import CHAINS, Shape, World, assert_caught, assert_same_distribution, simulate

from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.sampling.params import SamplingParams
from draftwise.types import DrawKind, Proposal, Verification
from draftwise.verify.base import VerifyRequest
from draftwise.verify.native import NativeRules

TREES = ((-1, -1, 0, 0, 1, 2), (-1, 0, -1, 0, -1, 2), (-1, -1, -1), (-1, 0, 1, 1, 1, 0))
PARAMS = (
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(top_k=3, min_p=0.02),
)


class Mistaken(NativeRules):
    """Native rules that are told something wrong about each proposal."""

    def __init__(self, told: Callable[[Proposal], Proposal]) -> None:
        library = native_or_skip()
        super().__init__(library, ThreadPool(library, 1))
        self._told = told

    def verify(
        self,
        logits: torch.Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: object = None,
    ) -> list[Verification]:
        return super().verify(logits, [r._replace(proposal=self._told(r.proposal)) for r in requests], rules)


def right() -> NativeRules:
    return Mistaken(lambda proposal: proposal)


@pytest.mark.parametrize(
    ("rule", "params"),
    [  # quick: each rule with one, and one more of rejection
        pytest.param(
            rule, params, id=f"{rule}-{params.temperature}-{params.top_k}-{params.top_p}",
            marks=[] if i == j or (i, j) == (0, 1) else pytest.mark.slow,
        )
        for i, rule in enumerate(("rejection", "block", "coupled"))
        for j, params in enumerate(PARAMS)
    ],
)  # fmt: skip
def test_chains(rule: str, params: SamplingParams, trials: int) -> None:
    world = World.random(4, seed=3)
    out = simulate(world, rule, trials, 3, shapes=[CHAINS[3]], params=params, kernels=right())
    assert 0.3 < out.accepted / out.drafted < 0.97
    assert_same_distribution(out.cells(4), world.exact(params, 3))


@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        ("rejection", "independent"),
        ("rejection", "without_replacement"),
        ("rejection", "fixed"),
        ("block", "without_replacement"),
        ("coupled", "fixed"),
    ],
)
def test_trees(rule: str, draw: DrawKind, trials: int) -> None:
    world = World.random(4, seed=21)
    params = SamplingParams(temperature=0.8)
    out = simulate(world, rule, trials, 3, shapes=TREES, draw=draw, params=params, kernels=right())
    assert out.accepted > out.steps / 3
    assert_same_distribution(out.cells(4), world.exact(params, 3))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_point_masses(rule: str, trials: int) -> None:
    world = World.random(4, seed=8)
    out = simulate(world, rule, trials, 3, draw="fixed", params=PARAMS[0], kernels=right())
    assert_same_distribution(out.cells(4), world.exact(PARAMS[0], 3))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_lengths_that_vary_without_looking(rule: str, trials: int) -> None:
    world = World.random(4, seed=5)
    out = simulate(
        world, rule, trials, 4, params=PARAMS[0], cut=lambda trial, step: (trial + step) % 4, kernels=right()
    )
    assert_same_distribution(out.cells(4), world.exact(PARAMS[0], 4))


def _halved(proposal: Proposal) -> Proposal:
    return proposal if proposal.q is None else replace(proposal, q=proposal.q * 0.5)


def _with_replacement(proposal: Proposal) -> Proposal:
    return replace(proposal, draw="independent") if proposal.q is not None else proposal


def _shifted(proposal: Proposal) -> Proposal:
    """Each draft judged by its neighbour's distribution."""
    if proposal.q is None:
        return proposal
    return replace(proposal, q_rows=(*proposal.q_rows[1:], proposal.q_rows[0]))


CHAIN: tuple[Shape, ...] = (CHAINS[3],)


@pytest.mark.parametrize(
    ("told", "rule", "shapes", "draw"),
    [
        (_halved, "rejection", CHAIN, "independent"),
        (_halved, "block", CHAIN, "independent"),
        (_shifted, "rejection", CHAIN, "independent"),
        (_shifted, "block", CHAIN, "independent"),
        (_with_replacement, "rejection", ((-1, -1, -1),), "without_replacement"),
    ],
)
def test_what_is_wrong_is_caught(
    told: Callable[[Proposal], Proposal],
    rule: str,
    shapes: Sequence[Shape],
    draw: DrawKind,
    trials: int,
) -> None:
    world = World.random(4, seed=3)
    params = SamplingParams()
    out = simulate(world, rule, trials, 3, shapes=shapes, draw=draw, params=params, kernels=Mistaken(told))
    assert_caught(out.cells(4), world.exact(params, 3))

"""How much of a proposal is verified may hang on what came of those before, and on nothing that was drawn for it.

Every comparison is Pearson's chi-square of the joint table of three tokens; its limit is exceeded by chance less than
once in 10^7 runs (`world.threshold`). Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from world import CHAINS, Outcome, World, _draft, assert_caught, assert_same_distribution, simulate

from draftwise.adapt.acceptance import ALL, ANY, NOTHING, SOME, after, outcome
from draftwise.adapt.choice import Drafter, Group
from draftwise.sampling.params import SamplingParams
from draftwise.types import Proposal

LENGTH, K = 3, 3
PARAMS = SamplingParams()
SKEWED = World(
    torch.tensor([[0.5, 0.3, 0.2]] * 3).log(),
    torch.tensor([[0.3, 0.5, 0.2]] * 3).log(),
)
"""Dropping tokens of q < 0.25 turns (.5, .3, .2) into another distribution."""


class Budget:
    """The controller's cut of each trial, by what came of the trial's proposals before. Two trials in three begin as if
    something was known."""

    def __init__(self, cuts: dict[int, int]) -> None:
        self._cuts = cuts
        self._drafters: dict[int, Drafter] = {}
        self.seen: set[tuple[int | None, int]] = set()

    def cut(self, trial: int, step: int) -> int:
        drafter = self._drafters.get(trial)
        if drafter is None:
            group = Group("test", "rejection", evident=False)
            drafter = self._drafters[trial] = Drafter(group, K, K, K, cuts=self._cuts)
            drafter.before = (None, NOTHING, ALL)[trial % 3]
        before, cut = drafter.before, drafter.cut(K)
        self.seen.add((before, cut))
        if not cut:
            drafter.before = None
        return cut

    def observe(self, trial: int, verified: int, accepted: int) -> None:
        if verified:
            self._drafters[trial].before = outcome(verified, accepted)


def run(rule: str, budget: Budget, world: World, trials: int) -> Outcome:
    """`simulate`, telling the budget what came of each step."""
    totals: dict[int, int] = {}
    verified: dict[int, int] = {}

    def cut(trial: int, step: int) -> int:
        # lengths of what is known come with the drafter's call, just before
        known = lengths[trial]
        if trial in totals:
            budget.observe(trial, verified[trial], known - totals[trial] - 1)
        totals[trial] = known
        verified[trial] = budget.cut(trial, step)
        return verified[trial]

    lengths: dict[int, int] = {}

    def drafter(
        world: World, rule: str, states: Sequence[object], known: Sequence[np.ndarray]
    ) -> list[Proposal]:
        for state, ids in zip(states, known, strict=True):  # the seed is the trial
            lengths[state.seed] = len(ids)  # type: ignore[attr-defined]
        return _draft(world, rule, CHAINS[K], "independent", states, known)  # type: ignore[arg-type]

    return simulate(world, rule, trials, LENGTH, cut=cut, drafter=drafter)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_a_budget_by_history_keeps_the_distribution(rule: str, trials: int) -> None:
    budget = Budget({ANY: 2, after(NOTHING): 0, after(SOME): 1, after(ALL): 3})
    found = run(rule, budget, SKEWED, trials)
    assert_same_distribution(found.cells(3), SKEWED.exact(PARAMS, LENGTH))
    assert {(NOTHING, 0), (None, 2), (ALL, 3)} <= budget.seen, "cuts were not exercised"


def confident(proposal: Proposal) -> Proposal:
    """Cut before the first drawn token that its own drafter thinks unlikely."""
    world = SKEWED.draft.softmax(-1)[0]
    for i, token in enumerate(proposal.tokens):
        if float(world[token]) < 0.25:
            return proposal.prefix(i)
    return proposal


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_cut_by_the_drawn_tokens_confidence_is_caught(rule: str, trials: int) -> None:
    """The negative control: what the budget must not do."""
    found = simulate(SKEWED, rule, trials, LENGTH, shapes=[CHAINS[K]], drop=confident)
    assert_caught(found.cells(3), SKEWED.exact(PARAMS, LENGTH))


@pytest.mark.parametrize("form", ["point mass", "coupled"])
def test_where_confidence_would_be_harmless(form: str, trials: int) -> None:
    """The text is the target's own draw, or the draft is a fixed guess: a cut of any kind changes nothing."""

    def as_point_mass(proposal: Proposal) -> Proposal:
        kept = confident(proposal)
        return Proposal(kept.tokens, kept.parents, "test")

    rule, drop = ("coupled", confident) if form == "coupled" else ("rejection", as_point_mass)
    found = simulate(SKEWED, rule, trials, LENGTH, shapes=[CHAINS[K]], drop=drop)
    assert_same_distribution(found.cells(3), SKEWED.exact(PARAMS, LENGTH))

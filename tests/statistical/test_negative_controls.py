"""Mistakes that break losslessness without any visible symptom. The tests must notice each of them, at the
sizes the real tests use; a test that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from world import CHAINS, World, assert_caught, assert_same_distribution, simulate

from draftwise.names import DRAFT
from draftwise.sampling import draw
from draftwise.sampling.noise import uniform
from draftwise.sampling.params import SamplingParams
from draftwise.types import Proposal
from draftwise.verify import common, rejection
from draftwise.verify.base import VerifyRequest

PARAMS = SamplingParams()


def world_of(p: Sequence[float], q: Sequence[float]) -> World:
    """The same distributions at every position."""
    rows = len(p)
    return World(torch.tensor([p] * rows).log(), torch.tensor([q] * rows).log())


def run(world: World, rule: str, trials: int, **kw: object) -> object:
    return simulate(world, rule, trials, 3, shapes=[CHAINS[3]], **kw).cells(world.vocab)  # type: ignore[arg-type]


def test_accepting_on_the_wrong_ratio(monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    world = World.random(4, seed=3)
    real = rejection.gather_drafts

    def halved(*args: object) -> object:
        p_of, q_of = real(*args)  # type: ignore[arg-type]
        return p_of, [None if qx is None else [0.5 * q for q in qx] for qx in q_of]

    assert_same_distribution(run(world, "rejection", trials), world.exact(PARAMS, 3))
    monkeypatch.setattr(rejection, "gather_drafts", halved)
    assert_caught(run(world, "rejection", trials), world.exact(PARAMS, 3))


def test_recovering_from_p_instead_of_the_residual(monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    world = World.random(4, seed=3)
    real = rejection.finish

    def from_p(requests: object, ends: Sequence[rejection.End], p: torch.Tensor) -> object:
        return real(requests, [rejection.End(end.path, end.p_row) for end in ends], p)  # type: ignore[arg-type]

    monkeypatch.setattr(rejection, "finish", from_p)
    assert_caught(run(world, "rejection", trials), world.exact(PARAMS, 3))


def test_one_key_for_draft_and_recovered_token(monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    """The recovered token drawn with the uniform that drew the rejected draft."""
    world = world_of((0.4, 0.4, 0.2), (0.2, 0.3, 0.5))

    def drafts_uniform(request: VerifyRequest, node: int, depth: int) -> float:
        state = request.state
        base = state.num_tokens
        return uniform(state.seed, state.sample_index, DRAFT, base + depth, node + 1, base)

    assert_same_distribution(run(world, "rejection", trials), world.exact(PARAMS, 3))
    monkeypatch.setattr(rejection, "recover_uniform", drafts_uniform)
    assert_caught(run(world, "rejection", trials), world.exact(PARAMS, 3))


def test_one_key_for_draft_and_acceptance(monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    world = World.random(4, seed=3)

    def drafts_uniform(request: VerifyRequest, node: int, depth: int) -> float:
        state = request.state
        base = state.num_tokens
        return uniform(state.seed, state.sample_index, DRAFT, base - 1 + depth, node, base)

    monkeypatch.setattr(rejection, "accept_uniform", drafts_uniform)
    assert_caught(run(world, "rejection", trials), world.exact(PARAMS, 3))


def test_noise_of_a_position_reused_by_the_next_step(monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    """Noise keyed by position alone. Block verification looks at the noise of every drafted position; what it
    does not keep, the next step would draw, judge and recover with the same noise again."""
    world = world_of((0.6, 0.4), (0.4, 0.6))

    def by_position(seed: int, n: int, stream: int, position: int, node: int, base: int) -> float:
        return uniform(seed, n, stream, position)

    exact = world.exact(PARAMS, 3)
    assert_same_distribution(run(world, "block", trials), exact)
    monkeypatch.setattr(draw, "uniform", by_position)
    monkeypatch.setattr(common, "uniform", by_position)
    assert_caught(run(world, "block", trials), exact)


def test_dropping_drafts_because_they_look_unlikely(trials: int) -> None:
    world = world_of((0.5, 0.3, 0.2), (0.3, 0.5, 0.2))

    def confident(proposal: Proposal) -> Proposal:
        assert proposal.q is not None
        for i, token in enumerate(proposal.tokens):
            if proposal.q[proposal.q_rows[i], token] < 0.25:
                return proposal.prefix(i)
        return proposal

    assert_same_distribution(run(world, "rejection", trials), world.exact(PARAMS, 3))
    assert_caught(run(world, "rejection", trials, drop=confident), world.exact(PARAMS, 3))


def test_sampled_drafts_judged_as_point_masses(trials: int) -> None:
    """No mistake: the point-mass form is right for any token that was chosen independently of the noise that
    judges it. Here to show that the controls do not cry wolf."""
    world = World.random(4, seed=3)

    def forget_q(proposal: Proposal) -> Proposal:
        return Proposal(proposal.tokens, proposal.parents, "test")

    assert_same_distribution(run(world, "rejection", trials, drop=forget_q), world.exact(PARAMS, 3))


@pytest.mark.parametrize("told", ["independent", "fixed"])
def test_siblings_drawn_otherwise_than_told(told: str, trials: int) -> None:
    """Drawn without replacement, judged as something else."""
    world = world_of((0.55, 0.15, 0.3), (0.2, 0.6, 0.2))
    exact = world.exact(PARAMS, 3)
    shapes = [(-1, -1)]

    def lie(proposal: Proposal) -> Proposal:
        return Proposal(proposal.tokens, proposal.parents, "test", told, proposal.q, proposal.q_rows)  # type: ignore[arg-type]

    honest = simulate(world, "rejection", trials, 3, shapes=shapes, draw="without_replacement")
    assert_same_distribution(honest.cells(3), exact)
    lying = simulate(world, "rejection", trials, 3, shapes=shapes, draw="without_replacement", drop=lie)
    if told == "fixed":  # again harmless: a point mass may be any token
        assert_same_distribution(lying.cells(3), exact)
    else:
        assert_caught(lying.cells(3), exact)

"""The scripted tree drafter keeps the contract that the tests built on it rely on."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from tests.fakes.tree_proposer import TreeProposer, oracle_from_outputs, tree_proposer

from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import DraftRow
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import Proposal, Speculation
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch

VOCAB = 13
Draw = Literal["fixed", "independent", "without_replacement"]
DRAWS: list[Draw] = ["fixed", "independent", "without_replacement"]


def row(
    rid: int, params: SamplingParams, rule: str, n: int = 6, budget: int = 12, depth: int = 5
) -> DraftRow:
    tokens = (np.arange(n) * 7 % VOCAB).astype(np.int32)
    state = SamplingState(
        params, seed=rid, sample_index=0, token_ids_np=tokens, num_prompt=3, vocab_size=VOCAB
    )
    return DraftRow(
        rid, tokens, 3, budget, depth, Speculation("tree", budget, rule), state, np.zeros(9, np.int32), 0
    )


def check(proposal: Proposal, request: DraftRow) -> None:
    n = len(proposal)
    assert n <= request.budget and len(proposal.parents) == n
    assert all(-1 <= p < i for i, p in enumerate(proposal.parents))
    assert all(0 <= t < VOCAB for t in proposal.tokens)
    assert max(proposal.depths(), default=0) <= request.max_depth
    for parent in set(proposal.parents):
        siblings = [t for t, p in zip(proposal.tokens, proposal.parents, strict=True) if p == parent]
        assert proposal.draw == "independent" or len(set(siblings)) == len(siblings)
    if proposal.q is not None:
        assert proposal.q.shape == (len(set(proposal.parents)), VOCAB)
        torch.testing.assert_close(proposal.q.sum(-1), torch.ones(len(proposal.q)))
        rows = dict(zip(proposal.parents, proposal.q_rows, strict=True))
        assert [rows[p] for p in proposal.parents] == list(proposal.q_rows), "siblings share a row"
        assert sorted(rows.values()) == list(range(len(rows)))
        assert all(proposal.q[r, t] > 0 for r, t in zip(proposal.q_rows, proposal.tokens, strict=True))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "greedy"), (0.8, "rejection"), (0.8, "coupled")])
def test_proposals_are_valid_and_of_many_shapes(draw: Draw, temperature: float, rule: str) -> None:
    proposer = TreeProposer(VOCAB, lambda tokens, n: (5, 3, 1)[:n], draw)
    params = SamplingParams(temperature=temperature, top_k=4)
    rows = [row(rid, params, rule, budget=b) for rid, b in enumerate([1, 4, 12, MAX_TREE_NODES] * 15)]
    proposals = proposer.propose(rows)
    for proposal, request in zip(proposals, rows, strict=True):
        check(proposal, request)
        sampled = rule == "rejection" and draw != "fixed" and len(proposal) > 0
        assert (proposal.q is not None) == sampled
        assert proposal.draw == (draw if sampled else "fixed")
    assert len({p.parents for p in proposals}) > 20
    assert {p.is_chain for p in proposals} == {True, False}
    assert min(map(len, proposals)) == 0
    assert proposer.propose(rows[:9])[3].tokens == proposals[3].tokens, "a function of request and length"


@pytest.mark.parametrize("draw", DRAWS)
def test_some_paths_are_accepted_and_some_are_not(draw: Draw) -> None:
    """Against a target that follows the oracle: paths of many lengths come out, and the output is the target's."""
    continuation = (5, 3, 1, 8, 2, 9)
    known = tuple((np.arange(6) * 7 % VOCAB).tolist())
    oracle = oracle_from_outputs({known[:3]: (*known[3:], *continuation)})
    proposer = TreeProposer(VOCAB, oracle, draw, sharpness=2.0)
    lengths = []
    for rid in range(60):
        request = row(rid, SamplingParams(temperature=0.0), "greedy")
        (proposal,) = proposer.propose([request])
        logits = torch.zeros(1 + len(proposal), VOCAB)
        for node, depth in enumerate([0, *proposal.depths()]):
            logits[node, continuation[depth]] = 1.0
        verified = verify_batch(
            logits, [VerifyRequest(request.sampling, proposal, 0, "greedy", request.token_ids_np, None)]
        )[0]
        assert not isinstance(verified, Exception)
        assert verified.token_ids == continuation[: len(verified.token_ids)]
        lengths.append(len(verified.path))
    assert len(set(lengths)) >= 4, lengths


def test_the_class_to_register_takes_the_vocabulary_from_the_engine() -> None:
    class Context:
        vocab_size = VOCAB

    made = tree_proposer(draw="independent", seed=3).create(Context())  # type: ignore[arg-type]
    assert (made.vocab_size, made.draw, made.seed) == (VOCAB, "independent", 3)

"""Verification on the device, in Triton's interpreter where there is no GPU, against the rules of `verify`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise.kernels.triton import verify as launchers
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.verify import DraftFields, draft_table
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, DrawKind, Proposal, Verification, chain
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch
from draftwise.verify.registry import get_rule
from draftwise.verify.triton import TritonRules

DEVICE = torch.device("cpu" if interpreted() else "cuda")
PROMPT = np.array([1, 2, 3], np.int32)
BINARY = (-1, -1, -1, 0, 0, 1, 3, 3)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def request(
    proposal: Proposal, rule: str, first_row: int, vocab: int, seed: int, temperature: float = 1.0
) -> VerifyRequest:
    state = SamplingState(
        SamplingParams(temperature=temperature),
        seed=seed,
        sample_index=seed % 3,
        token_ids_np=PROMPT,
        num_prompt=3,
        vocab_size=vocab,
    )
    return VerifyRequest(state, proposal, first_row, rule, PROMPT)


def drawn_tree(parents: tuple[int, ...], p: torch.Tensor, draw: DrawKind, seed: int) -> Proposal:
    """A tree whose children are drawn from something near the target's rows ``p`` [1 + nodes, V]."""
    draws = generator(seed)
    vocab = p.shape[1]
    with_children = sorted(set(parents))
    near = 0.8 * p[[1 + parent for parent in with_children]] + 0.2 / vocab
    tokens = []
    for parent in with_children:
        count = parents.count(parent)
        row = near[with_children.index(parent)]
        replace = draw == "independent"
        tokens.append(torch.multinomial(row, count, replacement=replace, generator=draws).tolist())
    in_order = [tokens[with_children.index(parent)].pop(0) for parent in parents]
    if draw == "fixed":
        return Proposal(tuple(in_order), parents, "test")
    q_rows = tuple(with_children.index(parent) for parent in parents)
    return Proposal(tuple(in_order), parents, "test", draw, near.to(DEVICE), q_rows)


def decided(logits: torch.Tensor, requests: list[VerifyRequest]) -> list[Verification]:
    """By the kernels; asserts that the rules in torch decide the same."""
    rules = [r.rule for r in requests]
    results = TritonRules().verify(logits.to(DEVICE), requests, rules)
    for rule in set(rules):
        members = [i for i, name in enumerate(rules) if name == rule]
        expected = get_rule(rule).verify(logits.to(DEVICE), [requests[i] for i in members])
        assert [results[i] for i in members] == expected, rule
    return results


SHAPES: list[tuple[str, tuple[int, ...], DrawKind]] = [
    (rule, shape, draw)
    for rule in ("rejection", "block")
    for shape in ((-1, 0, 1, 2), BINARY)
    for draw in ("independent", "without_replacement", "fixed")
]


@pytest.mark.parametrize("vocab", [5, 130])
@pytest.mark.parametrize(("rule", "parents", "draw"), SHAPES)
def test_rejection_and_block(rule: str, parents: tuple[int, ...], draw: DrawKind, vocab: int) -> None:
    """Requests of 0 to 8 nodes with the rows of others between theirs; paths of all lengths occur."""
    requests, first = [], 1
    logits = torch.randn((200, vocab), generator=generator(vocab))
    logits *= 5.0 if draw == "fixed" else 1.5  # so that point masses are accepted, too
    for seed in range(14):
        p = logits[first : first + 1 + len(parents)].softmax(-1)
        proposal = EMPTY_PROPOSAL if seed == 5 else drawn_tree(parents, p, draw, seed)
        if seed % 4 == 3:
            proposal = proposal.prefix(seed % 5)
        requests.append(request(proposal, rule, first, vocab, seed))
        first += len(proposal) + 1 + seed % 2
    assert len({len(result.path) for result in decided(logits, requests)}) > 1


@pytest.mark.parametrize("vocab", [3, 1030])
def test_greedy_and_coupled_chains_and_trees_together(vocab: int) -> None:
    requests, first = [], 0
    logits = torch.randn((120, vocab), generator=generator(vocab))
    logits[:, 1] += 7.0 if vocab > 3 else 0.5
    logits[2] = logits[2].round()
    for seed in range(12):
        parents = ((-1, 0, 1, 2), BINARY, ())[seed % 3]
        tokens = torch.randint(0, 3, (len(parents),), generator=generator(seed)).tolist()
        proposal = Proposal(tuple(tokens), parents, "test")
        requests.append(request(proposal, ("greedy", "coupled")[seed % 2], first, vocab, 2**64 - 1 - seed))
        first += len(parents) + 1
    assert len({len(result.path) for result in decided(logits, requests)}) > 1


@pytest.mark.parametrize("vocab", [7, 1030])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_typical_keeps_the_longest_of_likely_paths(vocab: int, temperature: float) -> None:
    """Chains and trees of likely tokens, and of some that are not; of two paths of one length the first one stays."""
    requests, first = [], 1
    logits = torch.randn((120, vocab), generator=generator(vocab)) * 2
    logits[:, vocab // 2] = -float("inf")
    best = logits.argsort(-1, descending=True)
    for seed in range(14):
        parents = ((-1, 0, 1, 2), BINARY, (-1, -1, 0, 1), ())[seed % 4]
        ranks = [
            vocab // 2 if not node and seed % 3 == 1 else (node + seed) % 3 // 2
            for node in range(len(parents))
        ]
        tokens = [int(best[first + 1 + parent, rank]) for parent, rank in zip(parents, ranks, strict=True)]
        proposal = Proposal(tuple(tokens), parents, "test")
        requests.append(request(proposal, "typical", first, vocab, seed, temperature))
        first += len(parents) + 1
    paths = {result.path for result in decided(logits, requests)}
    assert len({len(path) for path in paths}) > 2 and any(path[:1] == (1,) for path in paths)


def test_ties_and_exclusions() -> None:
    logits = torch.zeros((3, 9))
    logits[0, [4, 7]] = 1.0
    logits[1] = -float("inf")
    logits[1, 8] = -3.0
    requests = [request(EMPTY_PROPOSAL, "greedy", row, 9, 0) for row in range(3)]
    assert [result.token_ids for result in decided(logits, requests)] == [(4,), (8,), (0,)]
    sampled = [request(EMPTY_PROPOSAL, "rejection", 1, 9, seed) for seed in range(3)]
    assert {result.token_ids for result in decided(logits, sampled)} == {(8,)}


@pytest.mark.parametrize("part", [16, 64])
def test_large_vocabularies_are_cut_into_parts(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_PART", part)
    monkeypatch.setattr(launchers, "_BLOCK", 16)
    monkeypatch.setattr(launchers, "_SCRATCH_BYTES", 12 * 150)  # one tree at a time
    logits = torch.randn((60, 150), generator=generator(3))
    requests, first = [], 0
    for seed, rule in enumerate(("greedy", "coupled", "rejection", "block", "rejection", "block") * 2):
        parents = (-1, -1, 0) if seed > 5 else (-1, 0, 1)
        p = logits[first : first + 4].softmax(-1)
        draw: DrawKind = "fixed" if rule == "coupled" else "without_replacement"
        requests.append(request(drawn_tree(parents, p, draw, seed), rule, first, 150, seed))
        first += 4
    decided(logits, requests)


def test_a_q_that_runs_out_of_tokens() -> None:
    """Drawn without replacement from two tokens: the third child counts as drawn uniformly from the untried."""
    q = torch.zeros((1, 6), device=DEVICE)
    q[0, :2] = 0.5
    p = torch.tensor([0.02, 0.02, 0.06, 0.3, 0.3, 0.3])
    logits = p.log().expand(4, 6)
    proposal = Proposal((0, 1, 2), (-1, -1, -1), "test", "without_replacement", q, (0, 0, 0))
    requests = [request(proposal, "rejection", 0, 6, seed) for seed in range(24)]
    paths = [result.path for result in decided(logits, requests)]
    assert (2,) in paths and () in paths


def test_a_residual_without_weight_leaves_p() -> None:
    """q is p: a uniform that rejects nevertheless cannot come, so q is made larger by hand."""
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    proposal = chain((1,), "test", torch.tensor([[0.5, 1.5]], device=DEVICE))
    requests = [request(proposal, "rejection", 0, 2, seed) for seed in range(8)]
    results = decided(p.log(), requests)
    assert {result.path for result in results} == {(), (0,)}


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_rows_that_are_no_numbers(rule: str) -> None:
    logits = torch.zeros((2, 5), device=DEVICE)
    logits[0] = float("nan")
    answers = verify_batch(
        logits,
        [request(EMPTY_PROPOSAL, rule, row, 5, 1) for row in range(2)],
        kernels=TritonRules(),
    )
    assert isinstance(answers[0], Exception) and "not finite" in str(answers[0])
    assert isinstance(answers[1], Verification)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_chain_behind_a_row_that_is_no_numbers(rule: str, row: int, drawn: bool) -> None:
    """No draft is kept because of a row that says nothing, and nothing is drawn from it."""
    sure = torch.eye(5, device=DEVICE)[[1, 2, 3, 4]] * 80.0
    q = sure[:3].softmax(-1) if drawn else None
    logits = sure.clone()
    logits[row] = float("nan")
    [answer] = verify_batch(
        logits, [request(chain((1, 2, 3), "test", q), rule, 0, 5, 1)], kernels=TritonRules()
    )
    assert isinstance(answer, Exception) and "not finite" in str(answer)


def test_a_step_with_every_rule() -> None:
    """`verify_batch` gives the kernels what they know, and torch the rest; the answers are those of torch."""
    logits = torch.randn((30, 40), generator=generator(9)) * 2
    requests = []
    for i, rule in enumerate(("rejection", "typical", "coupled", "block", "greedy", "rejection")):
        tokens = torch.randint(0, 40, (4,), generator=generator(i)).tolist()
        shape = (-1, -1, 0, 0) if i % 2 else (-1, 0, 1, 2)
        proposal = Proposal(tuple(tokens), shape, "test")
        requests.append(request(proposal, rule, 5 * i, 40, i, 0.0 if i == 5 else 0.7 + 0.1 * i))
    with_kernels = verify_batch(logits.clone().to(DEVICE), requests, kernels=TritonRules())
    assert with_kernels == verify_batch(logits.clone().to(DEVICE), requests)
    plain = [r for r in requests if r.state.is_greedy]
    assert verify_batch(logits.clone().to(DEVICE), plain, kernels=TritonRules()) == verify_batch(
        logits.clone().to(DEVICE), plain
    )


def test_the_table_by_hand() -> None:
    row = DraftFields(4, 7, 0, 10, (5, 9), (-1, 0))
    assert draft_table([row]).tolist() == [[4, 2, 7, 0, 10, 0, 5, 9, -1, 0, 0, 0]]
    big = DraftFields(0, 2**64 - 1, 1, 3, (8,), (-1,), (4096,), True)
    assert draft_table([big], 2).tolist() == [[0, 1, -1, 1, 3, 1, 8, 0, -1, 0, 4096, 0]]

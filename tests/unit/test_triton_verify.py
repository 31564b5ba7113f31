"""Verification on the device, in Triton's interpreter where there is no GPU, against the rules of `verify`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.verify import Walk, argmax_rows, reject_chains, walk_trees
from draftwise.sampling.draw import pick
from draftwise.sampling.noise import SHARED, NoiseKey, gumbel, row_key
from draftwise.types import Proposal
from draftwise.verify.greedy import walk

DEVICE = torch.device("cpu" if interpreted() else "cuda")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def committed(result: Walk, r: int) -> tuple[list[int], list[int]]:
    length = int(result.accepted[r])
    return result.paths[r, :length].tolist(), result.tokens[r, : length + 1].tolist()


@pytest.mark.parametrize("vocab", [1, 50, 1024, 2500])
def test_argmax_and_ties(vocab: int) -> None:
    logits = torch.randint(0, 9, (4, vocab), generator=generator(vocab)).float()
    logits[3] = -float("inf")
    logits[3, vocab // 2] = -5.0
    assert argmax_rows(logits.to(DEVICE)).tolist() == logits.argmax(-1).tolist()
    assert argmax_rows(logits[:0].to(DEVICE)).shape == (0,)


def test_argmax_under_shared_noise() -> None:
    keys = [NoiseKey(seed, 0, SHARED, 7 * seed) for seed in range(8)]
    words = [row_key(*key) for key in keys]
    signed = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])
    logits = torch.randn((8, 1500), generator=generator(0))
    expected = (gumbel(keys, 1500) + logits).argmax(-1)
    assert argmax_rows(logits.to(DEVICE), signed.to(DEVICE)).tolist() == expected.tolist()


def test_walks_of_trees() -> None:
    """Random trees over few tokens, so that paths of every length are accepted; chains, and no tree at all."""
    draws = generator(1)
    requests, nodes = 12, 9
    counts = torch.randint(0, nodes + 1, (requests,), generator=draws, dtype=torch.int32)
    counts[0], counts[1] = 0, nodes
    tokens = torch.randint(0, 3, (requests, nodes), generator=draws)
    parents = torch.stack(
        [torch.randint(-1, max(i, 1) if i else 0, (requests,), generator=draws) for i in range(nodes)], 1
    ).to(torch.int32)
    wanted = torch.randint(0, 3, (requests, nodes + 1), generator=draws)
    parents[1] = torch.arange(-1, nodes - 1)
    wanted[1, :-1] = tokens[1]
    result = walk_trees(tokens.to(DEVICE), parents.to(DEVICE), counts.to(DEVICE), wanted.to(DEVICE))
    lengths = set()
    for r in range(requests):
        n = int(counts[r])
        proposal = Proposal(tuple(tokens[r, :n].tolist()), tuple(parents[r, :n].tolist()))
        expected = walk(proposal, wanted[r].tolist())
        assert committed(result, r) == (list(expected.path), list(expected.token_ids))
        lengths.add(len(expected.path))
    assert len(lengths) > 2 and nodes in lengths


@pytest.mark.parametrize("vocab", [7, 1100])
@pytest.mark.parametrize("sampled", [True, False])
def test_rejection_of_chains(vocab: int, sampled: bool) -> None:
    draws = generator(vocab)
    requests, nodes = 10, 4
    counts = torch.tensor([0, 4, 4, 4, 3, 2, 1, 4, 4, 4], dtype=torch.int32)
    rows = int((counts + 1).sum())
    p = torch.randn((rows, vocab), generator=draws).mul(2).softmax(-1)
    first_rows = torch.cumsum(torch.cat((torch.zeros(1), counts[:-1] + 1)), 0).long()
    q = torch.randn((requests * nodes, vocab), generator=draws).mul(2).softmax(-1)
    q_rows = torch.arange(requests) * nodes if sampled else torch.full((requests,), -1)
    for r in range(7):  # near p, so that drafts are kept; of the last of them, p itself
        n = int(counts[r])
        near = p[first_rows[r] : first_rows[r] + n]
        q[r * nodes : r * nodes + n] = near if r == 6 else 0.9 * near + 0.1 / vocab
    tokens = torch.multinomial(q, 1, generator=draws).view(requests, nodes)
    accept = torch.rand((requests, nodes), generator=draws, dtype=torch.float64) * (1 if sampled else 0.3)
    recover = torch.rand((requests, nodes + 1), generator=draws, dtype=torch.float64)
    arguments = (first_rows, q_rows, tokens, counts, accept, recover)
    result = reject_chains(
        p.to(DEVICE), q.to(DEVICE) if sampled else None, *[part.to(DEVICE) for part in arguments]
    )
    for r in range(requests):
        kept: list[int] = []
        weights = p[first_rows[r] + counts[r]]
        for i in range(int(counts[r])):
            x = int(tokens[r, i])
            here, drafted = p[first_rows[r] + i], q[r * nodes + i]
            if not float(accept[r, i]) * (float(drafted[x]) if sampled else 1.0) < float(here[x]):
                weights = (here - drafted).clamp(min=0) if sampled else here.clone()
                if not sampled:
                    weights[x] = 0
                break
            kept.append(x)
        last = pick(weights[None], [float(recover[r, len(kept)])])
        assert committed(result, r) == (list(range(len(kept))), kept + last)


def test_when_nothing_is_left_of_the_residual_p_is_drawn_from() -> None:
    """A uniform that rejects although p == q."""
    p = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]], device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    result = reject_chains(
        p,
        p[:1].clone(),
        zero,
        zero,
        torch.tensor([[1]], device=DEVICE),
        torch.ones(1, dtype=torch.int32, device=DEVICE),
        torch.ones((1, 1), dtype=torch.float64, device=DEVICE),
        torch.full((1, 2), 0.5, dtype=torch.float64, device=DEVICE),
    )
    assert committed(result, 0) == ([], [2])

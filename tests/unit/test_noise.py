"""Counter-based noise: known answers, uniformity, independence of everything that has its own key."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from draftwise.names import ACCEPT, DRAFT, RECOVER, SHARED
from draftwise.sampling import noise
from draftwise.sampling.noise import NoiseKey, gumbel, many_uniforms, row_key, uniform

EULER = 0.5772156649015329
N = 60_000
REL = 6 / math.sqrt(N)  # six standard errors of a correlation of N independent pairs


def test_integer_part_is_splitmix64() -> None:
    """Outputs of the published splitmix64 for seed 1234567 (used as a row key)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    want = np.array([x >> 24 for x in published], dtype=np.float32)
    assert np.array_equal(noise._bits_numpy([1234567], noise._tokens_numpy(4, None))[0], want)


@pytest.mark.parametrize("vocab", [1, 7, 4096, 40_000])
def test_numpy_and_torch_make_the_same_bits(vocab: int) -> None:
    rows = [row_key(seed, 0, DRAFT, 5, 1, 4) for seed in (0, 1, 2**64 - 1)] + [2**64 - 1, 2**63, 0]
    a = noise._bits_numpy(rows, noise._tokens_numpy(vocab, None))
    b = noise._bits_torch(rows, noise._tokens_torch(vocab, None, torch.device("cpu"))).to(torch.float32)
    assert np.array_equal(a, b.numpy())


def test_keys_are_distinct() -> None:
    fields = itertools.product(
        (0, 1, -1, 2**63), (0, 1), (DRAFT, ACCEPT, RECOVER), (0, 1, 2**20), (-1, 0, 62), (0, 7)
    )
    keys = [row_key(*f) for f in fields]
    shared = [row_key(s, n, SHARED, p, -1, 0) for s in (0, 1) for n in (0, 1) for p in (0, 1, 2)]
    assert len({*keys, *shared}) == len(keys) + len(shared)


@pytest.mark.parametrize("stream", [SHARED, DRAFT, ACCEPT, RECOVER])
def test_many_uniforms_at_once_are_the_same(stream: int) -> None:
    seeds = [0, 1, 7, 2**63, 2**64 - 1]
    samples, positions = [0, 1, 2, 2**16, 2**31], [0, 5, 4096, 2**31, 2**32 - 1]
    nodes, bases = [-1, 0, 3, 63, 200], [1, 5, 4090, 2**31, 2**32 - 1]
    one_by_one = [
        uniform(seed, sample, stream, position, node, base)
        for seed, sample, position, node, base in zip(seeds, samples, positions, nodes, bases, strict=True)
    ]
    assert many_uniforms(stream, seeds, samples, positions, nodes, bases) == one_by_one


def test_shared_stream_ignores_node_and_base() -> None:
    assert row_key(3, 1, SHARED, 9, 5, 7) == row_key(3, 1, SHARED, 9, -1, 0)
    assert row_key(3, 1, DRAFT, 9, 5, 7) != row_key(3, 1, DRAFT, 9, 5, 8) != row_key(3, 1, DRAFT, 9, 4, 8)


def test_a_row_does_not_depend_on_its_batch() -> None:
    keys = [NoiseKey(s, 0, SHARED, p) for s in range(5) for p in range(3)]
    together = gumbel(keys, 1003)
    for i, key in enumerate(keys):
        assert torch.equal(gumbel([key], 1003)[0], together[i])


def test_reduced_vocabulary_reads_the_targets_noise() -> None:
    """Column j stands for target token token_ids[j], in any order."""
    key = NoiseKey(4, 2, SHARED, 17)
    ids = torch.tensor([5, 900, 0, 33])
    assert torch.equal(gumbel([key], 1000, token_ids=ids)[0], gumbel([key], 1000)[0, ids])


def test_gumbel_distribution() -> None:
    g = gumbel([NoiseKey(11, 0, SHARED, p) for p in range(20)], 5000).double().numpy().ravel()
    assert np.isfinite(g).all()
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-6
    assert abs(g.mean() - EULER) < 6 * math.pi / math.sqrt(6 * g.size)


def test_extreme_values_are_resolved() -> None:
    """Smallest and largest 40-bit integers, and neighbours at the top: 1 - U never rounds to 0 or 1."""
    g = noise._gumbel_of_bits(torch.tensor([0.0, 1.0, 2.0, float(2**40 - 1)]))
    assert g.tolist()[:3] == pytest.approx([-math.log((k + 0.5) * 2**-40) for k in range(3)], rel=1e-6)
    assert math.isfinite(g[3]) and g[3] < -2.5


def test_argmax_of_logits_plus_gumbel_samples_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])
    picks = (logits + gumbel([NoiseKey(s, 0, SHARED, 3) for s in range(30_000)], 5)).argmax(-1)
    counts = torch.bincount(picks, minlength=5).numpy()
    expected = logits.double().softmax(-1).numpy() * 30_000
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-6


def uniforms(**varied: range) -> np.ndarray:
    base = {"seed": 1, "sample_index": 0, "stream": ACCEPT, "position": 10, "node": 0, "base": 8}
    (name, values), *_ = varied.items()
    return np.array([uniform(**{**base, name: v}) for v in values])


@pytest.mark.parametrize("field", ["seed", "sample_index", "position", "base"])
def test_uniform_over_neighbouring_keys(field: str) -> None:
    """Counting any one field up is as good as independent draws: level, spread and no serial correlation."""
    u = uniforms(**{field: range(20_000)})
    assert (u >= 0).all() and (u < 1).all()
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    counts = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-6


def test_no_correlation_between_neighbours() -> None:
    """Rows that differ by one in one field, and columns next to each other, are uncorrelated."""
    start = NoiseKey(7, 0, SHARED, 100)
    draft = start._replace(stream=DRAFT, node=1, base=99)
    pairs = [
        (start, start._replace(position=101)),
        (start, start._replace(seed=8)),
        (start, start._replace(sample_index=1)),
        (start, draft),
        (draft, draft._replace(stream=RECOVER)),
        (draft, draft._replace(node=2)),
        (draft, draft._replace(base=100)),
        (draft, draft._replace(position=101, base=100)),
    ]
    for a, b in pairs:
        x, y = np.exp(-np.exp(-gumbel([a, b], N).double().numpy()))
        assert abs(np.corrcoef(x, y)[0, 1]) < REL, (a, b)
        assert abs(np.corrcoef(x[:-1], y[1:])[0, 1]) < REL, (a, b)
    x = gumbel([start], N).double().numpy()[0]
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < REL


def test_bits_are_balanced() -> None:
    """Each of the 40 bits is set half of the time, over tokens and over positions."""
    counters = noise._tokens_torch(4096, None, torch.device("cpu"))
    over_tokens = noise._bits_torch([row_key(3, 0, SHARED, 5, -1, 0)], counters)[0]
    over_rows = noise._bits_torch([row_key(3, 0, SHARED, p, -1, 0) for p in range(4096)], counters[:1])[:, 0]
    for bits in (over_tokens, over_rows):
        ones = ((bits[:, None] >> torch.arange(40)) & 1).double().mean(0)
        assert float((ones - 0.5).abs().max()) < 6 * 0.5 / 64

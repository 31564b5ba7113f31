"""Drawing: inverse CDF, draft tokens and siblings, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draftwise.names import DRAFT, SHARED
from draftwise.sampling.draw import draft_children, draft_tokens, draws_from_q, pick
from draftwise.sampling.logits import LogitsRow
from draftwise.sampling.logprobs import token_logprobs
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.rows import SortedRows, argmax_rows
from draftwise.sampling.state import SamplingState

V = 40
IDS = np.array([1, 2, 3], dtype=np.int32)


def row(seed: int = 0, mask: torch.Tensor | None = None, vocab: int = V, **params: object) -> LogitsRow:
    state = SamplingState(
        SamplingParams(**params), seed=seed, sample_index=0, token_ids_np=IDS, num_prompt=2, vocab_size=vocab
    )
    return LogitsRow(state, (), IDS, mask)


def draft(logits: torch.Tensor, rows: Sequence[LogitsRow], rules: Sequence[str], **kw: object) -> tuple:
    n = len(rows)
    return draft_tokens(logits, rows, rules=rules, positions=[3] * n, nodes=[0] * n, bases=[3] * n, **kw)


class TestPick:
    @pytest.mark.parametrize("vocab", [1, 5, 64, 65, 128, 1000, 4099])
    def test_equals_a_running_sum(self, vocab: int) -> None:
        gen = torch.Generator().manual_seed(vocab)
        weights = torch.rand(50, vocab, generator=gen)
        weights[weights < 0.3] = 0.0
        weights[:, -1] += 0.01
        us = torch.rand(50, generator=gen, dtype=torch.float64).tolist()
        for i, got in enumerate(pick(weights, us)):
            sums = np.cumsum(weights[i].double().numpy())
            want = int(np.searchsorted(sums, us[i] * sums[-1], side="right"))
            # block sums are float32: within 1e-6 of a border either neighbour is right
            near = abs(sums[min(want, got)] / sums[-1] - us[i]) < 1e-6
            assert got == want or near
            assert weights[i, got] > 0

    @pytest.mark.parametrize("vocab", [1, 63, 64, 65, 128, 4096, 4099])
    def test_a_row_is_picked_alike_alone_and_among_many(self, vocab: int) -> None:
        gen = torch.Generator().manual_seed(vocab)
        weights = (torch.randn(40, vocab, generator=gen) * 4).softmax(dim=-1)
        weights[3] = 0.0
        weights[5, : vocab // 2] = 0.0
        us = torch.rand(40, generator=gen, dtype=torch.float64).tolist()
        us[7], us[8] = 0.0, 1.0 - 2.0**-53
        alone = [pick(weights[i : i + 1], [us[i]])[0] for i in range(40)]
        assert pick(weights, us) == alone
        assert alone[3] == -1

    def test_borders(self) -> None:
        weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]] * 4)
        assert pick(weights, [0.0, 0.5 - 1e-12, 0.5, 1.0 - 2.0**-53]) == [0, 0, 2, 2]
        assert pick(torch.zeros(1, 100), [0.3]) == [-1]
        wide = torch.zeros(1, 300)
        wide[0, [63, 64, 299]] = torch.tensor([1.0, 1.0, 2.0])
        assert [pick(wide, [u])[0] for u in (0.0, 0.2499, 0.25, 0.4999, 0.5, 0.999999999)] == [
            63,
            63,
            64,
            64,
            299,
            299,
        ]

    def test_rare_tokens_keep_their_share(self) -> None:
        """1e-9 at the end of a row of mass 1: a float32 running sum would never reach it."""
        weights = torch.full((1, 1000), 1e-3)
        weights[0, 999] = 1e-9
        edge = 0.999 / (0.999 + 1e-9)
        assert pick(weights, [edge + 5e-10]) == [999]
        assert pick(weights, [edge - 5e-8]) == [998]


class TestDraftTokens:
    def test_greedy_fast_path_and_vocab_map(self) -> None:
        logits = torch.randn(3, V)
        best = logits.argmax(-1).tolist()
        rows = [row(temperature=0), row(temperature=0, seed=1), row(top_k=1)]
        assert draft(logits, rows, ["greedy", "rejection", "coupled"]) == (best, None)
        assert draft(logits, [row()] * 3, ["rejection"] * 3, method="greedy") == (best, None)
        assert draft(logits, [row()] * 3, ["typical", "synthetic", "greedy"]) == (best, None)
        vocab_map = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:V]
        mapped = [int(vocab_map[b]) for b in best]
        rows = [row(temperature=0, vocab=100)] * 3
        assert draft(logits, rows, ["greedy"] * 3, vocab_map=vocab_map) == (mapped, None)

    def test_sampled_from_the_reported_q_with_draft_noise(self) -> None:
        logits = torch.randn(5, V)
        rows = [row(seed, temperature=0.7, top_p=0.9) for seed in range(5)]
        tokens, q = draft(logits.clone(), rows, ["rejection", "block"] * 2 + ["third-party"])
        assert q is not None and q.dtype == torch.float32
        assert torch.allclose(q.sum(-1), torch.ones(5))
        assert tokens == pick(q, [uniform(seed, 0, DRAFT, 3, 0, 3) for seed in range(5)])

    def test_coupled_reads_the_shared_noise(self) -> None:
        logits = torch.randn(2, V)
        tokens, q = draft(logits.clone(), [row(5), row(6)], ["coupled"] * 2)
        want = (logits + gumbel([NoiseKey(s, 0, SHARED, 3) for s in (5, 6)], V)).argmax(-1).tolist()
        assert (tokens, q) == (want, None)

    def test_mixed_rows_equal_each_alone(self) -> None:
        logits = torch.randn(4, V)
        rows = [row(0), row(1), row(2, temperature=0, logit_bias={3: 9.0}), row(3, top_k=4)]
        rules = ["rejection", "coupled", "rejection", "block"]
        tokens, q = draft(logits.clone(), rows, rules)
        assert q is not None
        for i in range(4):
            alone, q_alone = draft(logits[i : i + 1].clone(), [rows[i]], [rules[i]])
            assert alone == [tokens[i]]
            sampled = draws_from_q(rows[i].state, rules[i])
            assert sampled == (q_alone is not None)
            if q_alone is not None:
                assert torch.equal(q_alone[0], q[i])

    def test_reduced_vocabulary(self) -> None:
        """Parameters speak of target ids; q is over the target's vocabulary; noise is the target's."""
        vocab_map = torch.tensor([7, 2, 30, 11])
        logits = torch.randn(2, 4)
        rows = [row(1, logit_bias={30: 50.0}), row(2, logit_bias={30: 50.0})]
        tokens, q = draft(logits.clone(), rows, ["rejection", "coupled"], vocab_map=vocab_map)
        assert tokens == [30, 30] and q is not None
        assert q.shape == (2, V)
        assert (q[0] > 0).nonzero().flatten().tolist() == sorted(vocab_map.tolist())
        full = torch.full((1, V), -math.inf)
        full[0, vocab_map] = logits[0]
        want = int((full + gumbel([NoiseKey(1, 0, SHARED, 3)], V)).argmax())
        assert draft(logits[:1].clone(), [row(1)], ["coupled"], vocab_map=vocab_map)[0] == [want]

    def test_never_fails(self) -> None:
        """Nothing left to draw, or a processor that raises: some honest distribution."""

        def boom(ids: object, logits: object) -> torch.Tensor:
            raise RuntimeError

        nothing = torch.zeros(V, dtype=torch.bool)
        rows = [row(0, mask=nothing), row(1, logits_processors=[boom]), row(2, mask=nothing, temperature=0)]
        logits = torch.randn(3, V)
        tokens, q = draft(logits.clone(), rows, ["rejection"] * 3)
        assert q is not None and torch.isfinite(q).all()
        assert all(0 <= t < V for t in tokens)
        assert torch.allclose(q[0], torch.full((V,), 1 / V))
        assert torch.allclose(q[1], logits[1].softmax(-1))


class TestDraftChildren:
    def children(
        self, logits: torch.Tensor, rows: list[LogitsRow], rules: list[str], counts: list[int], **kw: object
    ):
        n = len(rows)
        return draft_children(
            logits, rows, rules=rules, positions=[3] * n, parents=[-1] * n, bases=[3] * n, counts=counts, **kw
        )  # fmt: skip

    def test_each_kind(self) -> None:
        logits = torch.randn(3, V)
        rows = [row(0, temperature=0), row(1), row(2)]
        out = self.children(logits.clone(), rows, ["rejection", "coupled", "rejection"], [3, 2, 4])
        assert out.tokens[0] == logits[0].topk(3).indices.tolist()
        shared = logits[1] + gumbel([NoiseKey(1, 0, SHARED, 3)], V)[0]
        assert out.tokens[1] == shared.topk(2).indices.tolist()
        own = logits[2] + gumbel([NoiseKey(2, 0, DRAFT, 3, -1, 3)], V)[0]
        assert out.tokens[2] == own.topk(4).indices.tolist()
        assert out.draws == ["fixed", "fixed", "without_replacement"]
        assert out.q is not None and torch.allclose(out.q[2], logits[2].softmax(-1))

    def test_no_child_without_probability(self) -> None:
        vocab_map = torch.tensor([3, 9, 12])
        rows = [row(0, top_k=2), row(1), row(2, allowed_token_ids=[9, 5])]
        out = self.children(torch.randn(3, 3), rows, ["rejection"] * 3, [5, 5, 5], vocab_map=vocab_map)
        assert [len(t) for t in out.tokens] == [2, 3, 1]
        assert set(out.tokens[1]) == {3, 9, 12} and out.tokens[2] == [9]

    def test_first_two_follow_the_law_without_replacement(self) -> None:
        q = torch.tensor([0.5, 0.3, 0.15, 0.05])
        n = 20_000
        rows = [row(seed, vocab=4) for seed in range(n)]
        out = self.children(q.log().expand(n, 4).clone(), rows, ["rejection"] * n, [2] * n)
        counts = np.zeros((4, 4))
        for a, b in out.tokens:
            counts[a, b] += 1
        exact = np.array([[0 if a == b else q[a] * q[b] / (1 - q[a]) for b in range(4)] for a in range(4)])
        expected = exact[exact > 0] * n
        chi2 = ((counts[exact > 0] - expected) ** 2 / expected).sum()
        assert counts.trace() == 0 and chi2 < 11 + 10 * math.sqrt(22)


def test_row_searches() -> None:
    x = torch.randn(6, 33)
    x[2, [4, 9]] = 50.0
    x[3, 5:] = -math.inf
    assert argmax_rows(x) == [int(r.argmax()) for r in x] and argmax_rows(x)[2] == 4
    assert argmax_rows(x.bfloat16())[2] == 4
    for width in (1, 7, 33):
        assert torch.equal(SortedRows(x).head(width), x.sort(-1, descending=True).values[:, :width])
    assert torch.equal(SortedRows(x).whole([4, 1]), x[[4, 1]].sort(-1, descending=True).values)


class TestLogprobs:
    def test_values_and_ranks(self) -> None:
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
        want = logits.double().log_softmax(-1)
        for k in (0, 5, -1, 1000):
            out = token_logprobs(logits, [3, 0, 39, 7], k)
            for i, entry in enumerate(out):
                token = [3, 0, 39, 7][i]
                assert entry.token_id == token
                assert entry.logprob == pytest.approx(float(want[i, token]), abs=1e-5)
                assert entry.rank == int((want[i] > want[i, token]).sum()) + 1
                n = V if k < 0 else min(k, V)
                assert entry.top_ids == tuple(want[i].topk(n).indices.tolist())
                assert list(entry.top_logprobs) == pytest.approx(want[i].topk(n).values.tolist(), abs=1e-5)
        assert token_logprobs(logits[:0], [], 5) == []

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        logits = torch.randn(37, 517)
        together = token_logprobs(logits, list(range(37)), 3)
        assert [token_logprobs(logits[i : i + 1], [i], 3)[0] for i in range(37)] == together

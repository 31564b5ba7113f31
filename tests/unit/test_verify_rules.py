"""Each rule on cases small enough to check by hand; the distributions are in tests/statistical."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftwise.config.synthetic import rates_of_length
from draftwise.errors import ConfigError, RequestError
from draftwise.names import ACCEPT, SHARED
from draftwise.sampling.masks import pack
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, Proposal, Verification, chain
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.batch import verify_batch
from draftwise.verify.rates import SyntheticAcceptance
from draftwise.verify.registry import get_rule, register_verifier, verifier_names
from draftwise.verify.typical import TypicalRule

V = 8
PROMPT = np.array([1, 2, 3], dtype=np.int32)
NEG = float("-inf")


def make_state(seed: int = 0, vocab: int = V, **params: object) -> SamplingState:
    return SamplingState(
        SamplingParams(**params),
        seed=seed,
        sample_index=0,
        token_ids_np=PROMPT,
        num_prompt=3,
        vocab_size=vocab,
    )


def request(proposal: Proposal, rule: str, first_row: int = 0, **params: object) -> VerifyRequest:
    seed = params.pop("seed_", 0)
    return VerifyRequest(make_state(seed, **params), proposal, first_row, rule, PROMPT)


def peaked(*tokens: int, height: float = 30.0) -> torch.Tensor:
    """Logits rows [len(tokens), V] whose probability is all but entirely on one token each."""
    out = torch.zeros(len(tokens), V)
    out[range(len(tokens)), list(tokens)] = height
    return out


TREE = Proposal((5, 7, 1, 2, 4), (-1, -1, 0, 1, 3), "test")  # root -> {5 -> 1, 7 -> 2 -> 4}


class TestGreedy:
    @pytest.mark.parametrize(
        ("wanted", "path", "tokens"),
        [
            ((5, 6, 7, 0), (0, 1, 2), (5, 6, 7, 0)),  # all kept: bonus
            ((5, 6, 1, 0), (0, 1), (5, 6, 1)),
            ((4, 6, 7, 0), (), (4,)),
            ((5, 1, 7, 0), (0,), (5, 1)),  # a match after the first mismatch does not count
        ],
    )
    def test_chain(self, wanted: tuple[int, ...], path: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        [out] = verify_batch(peaked(*wanted), [request(chain((5, 6, 7), "t"), "greedy", temperature=0)])
        assert out == Verification(path, tokens)

    @pytest.mark.parametrize(
        ("wanted", "path", "tokens"),
        [
            # rows: root, after 5, after 7, after 5-1, after 7-2, after 7-2-4
            ((7, 0, 2, 0, 4, 6), (1, 3, 4), (7, 2, 4, 6)),
            ((5, 1, 2, 6, 4, 6), (0, 2), (5, 1, 6)),
            ((5, 2, 2, 6, 4, 6), (0,), (5, 2)),
            ((3, 1, 2, 6, 4, 6), (), (3,)),
            ((7, 0, 2, 0, 3, 6), (1, 3), (7, 2, 3)),
        ],
    )
    def test_tree(self, wanted: tuple[int, ...], path: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        [out] = verify_batch(peaked(*wanted), [request(TREE, "greedy", temperature=0)])
        assert out == Verification(path, tokens)

    @pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
    def test_temperature_zero_is_greedy_under_every_lossless_rule(self, rule: str) -> None:
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
        best = logits.argmax(-1).tolist()
        q = torch.full((3, V), 1 / V)
        req = request(chain((best[0], best[1], (best[2] + 1) % V), "t", q), rule, temperature=0)
        [out] = verify_batch(logits, [req])
        assert out == Verification((0, 1), tuple(best[:3]))

    def test_empty_proposal_and_rows_anywhere(self) -> None:
        logits = torch.cat([peaked(0, 0), peaked(3), peaked(0), peaked(5, 6, 4)])
        reqs = [
            request(chain((5, 6), "t"), "greedy", 4, temperature=0),
            request(EMPTY_PROPOSAL, "greedy", 2, temperature=0),
        ]
        assert verify_batch(logits, reqs) == [Verification((0, 1), (5, 6, 4)), Verification((), (3,))]

    def test_ties_go_to_the_lowest_token(self) -> None:
        for rows in (1, 7):
            logits = torch.zeros(rows, V)
            logits[:, [3, 6]] = 2.0
            reqs = [request(EMPTY_PROPOSAL, "greedy", r, temperature=0) for r in range(rows)]
            assert all(out == Verification((), (3,)) for out in verify_batch(logits, reqs))

    def test_wrong_row_is_never_read(self) -> None:
        """Rows of branches that were not taken may hold anything."""
        logits = peaked(7, 0, 2, 0, 4, 6)
        logits[[1, 3]] = float("nan")
        [out] = verify_batch(logits, [request(TREE, "greedy", temperature=0)])
        assert out == Verification((1, 3, 4), (7, 2, 4, 6))


class TestRejection:
    def test_uniform_below_the_ratio_accepts(self) -> None:
        """The decision is exactly u < p/q with the documented key."""
        q = torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0]])
        p = torch.tensor([[0.2, 0.8, 0, 0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0, 0, 0]])
        seen = set()
        for seed in range(50):
            [out] = verify_batch(p.log(), [request(chain((0,), "t", q), "rejection", seed_=seed)])
            kept = uniform(seed, 0, ACCEPT, 3, 0, 3) < 0.4
            # a rejected 0 leaves max(p - q, 0), which is all on token 1
            assert out == (Verification((0,), (0, 2)) if kept else Verification((), (1,)))
            seen.add(kept)
        assert seen == {True, False}

    def test_equal_distributions_keep_everything(self) -> None:
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3))
        q = logits[:3].softmax(-1)
        for seed in range(30):
            [out] = verify_batch(logits.clone(), [request(chain((1, 2, 3), "t", q), "rejection", seed_=seed)])
            assert isinstance(out, Verification)
            assert out.path == (0, 1, 2)

    def test_token_the_target_excludes_is_never_kept(self) -> None:
        logits = torch.zeros(2, V)
        logits[0, 4] = NEG
        q = torch.zeros(1, V)
        q[0, 4] = 1.0
        for proposal in (chain((4,), "t", q), chain((4,), "t")):
            for seed in range(30):
                [out] = verify_batch(logits.clone(), [request(proposal, "rejection", seed_=seed)])
                assert isinstance(out, Verification)
                assert out.path == () and out.token_ids[0] != 4

    def test_empty_residual_falls_back_to_p(self) -> None:
        """p(x) = 0 forces rejection although p - q has no positive part (p and q disagree by rounding only)."""
        p = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0, 0, 0]])
        q = torch.tensor([[1.0, 1e-12, 0, 0, 0, 0, 0, 0]])
        [out] = verify_batch(p.log(), [request(chain((1,), "t", q), "rejection")])
        assert out == Verification((), (0,))


class TestCoupled:
    def test_emits_the_argmax_of_logits_plus_shared_noise(self) -> None:
        logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5))
        noise = gumbel([NoiseKey(9, 0, SHARED, 3 + i) for i in range(3)], V)
        want = (logits + noise).argmax(-1).tolist()
        [plain] = verify_batch(logits.clone(), [request(EMPTY_PROPOSAL, "coupled", seed_=9)])
        assert plain == Verification((), (want[0],))
        [all_kept] = verify_batch(logits.clone(), [request(chain(want[:2], "t"), "coupled", seed_=9)])
        assert all_kept == Verification((0, 1), tuple(want))
        wrong = (want[0] + 1) % V
        [none_kept] = verify_batch(
            logits.clone(), [request(chain((wrong, want[1]), "t"), "coupled", seed_=9)]
        )
        assert none_kept == Verification((), (want[0],))


class TestTypical:
    def test_threshold(self) -> None:
        """Entropy 0.6109 nats: delta e^-H = .163, so epsilon .09 is the threshold; .08 fails, .12 passes."""
        p = torch.tensor([[0.8, 0.08, 0.12, 0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0, 0, 0]])
        for token, kept in ((0, True), (1, False), (2, True)):
            [out] = verify_batch(p.log(), [request(chain((token,), "t"), "typical")])
            assert isinstance(out, Verification)
            assert out.path == ((0,) if kept else ())

    def test_unsure_distributions_pass_unlikely_tokens(self) -> None:
        uniform_logits = torch.zeros(2, V)  # H = log 8: threshold .3 / 8 < 1/8
        [out] = verify_batch(uniform_logits, [request(chain((6,), "t"), "typical")])
        assert isinstance(out, Verification)
        assert out.path == (0,)

    def test_longest_path_of_a_tree_and_greedy_bonus(self) -> None:
        logits = torch.zeros(6, V)
        logits[5] = peaked(6)[0]
        logits[3] = peaked(0)[0]
        [out] = verify_batch(logits, [request(TREE, "typical", temperature=0)])
        assert out == Verification((1, 3, 4), (7, 2, 4, 6))

    def test_bad_thresholds(self) -> None:
        with pytest.raises(ConfigError, match=r"epsilon .* 1\.5"):
            TypicalRule(epsilon=1.5)


class TestSynthetic:
    def test_rates(self) -> None:
        assert rates_of_length(2.6, 3) == (1.0, 0.6, 0.0)
        assert rates_of_length(4, 3) == (1.0, 1.0, 1.0)
        assert rates_of_length(1, 2) == (0.0, 0.0)
        assert SyntheticAcceptance((0.5, 0.5)).rates == (0.5, 0.5)
        for rates in ((0.5, 0.6, 0.1), (1.2, 0.1, 0.0), (float("nan"), 0.0, 0.0)):
            with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
                SyntheticAcceptance(rates)

    def test_mean_length_and_own_tokens(self) -> None:
        n = 2000
        reqs = [request(chain((5, 6, 7), "t"), "synthetic", 4 * r, seed_=r, temperature=0) for r in range(n)]
        outs = verify_batch(
            peaked(*([1, 2, 3, 4] * n)), reqs, synthetic=SyntheticAcceptance(rates_of_length(2.6, 3))
        )
        lengths = [len(out.token_ids) for out in outs if isinstance(out, Verification)]
        assert set(lengths) == {2, 3}
        assert abs(sum(lengths) / n - 2.6) < 6 * math.sqrt(0.24 / n)
        assert outs[0] in (Verification((0,), (5, 2)), Verification((0, 1), (5, 6, 3)))

    def test_needs_rates(self) -> None:
        with pytest.raises(ConfigError, match="synthetic_acceptance"):
            verify_batch(peaked(1), [request(EMPTY_PROPOSAL, "synthetic")])


class KeepNothing(Rule):
    lossless = True

    def verify(self, logits: torch.Tensor, requests: list[VerifyRequest]) -> list[Verification]:
        return [Verification((), (int(logits[r.first_row].argmax()),)) for r in requests]


class TestRegistry:
    def test_third_party_rule(self) -> None:
        register_verifier("keep_nothing", KeepNothing)
        register_verifier("keep_nothing", KeepNothing)  # importing a plug-in twice is no error
        assert "keep_nothing" in verifier_names()
        [out] = verify_batch(peaked(5, 6), [request(chain((5,), "t"), "keep_nothing")])
        assert out == Verification((), (5,))

    def test_refusals(self) -> None:
        with pytest.raises(ConfigError, match="exists already"):
            register_verifier("block", KeepNothing)
        with pytest.raises(ConfigError, match=r"did you mean 'rejection'\?"):
            get_rule("rejecton")
        register_verifier("no_rule", dict)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is a dict"):
            get_rule("no_rule")


def boom(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom")


def boom_after_six(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if token_ids[-1] == 6:
        raise RuntimeError("six")
    return logits


class TestBatch:
    def test_a_step_of_prompt_chunks_only(self) -> None:
        assert verify_batch(torch.zeros(0, V), []) == []

    def test_a_processor_that_raises_fails_only_its_request(self) -> None:
        logits = peaked(5, 6, 7, 5, 1, 2)
        reqs = [
            request(chain((5,), "t"), "rejection", 0, logits_processors=[boom]),
            request(EMPTY_PROPOSAL, "greedy", 2, temperature=0),
            request(chain((5,), "t"), "coupled", 3),
        ]
        outs = verify_batch(logits, reqs)
        assert isinstance(outs[0], RuntimeError)
        assert outs[1] == Verification((), (7,))
        assert outs[2] == Verification((0,), (5, 1))

    @pytest.mark.parametrize("first", [False, True])
    def test_logprobs_beside_a_processor_that_raises(self, first: bool) -> None:
        """Both asked for logprobs: whose request goes on gets its own."""
        logits = torch.randn(6, V, generator=torch.Generator().manual_seed(6))
        logits[[0, 2, 4], [5, 5, 5]] = 30.0
        raw = logits.log_softmax(-1)
        healthy_row, failing_row = (2, 0) if first else (0, 4)
        healthy = request(chain((5,), "t"), "greedy", healthy_row, temperature=0, logprobs=2)
        failing = request(
            chain((5,), "t"), "greedy", failing_row, temperature=0, logprobs=1, logits_processors=[boom]
        )
        reqs = [failing, healthy] if first else [healthy, failing]
        outs = verify_batch(logits.clone(), reqs)
        out, error = (outs[1], outs[0]) if first else (outs[0], outs[1])
        assert isinstance(error, RuntimeError) and isinstance(out, Verification)
        assert out.path == (0,) and out.logprobs is not None
        for i, entry in enumerate(out.logprobs):
            assert entry.token_id == out.token_ids[i] and len(entry.top_ids) == 2
            assert entry.logprob == pytest.approx(float(raw[healthy_row + i, entry.token_id]))

    def test_an_error_off_the_accepted_path_is_none(self) -> None:
        """Without speculation nobody would ever have called the processor there."""
        off = request(chain((6, 1), "t"), "greedy", temperature=0, logits_processors=[boom_after_six])
        assert verify_batch(peaked(5, 1, 2), [off]) == [Verification((), (5,))]
        on = request(chain((6, 1), "t"), "greedy", temperature=0, logits_processors=[boom_after_six])
        assert verify_batch(peaked(6, 1, 2), [on]) == [Verification((), (6,))]

    @pytest.mark.parametrize("logprobs", [None, 2])
    def test_an_accepted_path_ends_before_an_error(self, logprobs: int | None) -> None:
        """Its last token may be the text's last: nobody asks for the row behind it. Else the next step fails."""
        tree = Proposal((4, 5, 6, 1), (-1, -1, 1, 2), "t")
        one = request(tree, "greedy", temperature=0, logits_processors=[boom_after_six], logprobs=logprobs)
        [out] = verify_batch(peaked(5, 2, 6, 1, 3), [one])
        assert isinstance(out, Verification) and (out.path, out.token_ids) == ((1,), (5, 6))
        assert (None if out.logprobs is None else [entry.token_id for entry in out.logprobs]) == (
            None if logprobs is None else [5, 6]
        )

    @pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "typical"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_nothing_allowed(self, rule: str, temperature: float) -> None:
        state = make_state(temperature=temperature)
        for row in (0, 1):
            masks = torch.ones(2, V, dtype=torch.bool)
            masks[row] = False
            for token in (5, 4):
                req = VerifyRequest(state, chain((token,), "t"), 0, rule, PROMPT, pack(masks.numpy()))
                [out] = verify_batch(peaked(5, 6, height=80.0), [req])
                if row == 0:
                    assert isinstance(out, RequestError)
                else:  # behind the draft, which stays
                    assert out == Verification((), (5,))

    @pytest.mark.parametrize("temperature", [0, 1])
    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    @pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
    def test_logits_that_are_not_finite(self, rule: str, value: float, temperature: float) -> None:
        """A broken model fails its request, not the step, and never commits token -1."""
        logits = torch.cat([torch.full((1, V), value), peaked(0, 6, height=80.0)])
        broken = request(EMPTY_PROPOSAL, rule, 0, temperature=temperature)
        fine = request(chain((0,), "t"), rule, 1, temperature=temperature)
        outs = verify_batch(logits, [broken, fine])
        assert isinstance(outs[0], RequestError) and "not finite" in str(outs[0])
        assert outs[1] == Verification((0,), (0, 6))

    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    @pytest.mark.parametrize("row", range(4))
    @pytest.mark.parametrize("drawn", [False, True])
    def test_a_chain_behind_logits_that_are_not_finite(self, drawn: bool, row: int, value: float) -> None:
        """`block` looks at all rows: no draft is kept because one of them says nothing."""
        logits = peaked(5, 6, 7, 4, height=80.0)
        logits[row] = value
        q = peaked(5, 6, 7).softmax(-1) if drawn else None
        [out] = verify_batch(logits, [request(chain((5, 6, 7), "t", q), "block")])
        assert isinstance(out, RequestError) and "not finite" in str(out)

    @pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
    def test_a_processor_that_makes_nan_is_named(self, rule: str) -> None:
        def halves(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits * float("nan")

        made = request(EMPTY_PROPOSAL, rule, 0, temperature=int(rule != "greedy"), logits_processors=[halves])
        [out] = verify_batch(peaked(5), [made])
        assert isinstance(out, RequestError)
        assert "not finite" in str(out) and "likely cause is logits processor 'halves'" in str(out)

    def test_masks_hold_per_position(self) -> None:
        masks = torch.ones(3, V, dtype=torch.bool)
        masks[1, 6] = False
        packed = pack(masks.numpy())
        req = VerifyRequest(make_state(temperature=0), chain((5, 6), "t"), 0, "greedy", PROMPT, packed)
        logits = peaked(5, 6, 7)
        logits[1, 2] = 20.0
        assert verify_batch(logits, [req]) == [Verification((0,), (5, 2))]

    def test_mixed_rules_equal_each_alone(self) -> None:
        gen = torch.Generator().manual_seed(11)
        rules = ["rejection", "block", "coupled", "greedy", "rejection", "typical"]
        reqs, row = [], 0
        for i, rule in enumerate(rules * 3):
            n = i % 4
            q = torch.randn(n, V, generator=gen).softmax(-1)
            tokens = [int(t) for t in torch.multinomial(q, 1, generator=gen)[:, 0]] if n else []
            params = {
                "temperature": 0.0 if rule == "greedy" else 0.7,
                "top_p": [1.0, 0.9][i % 2],
                "top_k": [0, 5][i % 2],
            }
            reqs.append(request(chain(tokens, "t", q if n else None), rule, row, seed_=i, **params))
            row += n + 1
        logits = torch.randn(row, V, generator=gen) * 2
        together = verify_batch(logits.clone(), reqs)
        alone = [verify_batch(logits.clone(), [req])[0] for req in reqs]
        assert together == alone

    def test_logprobs_are_raw_and_follow_the_path(self) -> None:
        logits = torch.randn(6, V, generator=torch.Generator().manual_seed(2))
        logits[0, 7] = logits[2, 2] = 9.0
        logits[4] = NEG
        logits[4, 0] = 0.0
        raw = logits.log_softmax(-1)
        for k in (0, 2, -1):
            req = request(TREE, "greedy", temperature=0, logprobs=k, logit_bias={1: -5.0})
            other = request(EMPTY_PROPOSAL, "coupled", 5, logprobs=3)
            [out, extra] = verify_batch(logits.clone(), [req, other])
            assert isinstance(out, Verification) and isinstance(extra, Verification)
            assert out.path == (1, 3) and out.token_ids == (7, 2, 0)
            assert out.logprobs is not None and extra.logprobs is not None
            for entry, row, token in zip(out.logprobs, (0, 2, 4), (7, 2, 0), strict=True):
                assert (entry.token_id, entry.rank) == (token, 1)
                assert entry.logprob == pytest.approx(float(raw[row, token]))
                assert len(entry.top_ids) == len(entry.top_logprobs) == (V if k < 0 else k)
            [alone] = extra.logprobs
            assert alone.token_id == extra.token_ids[0] and len(alone.top_ids) == 3
            assert alone.logprob == pytest.approx(float(raw[5, alone.token_id]))

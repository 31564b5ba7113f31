"""What the rules in torch decide, exactly: every branch of a decision with its probability, found by looking for the
uniform at which it changes, and the weights that the last token is drawn from. No samples, no kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from draftwise.names import ACCEPT, RECOVER, SHARED
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, DrawKind, Proposal, Verification, chain
from draftwise.verify import common, rejection
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.block import BlockRule
from draftwise.verify.rates import SyntheticAcceptance
from draftwise.verify.registry import get_rule
from draftwise.verify.synthetic import SyntheticRule
from draftwise.verify.typical import TypicalRule

PROMPT = np.array([1, 0, 2, 1, 0], dtype=np.int32)
BASE = len(PROMPT)
SEED, SAMPLE = 9, 2
ALMOST_ONE = 1.0 - 1e-12
Path = tuple[int, ...]
Law = dict[Path, float]


def request(proposal: Proposal, vocab: int, first_row: int = 0, temperature: float = 1.0) -> VerifyRequest:
    state = SamplingState(
        SamplingParams(temperature=temperature),
        seed=SEED,
        sample_index=SAMPLE,
        token_ids_np=PROMPT,
        num_prompt=3,
        vocab_size=vocab,
    )
    return VerifyRequest(state, proposal, first_row, "", PROMPT)


class Asked(Exception):
    """A uniform was asked for that is not settled yet."""

    def __init__(self, node: int) -> None:
        self.node = node


class Drawn(Exception):
    """The last token is drawn, behind ``node``, from ``weights``."""

    def __init__(self, node: int, weights: torch.Tensor) -> None:
        self.node = node
        self.weights = weights


class Decision:
    """One request's way through a rule."""

    def __init__(self, rule: Rule, p: torch.Tensor, proposal: Proposal) -> None:
        """``p`` [1 + nodes, V]: the target's distributions."""
        self._rule = rule
        self._logits = p.log()
        self._proposal = proposal
        self._depths = proposal.depths()
        self._request = request(proposal, p.shape[1])

    def _run(self, settled: dict[int, float]) -> Asked | Drawn:
        end = -2

        def scripted(seed: int, sample: int, stream: int, position: int, node: int, base: int) -> float:
            nonlocal end
            depth = self._depths[node] if node >= 0 else 0
            assert (seed, sample, base) == (SEED, SAMPLE, BASE)
            assert position == BASE + depth - (stream == ACCEPT), "where its token would stand"
            if stream == RECOVER:
                end = node
                return 0.5
            assert stream == ACCEPT
            if node not in settled:
                raise Asked(node)
            return settled[node]

        def drawing(weights: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
            assert weights.shape[0] == 1 and list(uniforms) == [0.5]
            if float(weights.sum()) <= 0.0:
                return [-1]  # as `pick` says it
            raise Drawn(end, weights[0].double().clone())

        before = common.uniform, rejection.pick
        common.uniform, rejection.pick = scripted, drawing  # type: ignore[assignment]
        try:
            self._rule.verify(self._logits, [self._request])
        except (Asked, Drawn) as found:
            return found
        finally:
            common.uniform, rejection.pick = before
        raise AssertionError("a rule draws the last token")

    def branches(self, settled: dict[int, float] | None = None) -> Iterator[tuple[float, Drawn]]:
        """(probability, how it ends) of every way to decide."""
        settled = settled or {}
        found = self._run(settled)
        if isinstance(found, Drawn):
            yield 1.0, found
            return
        border = self.border(settled, found.node)
        for u, weight in ((0.0, border), (ALMOST_ONE, 1.0 - border)):
            if weight > 1e-9:
                for probability, end in self.branches({**settled, found.node: u}):
                    yield weight * probability, end

    def border(self, settled: dict[int, float], node: int) -> float:
        """The uniform of a node from which on something else happens; 1: nothing ever does."""

        def happens(u: float) -> tuple[bool, int]:
            found = self._run({**settled, node: u})
            return isinstance(found, Drawn), found.node

        low, high = 0.0, 1.0
        first = happens(0.0)
        if happens(ALMOST_ONE) == first:
            return 1.0 if self._keeps(first, node) else 0.0
        for _ in range(17):
            middle = (low + high) / 2
            low, high = (middle, high) if happens(middle) == first else (low, middle)
        return (low + high) / 2

    def _keeps(self, what: tuple[bool, int], node: int) -> bool:
        """Whether the node was kept, of a decision that does not depend on its uniform."""
        ended, at = what
        while at >= 0:
            if at == node:
                return True
            at = self._proposal.parents[at]
        return not ended and False

    def outcome(self) -> Law:
        """Probability of each sequence of tokens."""
        out: Law = {}
        for probability, end in self.branches():
            path: list[int] = []
            node = end.node
            while node >= 0:
                path.insert(0, self._proposal.tokens[node])
                node = self._proposal.parents[node]
            for token, weight in enumerate((end.weights / end.weights.sum()).tolist()):
                said = (*path, token)
                out[said] = out.get(said, 0.0) + probability * weight
        return out


def rows(*values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ------------------------------------------------------------------------------------- by hand

P0 = (0.5, 0.3, 0.15, 0.05)
Q0 = (0.2, 0.4, 0.3, 0.1)
P1 = (0.1, 0.2, 0.3, 0.4)
Q1 = (0.4, 0.1, 0.2, 0.3)
P2 = (0.25, 0.25, 0.4, 0.1)


def ends(rule: str | Rule, p: torch.Tensor, proposal: Proposal) -> dict[int, tuple[float, list[float]]]:
    """By the last node that is kept: probability, and what the token behind it is drawn from."""
    out = {}
    made = get_rule(rule) if isinstance(rule, str) else rule
    for probability, end in Decision(made, p, proposal).branches():
        assert end.node not in out, "one way to end there"
        out[end.node] = (probability, (end.weights / end.weights.sum()).tolist())
    return out


def approx(expected: dict[int, tuple[float, Sequence[float]]]) -> dict[int, object]:
    return {
        node: (pytest.approx(probability, abs=1e-5), pytest.approx(list(law), abs=1e-5))
        for node, (probability, law) in expected.items()
    }


class TestRejectionByHand:
    @pytest.mark.parametrize(("token", "kept"), [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.5)])
    def test_one_draft(self, token: int, kept: float) -> None:
        """p/q is 2.5, .75, .5 and .5; p - q is positive for token 0 alone."""
        found = ends("rejection", rows(P0, P1), chain((token,), "t", rows(Q0)))
        expected = {0: (kept, P1), -1: (1 - kept, (1, 0, 0, 0))}
        assert found == approx({n: e for n, e in expected.items() if e[0]})

    def test_two_drafts(self) -> None:
        """Token 2 is kept with .5, then token 0 with .1/.4; what is left of P1 - Q1 is (0, .1, .1, .1)."""
        proposal = chain((2, 0), "t", rows(Q0, Q1))
        found = ends("rejection", rows(P0, P1, P2), proposal)
        third = 1 / 3
        assert found == approx(
            {1: (0.125, P2), 0: (0.375, (0, third, third, third)), -1: (0.5, (1, 0, 0, 0))}
        )

    def test_q_in_other_rows(self) -> None:
        """Two proposals may share a q."""
        q = rows(P2, Q1, P1, Q0)
        proposal = chain((2, 0), "t", q)
        found = ends("rejection", rows(P0, P1, P2), Proposal((2, 0), (-1, 0), "t", "independent", q, (3, 1)))
        assert found == ends("rejection", rows(P0, P1, P2), chain((2, 0), "t", rows(Q0, Q1))) != {}
        assert found != ends("rejection", rows(P0, P1, P2), proposal)

    def test_point_masses(self) -> None:
        """Kept with p(x), else p without x; q is not looked at where children are fixed."""
        expected = {
            1: (0.3 * 0.4, P2),
            0: (0.3 * 0.6, (1 / 6, 2 / 6, 3 / 6, 0)),
            -1: (0.7, (0.5 / 0.7, 0, 0.15 / 0.7, 0.05 / 0.7)),
        }
        for q, rows_of in ((None, ()), (rows(Q0, Q1), (0, 1))):
            proposal = Proposal((1, 3), (-1, 0), "t", "fixed", q, rows_of)
            for rule in ("rejection", "block"):
                if rule == "rejection":
                    assert ends(rule, rows(P0, P1, P2), proposal) == approx(expected)

    def test_what_was_never_drawn(self) -> None:
        """q(x) = 0: always kept, unless p(x) is 0, too."""
        q = rows((0, 0.5, 0.25, 0.25))
        assert ends("rejection", rows(P0, P1), chain((0,), "t", q)) == approx({0: (1.0, P1)})
        p = rows((0, 0.5, 0.3, 0.2), P1)
        assert ends("rejection", p, chain((0,), "t", q)) == approx({-1: (1.0, (0, 0, 1, 0))})

    def test_token_0_may_be_what_is_left(self) -> None:
        """The residual is all on token 0; p itself would have given token 2 at this uniform."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "uniform", lambda *key: 0.9)
            for rule in ("rejection", "block"):
                [out] = get_rule(rule).verify(rows(P0, P1).log(), [request(chain((3,), "t", rows(Q0)), 4)])
                assert out == Verification((), (0,))

    def test_nothing_left_means_p(self) -> None:
        """p = q, and x of probability 0 in both: rejected, with nothing in p - q."""
        p = (0, 0.5, 0.3, 0.2)
        found = ends("rejection", rows(p, P1), chain((0,), "t", rows(p)))
        assert found == approx({-1: (1.0, p)})


class TestTreesByHand:
    def test_independent_siblings(self) -> None:
        """Token 1 (.75), else token 1 of P0 - Q0 again: 0 of it is left; then token 0, all that is left."""
        proposal = Proposal((1, 2, 0), (-1, -1, -1), "t", "independent", rows(Q0), (0, 0, 0))
        found = ends("rejection", rows(P0, P1, P2, P1), proposal)
        # left after 1 is (1, 0, 0, 0): token 2 is never kept, and leaves (1, 0, 0, 0) - Q0 = (1, 0, 0, 0) again
        assert found == approx({0: (0.75, P1), 2: (0.25, P1)})

    def test_without_replacement(self) -> None:
        """After 1 was rejected q is (.2, 0, .3, .1) / .6; p is (1, 0, 0, 0), of which token 2 has nothing."""
        p = (0.4, 0.1, 0.3, 0.2)
        q = (0.1, 0.4, 0.3, 0.2)
        proposal = Proposal((1, 2, 3), (-1, -1, -1), "t", "without_replacement", rows(q), (0, 0, 0))
        found = ends("rejection", rows(p, P1, P2, Q0), proposal)
        # 1: .1/.4. Left: (.3, 0, 0, 0). 2 and 3 have none of it.
        assert found == approx({0: (0.25, P1), -1: (0.75, (1, 0, 0, 0))})
        p = (0.1, 0.2, 0.4, 0.3)
        q = (0.4, 0.3, 0.2, 0.1)
        proposal = Proposal((0, 3, 2), (-1, -1, -1), "t", "without_replacement", rows(q), (0, 0, 0))
        found = ends("rejection", rows(p, P1, P2, Q0), proposal)
        # 0: .1/.4. Left: (0, 0, .2, .2)/.4 = (0, 0, .5, .5); q: (0, .3, .2, .1)/.6 = (0, 1/2, 1/3, 1/6).
        # 3: .5 > 1/6, kept for sure.
        assert found == approx({0: (0.25, P1), 1: (0.75, P2)})
        proposal = Proposal((0, 1, 2), (-1, -1, -1), "t", "without_replacement", rows(q), (0, 0, 0))
        found = ends("rejection", rows(p, P1, P2, Q0), proposal)
        # 1: nothing left of it. Left: (0, 0, 1/6, 1/3)/.5 = (0, 0, 1/3, 2/3); q: (0, 0, .2, .1)/.3 = (0, 0, 2/3, 1/3).
        # 2: 1/2; then (0, 0, 0, 1/3).
        assert found == approx({0: (0.25, P1), 2: (0.375, Q0), -1: (0.375, (0, 0, 0, 1))})

    def test_more_siblings_than_q_has_tokens(self) -> None:
        """q is all on token 0. After it the rest count as drawn uniformly from those not tried."""
        p = (0.2, 0.5, 0.3)
        for second, kept, left in ((1, 1.0, None), (2, 0.75, (0, 1, 0))):
            proposal = Proposal((0, second), (-1, -1), "t", "without_replacement", rows((1, 0, 0)), (0, 0))
            expected: dict[int, tuple[float, Sequence[float]]] = {0: (0.2, p), 1: (0.8 * kept, p)}
            if left is not None:
                expected[-1] = (0.8 * (1 - kept), left)
            assert ends("rejection", rows(p, p, p), proposal) == approx(expected)

    def test_fixed_siblings_and_what_is_below(self) -> None:
        """Root -> {1 -> 3, 2}, all point masses."""
        proposal = Proposal((1, 2, 3), (-1, -1, 0), "t")
        found = ends("rejection", rows(P0, P1, P2, Q0), proposal)
        without = 0.5 / 0.55, 0, 0, 0.05 / 0.55
        assert found == approx(
            {
                2: (0.3 * 0.4, Q0),
                0: (0.3 * 0.6, (1 / 6, 2 / 6, 3 / 6, 0)),
                1: (0.7 * 0.15 / 0.7, P2),
                -1: (0.55, without),
            }
        )

    def test_rejection_that_cannot_be_changes_nothing(self) -> None:
        """p = q: a token of probability 0 is rejected, and p stays as it was."""
        p = (0, 0.5, 0.3, 0.2)
        proposal = Proposal((0, 1), (-1, -1), "t", "independent", rows(p), (0, 0))
        assert ends("rejection", rows(p, P1, P2), proposal) == approx({1: (1.0, P2)})


class TestBlockByHand:
    def test_two_drafts(self) -> None:
        """Drafts 1 and 0: p_1 = .3/.4 = .75, p_2 = .75 * .1/.4 = .1875. Z_1 = sum max(.75 P1 - Q1, 0) = .05 + .025:
        .15 - .1 and .225 - .2 and .3 - .3; h_1 = .075 / (.075 + .25)."""
        found = ends("block", rows(P0, P1, P2), chain((1, 0), "t", rows(Q0, Q1)))
        h1 = 0.075 / 0.325
        assert found == approx(
            {
                1: (0.1875, P2),
                0: (0.8125 * h1, (0, 2 / 3, 1 / 3, 0)),
                -1: (0.8125 * (1 - h1), (1, 0, 0, 0)),
            }
        )

    def test_q_in_other_rows(self) -> None:
        q = rows(P2, Q1, P1, Q0)
        other = Proposal((1, 0), (-1, 0), "t", "independent", q, (3, 1))
        found = ends("block", rows(P0, P1, P2), other)
        assert found == ends("block", rows(P0, P1, P2), chain((1, 0), "t", rows(Q0, Q1)))

    def test_what_was_never_drawn(self) -> None:
        """q(x) = 0 < p(x): the ratio is infinite, whatever came before. Token 2 has p_1 = .5; then p_2 = 1."""
        q = rows(Q0, (0, 0.3, 0.3, 0.4))
        found = ends("block", rows(P0, P1, P2), chain((2, 0), "t", q))
        assert found == approx({1: (1.0, P2)})
        # p(x) = 0, too: the ratio is 0, and so are all behind it
        p = rows(P0, (0, 0.3, 0.3, 0.4), P2)
        found = ends("block", p, chain((0, 0), "t", q))
        assert found[0][0] + found.get(-1, (0.0,))[0] == pytest.approx(1.0) and 1 not in found

    def test_equal_distributions(self) -> None:
        found = ends("block", rows(P0, P1, P2), chain((1, 0), "t", rows(P0, P1)))
        assert found == approx({1: (1.0, P2)})

    def test_point_masses(self) -> None:
        """p_1 = .3, p_2 = .3 * .4 = .12; Z_1 = .3 * .6 = .18, h_1 = .18 / .88."""
        found = ends("block", rows(P0, P1, P2), chain((1, 3), "t"))
        h1 = 0.18 / 0.88
        assert found == approx(
            {
                1: (0.12, P2),
                0: (0.88 * h1, (1 / 6, 2 / 6, 3 / 6, 0)),
                -1: (0.88 * (1 - h1), (0.5 / 0.7, 0, 0.15 / 0.7, 0.05 / 0.7)),
            }
        )

    def test_three_drafts(self) -> None:
        """Against the formulas of the paper, written down once more."""
        p, q, drafts = (P0, P1, P2, Q0), (Q0, Q1, (0.02, 0.28, 0.3, 0.4)), (1, 0, 3)
        found = ends("block", rows(*p), chain(drafts, "t", rows(*q)))
        scale = [1.0]
        for i, x in enumerate(drafts):
            scale.append(min(1.0, scale[i] * p[i][x] / q[i][x]))
        left, expected = 1.0, {}
        for i in (3, 2, 1, 0):
            if i == 3:
                h, law = scale[3], list(p[3])
            else:
                law = [max(scale[i] * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
                h = sum(law) / (sum(law) + 1 - scale[i]) if i else 1.0
            expected[i - 1] = (left * h, [weight / sum(law) for weight in law])
            left *= 1 - h
        assert found == approx(expected)


# ------------------------------------------------------------------------- all drafts, against the target

VOCAB = 3


def laws(seed: int, zeros: bool) -> dict[Path, list[float]]:
    """A distribution behind every path of up to three tokens; with ``zeros``, tokens that cannot come."""
    rng = np.random.default_rng(seed)
    out: dict[Path, list[float]] = {}
    for n in range(4):
        for path in itertools.product(range(VOCAB), repeat=n):
            weights = rng.random(VOCAB) ** 2 + 0.02
            if zeros and rng.random() < 0.4:
                weights[rng.integers(VOCAB)] = 0.0
            out[path] = (weights / weights.sum()).astype(np.float32).tolist()
    return out


P = laws(1, zeros=True)
Q = laws(2, zeros=True)


def paths_of(proposal: Proposal) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def drawn(parents: Path, draw: DrawKind) -> Iterator[tuple[float, Proposal]]:
    """(probability, proposal): everything that can be drawn from Q."""

    def grow(tokens: Path, probability: float) -> Iterator[tuple[float, Path]]:
        i = len(tokens)
        if i == len(parents):
            yield probability, tokens
            return
        paths = paths_of(Proposal(tokens, parents[:i]))
        q = list(Q[paths[parents[i] + 1]])
        if draw == "without_replacement":
            for sibling in range(i):
                if parents[sibling] == parents[i]:
                    q[tokens[sibling]] = 0.0
            q = [weight / sum(q) for weight in q] if sum(q) else [0.0] * VOCAB
        for token, weight in enumerate(q):
            if weight:
                yield from grow((*tokens, token), probability * weight)

    for probability, tokens in grow((), 1.0):
        above = sorted(set(parents))
        paths = paths_of(Proposal(tokens, parents))
        q = rows(*[Q[paths[parent + 1]] for parent in above])
        q_rows = tuple(above.index(parent) for parent in parents)
        yield probability, Proposal(tokens, parents, "t", draw, q, q_rows)


def check_law(found: Law, depth: int) -> None:
    """The first tokens of what is said have the target's law, if the target goes on where it ends."""
    for n in range(1, depth + 2):
        for said in itertools.product(range(VOCAB), repeat=n):
            expected = math.prod(P[said[:i]][said[i]] for i in range(n))
            got = 0.0
            for tokens, probability in found.items():
                if tokens == said[: len(tokens)]:  # it ends there, or before
                    got += probability * math.prod(P[said[:i]][said[i]] for i in range(len(tokens), n))
                elif tokens[:n] == said:
                    got += probability
            assert got == pytest.approx(expected, abs=3e-5), said


def total(rule: str, proposals: Iterator[tuple[float, Proposal]]) -> tuple[Law, float]:
    """Law of what is said over all drafts, and the expected number of drafts that are kept."""
    out: Law = {}
    kept = weight = 0.0
    for probability, proposal in proposals:
        p = rows(*[P[path] for path in paths_of(proposal)])
        weight += probability
        for said, share in Decision(get_rule(rule), p, proposal).outcome().items():
            out[said] = out.get(said, 0.0) + probability * share
            kept += probability * share * (len(said) - 1)
    assert weight == pytest.approx(1.0, abs=1e-6)
    return out, kept


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("length", [1, 2])
def test_chains_have_the_targets_law(rule: str, length: int) -> None:
    parents = tuple(range(-1, length - 1))
    found, kept = total(rule, drawn(parents, "independent"))
    check_law(found, length)
    one = sum(min(a, b) for a, b in zip(P[()], Q[()], strict=True))
    if length == 1:
        assert kept == pytest.approx(one, abs=3e-5), "as many as can be"
    elif rule == "block":
        # two drafts together: the most that any rule keeps is the sum over prefixes of min(p, q)
        two = sum(
            min(P[()][a] * P[(a,)][b], Q[()][a] * Q[(a,)][b]) for a in range(VOCAB) for b in range(VOCAB)
        )
        fewer = total("rejection", drawn(parents, "independent"))[1]
        assert fewer < kept <= one + two + 3e-5


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("draw", ["independent", "without_replacement"])
@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, 0), (-1, 0, 0)])
def test_trees_have_the_targets_law(rule: str, draw: DrawKind, parents: Path) -> None:
    def possible() -> Iterator[tuple[float, Proposal]]:
        return drawn(parents, draw)

    if abs(sum(probability for probability, _ in possible()) - 1) > 1e-6:
        pytest.skip("not so many different tokens can be drawn")
    check_law(total(rule, possible())[0], len(set(parents)))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, -1, 0), (-1, -1, 0, 1), (-1, -1, -1)])
def test_point_masses_have_the_targets_law(rule: str, parents: Path) -> None:
    """Whatever the tokens are, equal siblings among them."""
    for tokens in ((0, 1, 2, 0), (2, 0, 0, 1), (1, 1, 2, 2)):
        proposal = Proposal(tokens[: len(parents)], parents, "t")
        check_law(total(rule, iter([(1.0, proposal)]))[0], 2)


def test_the_check_sees_a_rule_that_is_wrong() -> None:
    class KeepsTooMuch(BlockRule):
        def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
            wider = logits.clone()
            wider[0] /= 1.02
            return super().verify(wider, requests)

    out: Law = {}
    for probability, proposal in drawn((-1,), "independent"):
        p = rows(*[P[path] for path in paths_of(proposal)])
        for said, share in Decision(KeepsTooMuch(), p, proposal).outcome().items():
            out[said] = out.get(said, 0.0) + probability * share
    with pytest.raises(AssertionError):
        check_law(out, 1)


# ----------------------------------------------------------------------------------- the other rules


def test_coupled_walks_a_tree_by_its_noise() -> None:
    """Level by level: position BASE + depth, the parent's row, the first child of the token; and it ends there."""
    gen = torch.Generator().manual_seed(4)
    vocab = 6
    noise = gumbel([NoiseKey(SEED, SAMPLE, SHARED, BASE + i) for i in range(4)], vocab)
    rule = get_rule("coupled")
    lengths = set()
    for _ in range(300):
        tokens = tuple(torch.randint(0, vocab, (9,), generator=gen).tolist())
        parents = (-1, -1, -1, 0, 1, 0, 3, 4, 3)
        logits = torch.randn(2 + 10 + 1, vocab, generator=gen)
        proposal = Proposal(tokens, parents, "t")
        plain = request(EMPTY_PROPOSAL, vocab, 1)
        alone, out = rule.verify(logits, [plain, request(proposal, vocab, 2)])
        node, path, said = -1, [], []
        while True:
            token = int((logits[2 + 1 + node] + noise[len(path)]).argmax())
            said.append(token)
            below = [i for i in range(9) if parents[i] == node and tokens[i] == token]
            if not below:
                break
            node = below[0]
            path.append(node)
        assert out == Verification(tuple(path), tuple(said))
        assert alone == Verification((), (int((logits[1] + noise[0]).argmax()),))
        lengths.add(len(path))
    assert lengths == {0, 1, 2, 3}


def test_typical_by_hand() -> None:
    """Thresholds min(epsilon, delta exp(-H)): the entropy of p is 1.2188 nats, delta exp(-H) = .08867 at .3."""
    p = (0.5, 0.3, 0.1, 0.06, 0.04)
    entropy = -sum(x * math.log(x) for x in p)
    border = 0.3 * math.exp(-entropy)
    assert 0.06 < border < 0.09
    cases = (
        (TypicalRule(), (0, 1, 2)),
        (TypicalRule(0.05), (0, 1, 2, 3)),
        (TypicalRule(0.05, 0.1), (0, 1, 2, 3, 4)),
    )
    for rule, kept in cases:
        for token in range(5):
            [out] = rule.verify(rows(p, p).log(), [request(chain((token,), "t"), 5)])
            assert out.path == ((0,) if token in kept else ()), (rule.epsilon, token)
    p = rows((0.5, 0.25, 0.25), (0.5, 0.25, 0.25))  # delta exp(-H) is .35
    [out] = TypicalRule(float(p.log().softmax(-1)[0, 1]), 1.0).verify(p.log(), [request(chain((1,), "t"), 3)])
    assert out.path == (), "the threshold itself does not pass"


def test_typical_looks_at_each_parents_own_entropy() -> None:
    """Where the target is sure, .07 does not pass (the threshold is .09); where it is not, .07 does (.065)."""
    sure = (0.87, 0.07, 0.02, 0.02, 0.02)
    unsure = (0.29, 0.07, 0.2, 0.22, 0.22)
    flat = (0.2,) * 5
    proposal = Proposal((0, 1, 1, 1), (-1, -1, 0, 1), "t")
    for below, path in (((sure, unsure), (1, 3)), ((unsure, sure), (0, 2)), ((sure, sure), (0,))):
        p = rows(flat, *below, flat, flat)
        [out] = TypicalRule().verify(p.log(), [request(proposal, 5)])
        assert out.path == path
    assert TypicalRule().lossless is False and get_rule("rejection").lossless


def test_typical_draws_the_last_token_from_p() -> None:
    p = rows(P0, P1)
    with pytest.MonkeyPatch.context() as patch:
        seen: list[torch.Tensor] = []
        patch.setattr(rejection, "pick", lambda weights, us: seen.append(weights.clone()) or [3] * len(us))
        outs = TypicalRule().verify(
            torch.cat([p, p]).log(), [request(chain((0,), "t"), 4), request(chain((3,), "t"), 4, 2)]
        )
    assert [out.token_ids for out in outs] == [(0, 3), (3,)]
    assert torch.allclose(seen[0], rows(P1, P0))


def test_synthetic_by_rates() -> None:
    """One uniform for all: 3 drafts where it is below .25, 2 below .5, 1 below .75; the first children of a tree."""
    p = rows((0.6, 0.2, 0.1, 0.1), P1, P2, (0.1, 0.3, 0.2, 0.4), (0.2, 0.4, 0.1, 0.3), P0)
    rule = SyntheticRule(SyntheticAcceptance((0.75, 0.5, 0.25)))
    tree = Proposal((1, 3, 2, 0, 3), (-1, -1, 0, 2, 2), "t")
    paths = {3: (0, 2, 3), 2: (0, 2), 1: (0,), 0: ()}
    for u, kept in (
        (0.0, 3),
        (0.2499, 3),
        (0.25, 2),
        (0.4999, 2),
        (0.5, 1),
        (0.7499, 1),
        (0.75, 0),
        (0.99, 0),
    ):
        asked: list[tuple[int, ...]] = []

        def scripted(*key: int, u: float = u, asked: list[tuple[int, ...]] = asked) -> float:
            asked.append(key)
            return u if key[2] == ACCEPT else 0.5

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "uniform", scripted)
            [out] = rule.verify(p.log(), [request(tree, 4)])
        assert out.path == paths[kept]
        assert asked == [
            (SEED, SAMPLE, ACCEPT, BASE - 1, -1, BASE),
            (SEED, SAMPLE, RECOVER, BASE + kept, paths[kept][-1] if kept else -1, BASE),
        ]
        assert out.token_ids[:-1] == tuple(tree.tokens[i] for i in out.path)
        law = p[1 + paths[kept][-1] if kept else 0]
        assert out.token_ids[-1] == int((law.cumsum(0) <= 0.5).sum())


def test_fewer_rates_than_drafts() -> None:
    rule = SyntheticRule(SyntheticAcceptance((1.0,)))
    [out] = rule.verify(rows(P0, P1, P2).log(), [request(chain((1, 2), "t"), 4)])
    assert out.path == (0,)


# ------------------------------------------------------------------------------------------ many requests


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_plain_requests_draw_with_their_own_keys(rule: str, count: int) -> None:
    """Few are drawn for one by one, many together: the documented key in both cases."""
    gen = torch.Generator().manual_seed(count)
    logits = torch.randn(count + 3, 11, generator=gen)
    requests = []
    for i in range(count):
        state = SamplingState(
            SamplingParams(),
            seed=100 + i,
            sample_index=i % 3,
            token_ids_np=PROMPT[: 2 + i % 3],
            num_prompt=2,
            vocab_size=11,
        )
        requests.append(VerifyRequest(state, EMPTY_PROPOSAL, count + 2 - i, rule, PROMPT[: 2 + i % 3]))
    outs = get_rule(rule).verify(logits, requests)
    for i, (asked, out) in enumerate(zip(requests, outs, strict=True)):
        base = 2 + i % 3
        u = uniform(100 + i, i % 3, RECOVER, base, -1, base)
        sums = logits[asked.first_row].softmax(-1).double().cumsum(0)
        assert out == Verification((), (int((sums <= u * sums[-1]).sum()),))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_batch_is_its_requests(rule: str) -> None:
    """Chains and trees, sampled and fixed, of all lengths and in any order of rows: each as if it were alone."""
    gen = torch.Generator().manual_seed(8)
    vocab = 7
    requests, alone = [], []
    logits = torch.randn(200, vocab, generator=gen) * 2
    shapes = [(), (-1,), (-1, 0), (-1, 0, 1), (-1, -1), (-1, -1, 0), (-1, 0, 0, 1)]
    first = 200
    for i in range(40):
        parents = shapes[i % len(shapes)]
        n = len(parents)
        first -= n + 1
        above = sorted(set(parents))
        q = (torch.randn(len(above), vocab, generator=gen) * 2).softmax(-1) if i % 3 and n else None
        tokens = tuple(torch.randint(0, vocab, (n,), generator=gen).tolist())
        draw: DrawKind = "fixed" if q is None else "independent"
        q_rows = () if q is None else tuple(above.index(parent) for parent in parents)
        proposal = Proposal(tokens, parents, "t", draw, q, q_rows)
        state = request(proposal, vocab).state
        state.seed = i
        requests.append(VerifyRequest(state, proposal, first, rule, PROMPT))
        before = logits.clone()
        alone += get_rule(rule).verify(logits[first : first + n + 1], [requests[-1]._replace(first_row=0)])
        assert torch.equal(before, logits), "a rule does not write to what it is given"
    assert get_rule(rule).verify(logits, requests) == alone
    assert {len(out.path) for out in alone} >= {0, 1, 2}

"""A small world in which losslessness can be checked against exact probabilities.

Target and drafter are Markov chains over a handful of tokens. A trial generates ``length`` tokens in as many
speculative steps as it takes, through the package's own drafting and verification; its tokens are one cell of
a table of vocab^length, whose exact probabilities come from enumerating all prefixes. A joint table over
several steps sees what single-step checks do not: errors in which an accepted prefix, a recovered token or
the noise of an earlier step biases what comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import chi2

from draftwise.sampling.draw import draft_children, draft_tokens, draws_from_q
from draftwise.sampling.logits import LogitsRow, process
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import DrawKind, IntArray, Proposal, Verification
from draftwise.verify.base import BatchRules, VerifyRequest
from draftwise.verify.batch import verify_batch

PROMPT = np.zeros(1, dtype=np.int32)  # the chains start in token 0
CHAINS = {k: tuple(range(-1, k - 1)) for k in (1, 2, 3, 4)}


@dataclass(frozen=True)
class World:
    """Raw logits of the next token given the last one."""

    target: torch.Tensor  # [V, V] float32
    draft: torch.Tensor  # [V, V] float32

    @property
    def vocab(self) -> int:
        return self.target.shape[0]

    @classmethod
    def random(cls, vocab: int, seed: int, spread: float = 1.2, noise: float = 1.0) -> World:
        gen = torch.Generator().manual_seed(seed)
        target = torch.randn(vocab, vocab, generator=gen) * spread
        return cls(target, target + torch.randn(vocab, vocab, generator=gen) * noise)

    def exact(self, params: SamplingParams, length: int) -> np.ndarray:
        """Probabilities of all vocab^length outputs; the cell of (a, b, c) is (a * vocab + b) * vocab + c."""
        state = new_state(self, params, 0)
        prefixes: list[tuple[int, ...]] = [()]
        joint = np.ones(1)
        for _ in range(length):
            logits = self.target[[prefix[-1] if prefix else 0 for prefix in prefixes]].clone()
            rows = [LogitsRow(state, prefix, PROMPT) for prefix in prefixes]
            p = process(logits, rows).double().softmax(-1).numpy()
            joint = (joint[:, None] * p).ravel()
            prefixes = [(*prefix, v) for prefix in prefixes for v in range(self.vocab)]
        return joint


def new_state(world: World, params: SamplingParams, seed: int) -> SamplingState:
    return SamplingState(
        params, seed=seed, sample_index=0, token_ids_np=PROMPT, num_prompt=1, vocab_size=world.vocab
    )


@dataclass
class Outcome:
    tokens: np.ndarray  # [trials, length]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    first_lengths: list[int] = field(default_factory=list)  # committed tokens of each trial's first step

    def cells(self, vocab: int) -> np.ndarray:
        """How often each output occurred, in the order of `World.exact`."""
        index = np.zeros(len(self.tokens), dtype=np.int64)
        for column in self.tokens.T:
            index = index * vocab + column
        return np.bincount(index, minlength=vocab ** self.tokens.shape[1])


Shape = tuple[int, ...]
DropRule = Callable[[Proposal], Proposal]
Drafter = Callable[[World, str, Sequence[SamplingState], Sequence[IntArray]], list[Proposal]]
"""``drafter(world, rule, states, known)``: one proposal per trial; known: its tokens so far, the prompt's first."""


def simulate(
    world: World,
    rule: str,
    trials: int,
    length: int,
    *,
    shapes: Sequence[Shape] = (CHAINS[3],),
    draw: DrawKind = "independent",
    params: SamplingParams | None = None,
    cut: Callable[[int, int], int] | None = None,
    drop: DropRule | None = None,
    drafter: Drafter | None = None,
    kernels: BatchRules | None = None,
    first_seed: int = 0,
) -> Outcome:
    """Generate ``length`` tokens per trial. Step s verifies a tree of shape ``shapes[s % len(shapes)]`` (node
    parents). ``draw``: how siblings are drawn. ``cut(trial, step)``: how many nodes of the proposal are
    verified. ``drop``: a (biased) filter for negative controls. ``drafter``: makes the proposals instead.
    ``kernels``: verify instead of torch."""
    params = params or SamplingParams()
    states = [new_state(world, params, first_seed + i) for i in range(trials)]
    outputs: list[list[int]] = [[] for _ in range(trials)]
    outcome = Outcome(np.empty(0))
    active = list(range(trials))
    step = 0
    while active:
        shape = shapes[step % len(shapes)]
        known = [np.array([0, *outputs[a]], dtype=np.int32) for a in active]
        now = [states[a] for a in active]
        if drafter is None:
            proposals = _draft(world, rule, shape, draw, now, known)
        else:
            proposals = drafter(world, rule, now, known)
        if cut is not None:
            proposals = [p.prefix(cut(a, step)) for a, p in zip(active, proposals, strict=True)]
        if drop is not None:
            proposals = [drop(p) for p in proposals]
        last: list[int] = []  # the token before each logits row
        requests = []
        for a, proposal, ids in zip(active, proposals, known, strict=True):
            requests.append(VerifyRequest(states[a], proposal, len(last), rule, ids))
            last.extend((int(ids[-1]), *proposal.tokens))
        results = verify_batch(world.target[last], requests, kernels=kernels)
        outcome.steps += len(active)
        for a, proposal, result in zip(active, proposals, results, strict=True):
            assert isinstance(result, Verification)
            states[a].commit(result.token_ids)
            outputs[a].extend(result.token_ids)
            outcome.drafted += len(proposal)
            outcome.accepted += len(result.path)
            if step == 0:
                outcome.first_lengths.append(len(result.token_ids))
        active = [a for a in active if len(outputs[a]) < length]
        step += 1
    outcome.tokens = np.array([out[:length] for out in outputs])
    return outcome


def _draft(
    world: World,
    rule: str,
    shape: Shape,
    draw: DrawKind,
    states: Sequence[SamplingState],
    known: Sequence[IntArray],
) -> list[Proposal]:
    """One tree of the given shape per trial, all trials at once, siblings group by group."""
    n, trials = len(shape), len(states)
    paths: list[list[tuple[int, ...]]] = [[()] * trials]  # by node + 1: the tokens down to it
    tokens = [[-1] * n for _ in states]
    q_rows = [-1] * n
    qs: list[torch.Tensor] = []
    bases = [state.num_tokens for state in states]
    node_paths: dict[int, list[tuple[int, ...]]] = {-1: paths[0]}
    for parent in range(-1, n):
        children = [i for i in range(n) if shape[i] == parent]
        if not children:
            continue
        above = node_paths[parent]
        logits = world.draft[
            [path[-1] if path else int(ids[-1]) for path, ids in zip(above, known, strict=True)]
        ]
        rows = [LogitsRow(s, path, ids) for s, path, ids in zip(states, above, known, strict=True)]
        positions = [base + len(path) for base, path in zip(bases, above, strict=True)]
        rules = [rule] * trials
        method = "greedy" if draw == "fixed" and rule != "coupled" else "probabilistic"
        q: torch.Tensor | None = None
        if draw == "independent" and (rule != "coupled" or len(children) == 1):
            for child in children:
                drawn, q = draft_tokens(
                    logits.clone(),
                    rows,
                    rules=rules,
                    positions=positions,
                    nodes=[child] * trials,
                    bases=bases,
                )
                for t, token in enumerate(drawn):
                    tokens[t][child] = token
        else:
            found = draft_children(
                logits.clone(), rows, rules=rules, positions=positions, parents=[parent] * trials, bases=bases,
                counts=[len(children)] * trials, method=method,
            )  # fmt: skip
            q = found.q
            for t, drawn in enumerate(found.tokens):
                if len(drawn) < len(children):  # fewer tokens have probability: any will do as a point mass
                    assert q is None
                    drawn = [*drawn, *[0] * (len(children) - len(drawn))]
                for child, token in zip(children, drawn, strict=True):
                    tokens[t][child] = token
        for child in children:
            node_paths[child] = [(*path, tokens[t][child]) for t, path in enumerate(above)]
            q_rows[child] = len(qs)
        if q is not None:
            qs.append(q)
    sampled = bool(qs) and draws_from_q(states[0], rule) and draw != "fixed"
    stacked = torch.stack(qs, dim=1) if sampled else None  # [trials, P, V]
    return [
        Proposal(
            tuple(tokens[t]), shape, "test", draw if sampled else "fixed",
            None if stacked is None else stacked[t], tuple(q_rows) if sampled else (),
        )
        for t in range(trials)
    ]  # fmt: skip


def chi_square(counts: np.ndarray, exact: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells of expectation below 5 are merged into one."""
    total = counts.sum()
    expected = exact * total
    assert counts[exact == 0].sum() == 0, "an output of probability 0 occurred"
    small = expected < 5
    observed, expected = (
        np.append(counts[~small], counts[small].sum()),
        np.append(expected[~small], expected[small].sum()),
    )
    if expected[-1] < 5:  # too little even together: into the largest cell
        largest = int(expected[:-1].argmax())
        observed[largest] += observed[-1]
        expected[largest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def threshold(df: int) -> float:
    """What a chi-square exceeds once in 10^8 tests. Pearson's statistic of cells of expectation 5 and more has a
    heavier tail: in 600,000 draws of the tables here up to three times as heavy at 1 in 50,000, and by their mean,
    variance and skewness 4 in 10^8 at this limit. Chance exceeds it less than once in 10^7."""
    return float(chi2.isf(1e-8, df))


def assert_same_distribution(counts: np.ndarray, exact: np.ndarray) -> None:
    """Chance alone fails this less than once in 10^7 runs (and seeds are fixed, so a run repeats itself). A
    deviation d_i of cell i's probability p_i adds trials * d_i^2 / p_i to the statistic's mean of df."""
    value, df = chi_square(counts, exact)
    assert value < threshold(df), (
        f"chi-square {value:.1f} with {df} degrees of freedom, limit {threshold(df):.1f}"
    )


def assert_caught(counts: np.ndarray, exact: np.ndarray) -> None:
    """The same test refuses these counts: for negative controls."""
    value, df = chi_square(counts, exact)
    assert value > threshold(df), (
        f"not caught: chi-square {value:.1f}, {df} degrees, limit {threshold(df):.1f}"
    )

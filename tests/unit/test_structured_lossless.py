"""Under a grammar, too, the output of every lossless rule has exactly the target's distribution: that of a target
whose forbidden tokens are excluded position by position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tests.fakes.word_grammar import Word, cursor_over, following

from draftwise.propose.grammar import fit
from draftwise.sampling.draw import draft_tokens, draws_from_q
from draftwise.sampling.logits import LogitsRow
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.structured.cursor import Cursor
from draftwise.types import IntArray, Proposal, Verification, chain
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch

VOCAB = 6
EOS = 0
PROMPT = 5
WORDS: tuple[Word, ...] = (
    (1,),
    (1, 2, 3),
    (1, 2, 4, 1),
    (1, 2, 4, 2),
    (2, 2, 3),
    (2, 3),
    (3, 1, 1, 4),
    (3, 1, 2),
)
TRIALS = 2500
_GENERATOR = torch.Generator().manual_seed(3)
TARGET = torch.randn(VOCAB, VOCAB, generator=_GENERATOR) * 1.2  # logits given the last token
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_GENERATOR)
TREE = (-1, -1, 0, 0, 1, 2)
LENGTH = 3
LIKELIEST: list[list[int]] = DRAFT.argsort(dim=-1, descending=True).tolist()


def exact() -> dict[Word, float]:
    """Probability of each word, from the definition."""
    result = {}
    for word in WORDS:
        probability = 1.0
        for i, token in enumerate((*word, EOS)):
            logits = TARGET[word[i - 1] if i else PROMPT].double()
            may = following(WORDS, word[:i]) | ({EOS} if word[:i] in WORDS else set())
            weights = logits[sorted(may)].exp()
            probability *= float(logits[token].exp() / weights.sum())
        result[word] = probability
    assert sum(result.values()) == pytest.approx(1.0)
    return result


@dataclass
class Trial:
    """One output on its way."""

    state: SamplingState
    cursor: Cursor
    known: list[int]

    def known_np(self) -> IntArray:
        return np.array(self.known, np.int32)


def new_trial(seed: int) -> Trial:
    prompt = np.array([PROMPT], np.int32)
    state = SamplingState(
        SamplingParams(), seed=seed, sample_index=0, token_ids_np=prompt, num_prompt=1, vocab_size=VOCAB
    )
    return Trial(state, cursor_over(WORDS, VOCAB, (EOS,)), [PROMPT])


def drafted_chains(trials: list[Trial], rule: str, *, masked: bool) -> list[Proposal]:
    """What a draft model does; one that is not ``masked`` does not know of the grammar."""
    tokens: list[list[int]] = [[] for _ in trials]
    q: list[torch.Tensor] = []
    for depth in range(LENGTH):
        rows = []
        for trial, path in zip(trials, map(tuple, tokens), strict=True):
            mask = trial.cursor.mask(path) if masked else None
            rows.append(LogitsRow(trial.state, path, trial.known_np(), mask))
        last = [path[-1] if path else trial.known[-1] for trial, path in zip(trials, tokens, strict=True)]
        drawn, part = draft_tokens(
            DRAFT[last],
            rows,
            rules=[rule] * len(trials),
            positions=[len(trial.known) + depth for trial in trials],
            nodes=[depth] * len(trials),
            bases=[len(trial.known) for trial in trials],
        )
        for path, token in zip(tokens, drawn, strict=True):
            path.append(token)
        if part is not None:
            q.append(part)
    if not draws_from_q(trials[0].state, rule):
        return [chain(path, "d") for path in tokens]
    stacked = torch.stack(q, dim=1)  # [trials, LENGTH, V]
    return [chain(path, "d", stacked[i]) for i, path in enumerate(tokens)]


def fixed_tree(known: list[int]) -> Proposal:
    """Point masses, many of them forbidden; siblings differ."""
    tokens: list[int] = []
    for i, parent in enumerate(TREE):
        rank = sum(p == parent for p in TREE[:i])
        last = tokens[parent] if parent >= 0 else known[-1]
        tokens.append(LIKELIEST[last][rank])
    return Proposal(tuple(tokens), TREE, "t")


def cut_where_forbidden(proposal: Proposal, cursor: Cursor) -> Proposal:
    legal = 0
    while legal < len(proposal) and cursor.allows(proposal.tokens[:legal], proposal.tokens[legal]):
        legal += 1
    return proposal.prefix(legal)


def propose(trials: list[Trial], rule: str, how: str) -> list[Proposal]:
    if how == "tree":
        drafts = [fixed_tree(trial.known) for trial in trials]
    else:
        drafts = drafted_chains(trials, rule, masked=how == "chain")
    pairs = zip(drafts, trials, strict=True)
    if how == "pruned":  # the mistake: forbidden drafts are dropped after they were drawn
        return [cut_where_forbidden(draft, trial.cursor) for draft, trial in pairs]
    return [fit(draft, trial.cursor, trial.cursor.forced(len(TREE))) for draft, trial in pairs]


def generate(rule: str, how: str, trials: int) -> tuple[Counter[Word], int]:
    """How often each output came, and how many drafts were accepted on the way."""
    counts: Counter[Word] = Counter()
    accepted = 0
    active = [new_trial(seed) for seed in range(trials)]
    while active:
        proposals = propose(active, rule, how)
        requests: list[VerifyRequest] = []
        rows: list[int] = []  # the token before each row
        for trial, proposal in zip(active, proposals, strict=True):
            masks = trial.cursor.masks(proposal)
            requests.append(VerifyRequest(trial.state, proposal, len(rows), rule, trial.known_np(), masks))
            rows.extend([trial.known[-1], *proposal.tokens])
        going_on = []
        for trial, answer in zip(active, verify_batch(TARGET[rows], requests), strict=True):
            assert isinstance(answer, Verification), answer
            accepted += len(answer.path)
            tokens = answer.token_ids
            if EOS in tokens:
                counts[(*trial.known[1:], *tokens[: tokens.index(EOS)])] += 1
                continue
            trial.cursor.commit(tokens)
            trial.state.commit(tokens)
            trial.known.extend(tokens)
            going_on.append(trial)
        active = going_on
    return counts, accepted


def statistic(rule: str, how: str) -> tuple[float, float]:
    """χ² of the words' counts, and the value that chance exceeds once in 10^7."""
    counts, accepted = generate(rule, how, TRIALS)
    wanted = exact()
    assert set(counts) <= set(wanted), "an output that is no word"
    assert accepted > TRIALS / 4
    value = sum((counts[word] - TRIALS * p) ** 2 / (TRIALS * p) for word, p in wanted.items())
    return value, float(chi2.isf(1e-7, len(wanted) - 1))


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        pytest.param("rejection", "chain", marks=pytest.mark.slow),  # a tree without siblings
        ("rejection", "tree"),
        ("rejection", "unmasked"),
        ("block", "chain"),
        pytest.param("coupled", "chain", marks=pytest.mark.slow),
        ("coupled", "tree"),
    ],
)
def test_distribution(rule: str, how: str) -> None:
    value, limit = statistic(rule, how)
    assert value < limit


def test_pruning_what_was_drawn_is_caught() -> None:
    value, limit = statistic("rejection", "pruned")
    assert value > limit


def test_the_drafter_gives_forbidden_tokens_no_weight() -> None:
    trial = new_trial(1)
    proposal = drafted_chains([trial], "rejection", masked=True)[0]
    assert proposal.draw == "independent" and proposal.q is not None
    for depth in range(LENGTH):
        mask = trial.cursor.mask(proposal.tokens[:depth])
        assert bool((proposal.q[depth][~mask] == 0).all())

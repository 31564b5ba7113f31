"""The suffix tree against its authors' implementation, the PyPI package arctic-inference, where that is installed.

Only ``arctic_inference/suffix_decoding`` is needed on PYTHONPATH, with its module ``_C`` that is built from
``csrc/suffix_decoding`` (CMake and nanobind): the whole package builds against a torch of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.native import native_or_skip

from draftwise.propose.lookup.suffix_native import NativeSuffixTree, native_draft
from draftwise.propose.lookup.suffix_python import SuffixLimits
from draftwise.types import IntArray

original = pytest.importorskip(
    "arctic_inference.suffix_decoding", reason="needs arctic-inference", exc_type=ImportError
)


class Both:
    """One cache of each kind, told the same. Both evict the oldest request when one too many begins."""

    def __init__(self, depth: int, cached: int) -> None:
        self.depth = depth
        self.cached = cached
        self.theirs = original.SuffixDecodingCache(depth, cached)
        self.ours = NativeSuffixTree(native_or_skip(), depth)
        self.locals: dict[int, NativeSuffixTree] = {}
        self.outputs: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}

    def start(self, rid: int, prompt: list[int]) -> None:
        self.theirs.start_request(rid, prompt)
        self.texts[rid] = list(prompt)
        self.locals[rid] = NativeSuffixTree(native_or_skip(), self.depth)
        self.locals[rid].append(self.locals[rid].begin(), array(prompt))
        self.outputs[rid] = self.ours.begin()
        while len(self.outputs) > self.cached:
            self.ours.remove(self.outputs.pop(next(iter(self.outputs))))
        self.ours.settle(1 << 40)

    def add(self, rid: int, tokens: list[int]) -> None:
        self.theirs.add_active_response(rid, tokens)
        self.texts[rid] += tokens
        self.locals[rid].append(0, array(tokens))
        if rid in self.outputs:
            self.ours.append(self.outputs[rid], array(tokens))

    def stop(self, rid: int) -> None:
        self.theirs.stop_request(rid)
        del self.texts[rid], self.locals[rid]

    def drafts(self, rid: int, limits: SuffixLimits) -> tuple[Any, Any]:
        context = self.texts[rid][-self.depth :]
        theirs = self.theirs.speculate(
            rid,
            context,
            max_spec_tokens=limits.budget,
            max_spec_factor=limits.factor,
            max_spec_offset=limits.offset,
            min_token_prob=limits.min_prob,
            use_tree_spec=limits.best_first,
        )
        ours = native_draft(
            self.locals[rid],
            self.ours,
            array(context),
            limits,
            local_seq=0,
            global_seq=self.outputs.get(rid, -1),
        )
        return theirs, ours

    def scores(self, rid: int, match_len: int, tokens: Sequence[int], parents: Sequence[int]) -> list[float]:
        """What our counts make of a draft: its score if it came from the request's own tree, and from the other."""
        match = self.texts[rid][-match_len:]
        out: list[float] = []
        for tree in (self.locals[rid], self.ours):
            probs: list[float] = []
            paths: list[list[int]] = []
            for token, parent in zip(tokens, parents, strict=True):
                above = match if parent < 0 else paths[parent]
                paths.append([*above, token])
                prob = 1.0 if parent < 0 else probs[parent]
                whole = tree.count(above)
                probs.append(prob * tree.count(paths[-1]) / whole if whole else 0.0)
            out.append(sum(probs))
        return out


def array(tokens: list[int]) -> IntArray:
    return np.array(tokens, np.int32)


def streams(seed: int, vocab: int) -> Any:
    """Random requests on both; yields (both, rid) whenever a draft may be asked for."""
    rng = random.Random(seed)
    both = Both(rng.randint(3, 12), rng.randint(1, 6))
    following = 0
    for _ in range(120):
        active = list(both.texts)
        if not active or (len(active) < 4 and rng.random() < 0.2):
            # As long as the depth: a shorter context is looked up as a whole here, and not by the original.
            both.start(following, [rng.randrange(vocab) for _ in range(both.depth + rng.randint(0, 10))])
            following += 1
            continue
        rid = rng.choice(active)
        if rng.random() < 0.1:
            both.stop(rid)
            continue
        tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 4))]
        source = both.texts[rng.choice(active)]
        if rng.random() < 0.5:  # text that somebody said before
            start = rng.randrange(len(source))
            tokens = source[start : start + 8] or tokens
        both.add(rid, tokens)
        yield both, rid


@pytest.mark.parametrize("seed", range(20))
def test_one_token_has_the_same_score(seed: int) -> None:
    """The score of the best draft of one token does not depend on which of equal tokens is taken."""
    limits = SuffixLimits(factor=1, offset=1, min_prob=0.05, budget=1)
    seen = 0
    for both, rid in streams(seed, vocab=3 + seed % 5):
        theirs, ours = both.drafts(rid, limits)
        assert theirs.score == pytest.approx(ours.score, abs=1e-6)
        assert len(theirs.token_ids) == len(ours.tokens)
        seen += len(ours.tokens)
    assert seen > 40


@pytest.mark.parametrize("best_first", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_their_drafts_have_the_probabilities_we_count(seed: int, best_first: bool) -> None:
    limits = SuffixLimits(factor=1.5, min_prob=0.1, budget=9, best_first=best_first)
    seen = 0
    for both, rid in streams(seed, vocab=3 + seed % 5):
        theirs, ours = both.drafts(rid, limits)
        assert bool(theirs.token_ids) == bool(ours.tokens)
        if not theirs.token_ids:
            continue
        scores = both.scores(rid, theirs.match_len, theirs.token_ids, theirs.parents)
        assert any(theirs.score == pytest.approx(score, abs=1e-5) for score in scores)
        scores = both.scores(rid, ours.match_len, ours.tokens, ours.parents)
        assert ours.score == pytest.approx(scores[ours.source - 1], abs=1e-9)
        seen += 1
    assert seen > 40


def unequal_parts(n: int) -> list[int]:
    """31 -> 16, 8, 4, 2, 1: no two are equal."""
    out = []
    while n:
        out.append(n // 2 + 1)
        n -= out[-1]
    return out


def texts_without_ties(n: int, length: int, prefix: tuple[int, ...], names: Iterator[int]) -> list[list[int]]:
    """n texts in which no two continuations of a string are equally frequent, and a token tells what came before."""
    if len(prefix) == length:
        return [list(prefix)] * n
    out = []
    for part in unequal_parts(n):
        out += texts_without_ties(part, length, (*prefix, next(names)), names)
    return out


@pytest.mark.parametrize("best_first", [False, True])
@pytest.mark.parametrize("match_len", [1, 3, 6])
def test_the_same_drafts_where_nothing_ties(best_first: bool, match_len: int) -> None:
    limits = SuffixLimits(factor=20.0, min_prob=0.187, budget=60, best_first=best_first)
    both = Both(16, 1000)
    texts = texts_without_ties(60, 12, (), itertools.count())
    random.Random(3).shuffle(texts)
    for rid, text in enumerate(texts):
        both.start(rid, list(range(5000, 5016)))
        both.add(rid, text)
        both.stop(rid)
    for rid, text in enumerate(texts, 100):
        both.start(rid, [*range(6000, 6016), *text[:match_len]])
        theirs, ours = both.drafts(rid, limits)
        both.stop(rid)
        assert theirs.score == pytest.approx(ours.score, abs=1e-5)
        assert len(ours.tokens) > 0
        if best_first:  # equally likely nodes may stand in another order, but none is left out
            assert paths(theirs.token_ids, theirs.parents) == paths(ours.tokens, ours.parents)
        else:
            assert tuple(theirs.token_ids) == ours.tokens
            assert theirs.match_len == ours.match_len == match_len


def paths(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return set(out)

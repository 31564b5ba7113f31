"""The native suffix tree against its definition in plain Python, on streams of every kind of operation."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.native import native_or_skip

from draftwise.propose.lookup.suffix_native import NativeSuffixTree, native_draft
from draftwise.propose.lookup.suffix_python import PythonSuffixTree, SuffixDraft, SuffixLimits, draft
from draftwise.types import IntArray


def array(tokens: Any) -> IntArray:
    return np.array(tokens, np.int32)


def python_tree(*sequences: list[int], depth: int = 8) -> PythonSuffixTree:
    tree = PythonSuffixTree(depth)
    for tokens in sequences:
        tree.append(tree.begin(), array(tokens))
    return tree


# -------------------------------------------------------------------------------------------- the definition


def test_counts_are_occurrences() -> None:
    tree = python_tree([1, 2, 1, 2, 3], [2, 3], depth=3)
    assert [tree.count(s) for s in ([2], [1, 2], [2, 3], [1, 2, 1], [3, 1])] == [3, 2, 2, 1, 0]
    tree.remove(0)
    assert tree.settle(2) == 3, "the suffixes 1 2 1 .. and 2 1 2 .. are gone"
    assert [tree.count(s) for s in ([2], [1, 2], [2, 3], [1, 2, 1])] == [2, 1, 2, 0]
    assert tree.settle(100) == 0
    assert [tree.count(s) for s in ([2], [1, 2], [2, 3], [1])] == [1, 0, 1, 0]
    assert tree.num_tokens == 2


def test_only_the_oldest_leaves() -> None:
    tree = python_tree([1], [2])
    with pytest.raises(ValueError, match="not the oldest"):
        tree.remove(1)
    native = NativeSuffixTree(native_or_skip(), 4)
    first, second = native.begin(), native.begin()
    with pytest.raises(ValueError, match="not the oldest"):
        native.remove(second)
    native.remove(first)
    with pytest.raises(ValueError, match="not the oldest"):
        native.remove(first)


def test_draft_by_hand() -> None:
    """After 1 2: three times 3, once 4; after 1 2 3: twice 5, once 6; after 9 1 2: 4 alone."""
    tree = python_tree([1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 3, 6], [9, 1, 2, 4])
    limits = SuffixLimits(factor=1, budget=10)
    assert draft(None, tree, [1, 2], limits) == SuffixDraft((3, 5), (-1, 0), 0.75 + 0.5, 2, 2)
    # The longer match allows three tokens, but only one ever followed; its score is 1, that of the shorter one 1.25.
    assert draft(None, tree, [9, 1, 2], limits) == SuffixDraft((3, 5), (-1, 0), 1.25, 2, 2)
    assert draft(None, tree, [9, 1, 2], replace(limits, budget=1)) == SuffixDraft((4,), (-1,), 1.0, 3, 2)
    assert draft(None, tree, [1, 2], replace(limits, min_prob=0.6)).tokens == (3,)
    assert draft(None, tree, [1, 2], replace(limits, max_depth=1)).tokens == (3,)
    tree_draft = draft(None, tree, [1, 2], SuffixLimits(factor=2, budget=10, best_first=True))
    assert tree_draft.tokens == (3, 5, 4, 6)
    assert tree_draft.parents == (-1, 0, -1, 0)
    assert tree_draft.score == pytest.approx(0.75 + 0.5 + 0.25 + 0.25)
    shape = SuffixLimits(factor=9, parents=(-1, -1, 0, 1, 0), ranks=(0, 1, 0, 0, 1))
    assert draft(None, tree, [1, 2], shape).tokens == (3, 4, 5, 6), "nothing ever followed 1 2 4"
    assert draft(None, tree, [1, 2], shape).parents == (-1, -1, 0, 0)


@pytest.mark.parametrize(
    ("match_len", "factor", "offset", "nodes"),
    [
        (1, 1.0, 0.0, 1),
        (3, 1.0, 0.0, 3),
        (3, 0.5, 0.0, 1),
        (3, 2.0, -1.0, 5),
        (9, 1.0, 0.0, 6),
        (10, 0.1, 0.0, 1),
    ],
)
def test_draft_length_follows_the_match(match_len: int, factor: float, offset: float, nodes: int) -> None:
    """At most floor(match length * factor + offset), and the budget of 6."""
    assert SuffixLimits(factor, offset, budget=6).nodes(match_len) == nodes
    known = list(range(100, 100 + match_len)) + list(range(200, 220))
    found = draft(
        None, python_tree(known, depth=40), known[:match_len], SuffixLimits(factor, offset, budget=6)
    )
    assert found.tokens == tuple(range(200, 200 + nodes))
    assert found.match_len == match_len


def test_ties_go_to_the_longer_match_then_to_the_local_tree() -> None:
    limits = SuffixLimits(budget=1)
    assert draft(python_tree([1, 2, 3]), python_tree([1, 2, 4]), [1, 2], limits).tokens == (3,)
    assert draft(python_tree([7, 2, 3]), python_tree([1, 2, 4]), [1, 2], limits).tokens == (4,)
    assert draft(python_tree([1, 2, 3]), python_tree([7, 2, 4]), [1, 2], limits).source == 1


def test_equal_counts_go_to_what_occurred_last() -> None:
    limits = SuffixLimits(budget=1)
    assert draft(None, python_tree([1, 5, 1, 6]), [1], limits).tokens == (6,)
    assert draft(None, python_tree([1, 6], [1, 5]), [1], limits).tokens == (5,)
    assert draft(None, python_tree([1, 5, 1, 6, 1, 5]), [1], limits).tokens == (5,)


# ----------------------------------------------------------------------------------------- native = Python

SHAPES: list[dict[str, Any]] = [
    {},
    {"best_first": True},
    {"parents": (-1, -1, 0, 0, 1, 2, -1), "ranks": (0, 1, 0, 2, 0, 0, 3)},
]


class Pair:
    """Both trees, told the same."""

    def __init__(self, depth: int) -> None:
        self.native = NativeSuffixTree(native_or_skip(), depth)
        self.python = PythonSuffixTree(depth)
        self.live: list[tuple[int, int, list[int]]] = []  # native and Python number, tokens

    def begin(self) -> None:
        self.live.append((self.native.begin(), self.python.begin(), []))

    def append(self, i: int, tokens: list[int]) -> None:
        native, python, known = self.live[i]
        self.native.append(native, array(tokens))
        self.python.append(python, array(tokens))
        known.extend(tokens)

    def remove(self) -> None:
        native, python, _ = self.live.pop(0)
        self.native.remove(native)
        self.python.remove(python)

    def settle(self, most: int) -> None:
        assert self.native.settle(most) == self.python.settle(most)
        assert self.native.num_tokens == self.python.num_tokens
        self.native.check()

    def compare(self, context: list[int], limits: SuffixLimits, native_seq: int = -1) -> SuffixDraft:
        found = native_draft(None, self.native, array(context), limits, global_seq=native_seq)
        assert found == draft(None, self.python, context, limits)
        return found


def random_stream(seed: int) -> int:
    """Random operations on a pair; how many drafts were not empty."""
    rng = random.Random(seed)
    depth, vocab = (
        rng.randint(1, 9),
        rng.choice([1, 2, 3, 4, 5, 12]),
    )  # 12: more children than short lists have
    pair = Pair(depth)
    drafts = 0
    for _ in range(rng.randint(1, 60)):
        kind = rng.random()
        if kind < 0.15 or not pair.live:
            pair.begin()
        elif kind < 0.75:
            i = rng.randrange(len(pair.live))
            known = pair.live[i][2]
            tokens = [rng.randrange(vocab) for _ in range(rng.randint(0, 20))]
            if known and rng.random() < 0.3:
                tokens = known[: rng.randint(1, 40)]  # long repeats: labels that cross blocks of 13 tokens
            pair.append(i, tokens)
        elif kind < 0.82:
            pair.native.close(rng.choice(pair.live)[0])
        else:
            pair.remove()
        pair.settle(rng.choice([0, 3, 30, 1000]))
        for _ in range(4):
            string = [rng.randrange(vocab) for _ in range(rng.randint(1, depth))]
            assert pair.native.count(string) == pair.python.count(string), string
        if not pair.live:
            continue
        native, _, known = rng.choice(pair.live)
        context = [rng.randrange(vocab) for _ in range(rng.randint(0, 4))] + known or [0]
        limits = SuffixLimits(
            factor=rng.choice([0.5, 1, 2.5]),
            offset=rng.choice([0, 1, -1]),
            min_prob=rng.choice([0, 0.1, 0.3]),
            budget=rng.randint(1, 10),
            max_depth=rng.randint(1, 9),
            **rng.choice(SHAPES),
        )
        drafts += bool(pair.compare(context, limits, native if rng.random() < 0.6 else -1).tokens)
    return drafts


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_native_tree_equals_the_definition(seed: int) -> None:
    random_stream(seed)


def test_random_streams_do_draft() -> None:
    assert sum(random_stream(seed) for seed in range(20)) > 50


def test_many_children_and_long_lists() -> None:
    """More children than a piece of the list memory holds, gained and lost again."""
    pair = Pair(3)
    for wave in range(3):
        pair.begin()
        tokens = np.arange(12_000)
        np.random.default_rng(wave).shuffle(tokens)
        both = np.stack([np.zeros(12_000, int), tokens + 1], 1).reshape(-1)  # 0 a 0 b 0 c ...
        pair.append(-1, both.tolist())
    assert pair.native.count([0]) == 36_000
    for token in (1, 77, 12_000):
        assert pair.native.count([0, token]) == 3
    limits = SuffixLimits(min_prob=0, budget=1)
    pair.compare([5, 0], limits)
    assert native_draft(None, pair.native, array([0]), SuffixLimits(min_prob=0.1)).tokens == ()
    for left in (2, 1, 0):
        pair.remove()
        pair.settle(1 << 40)
        assert pair.native.count([0]) == 12_000 * left
    assert pair.native.num_nodes == 0


def test_an_empty_tree_has_no_opinion() -> None:
    tree = NativeSuffixTree(native_or_skip(), 8)
    seq = tree.begin()
    assert tree.count([1]) == 0
    assert native_draft(None, tree, array([1, 2]), SuffixLimits(), global_seq=seq) == SuffixDraft()
    tree.remove(seq)
    assert tree.settle(1) == 0
    tree.check()


def test_agree_counts_equal_leading_tokens() -> None:
    pair = Pair(4)
    pair.begin()
    pair.append(0, list(range(40)))
    for other in ([], [0, 1, 2, 9], list(range(60)), [5], list(range(16)), list(range(33))):
        assert pair.native.agree(0, array(other)) == pair.python.agree(0, array(other))


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("vocab", [1, 2, 300, 50_000])
def test_memory_per_cached_token(vocab: int) -> None:
    """Under 100 bytes, whatever the text; and it does not grow while outputs come and go."""
    tree = NativeSuffixTree(native_or_skip(), 24)
    stream = np.random.default_rng(1).integers(0, vocab, 300_000).astype(np.int32)
    size, cached = 500, 200
    seqs = []
    held = 0
    for i in range(0, len(stream), size):
        if len(seqs) == cached:
            held = held or tree.num_bytes
            tree.remove(seqs.pop(0))
        seqs.append(tree.begin())
        tree.append(seqs[-1], stream[i : i + size])
        tree.close(seqs[-1])
        tree.settle(4 * size)
    assert tree.num_tokens == size * cached
    assert tree.num_bytes < 100 * tree.num_tokens + (1 << 18)
    assert tree.num_bytes < 1.15 * held + (1 << 18)

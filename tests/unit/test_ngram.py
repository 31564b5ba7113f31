"""Prompt lookup against a brute-force search."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.native import native_or_skip

from draftwise.propose.base import DraftRow
from draftwise.propose.lookup.ngram import NgramProposer
from draftwise.types import EMPTY_PROPOSAL, Speculation


def row(tokens: Any, rid: int = 1, budget: int = 4, max_depth: int = 100) -> DraftRow:
    return DraftRow(
        rid=rid,
        token_ids_np=np.asarray(tokens, dtype=np.int32),
        num_prompt=1,
        budget=budget,
        max_depth=max_depth,
        speculation=Speculation("ngram", budget),
        sampling=None,  # type: ignore[arg-type]
        block_table_np=np.zeros(0, np.int32),
        filled=0,
    )


def brute_force(tokens: list[int], longest: int, shortest: int, length: int) -> tuple[int, ...]:
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):  # the most recent occurrence before the suffix itself
            if len(tokens) > n and tokens[end - n + 1 : end + 1] == tokens[-n:]:
                copy = list(tokens)
                for i in range(length):
                    copy.append(copy[end + 1 + i])
                return tuple(copy[len(tokens) :])
    return ()


def test_the_published_example() -> None:
    (proposal,) = NgramProposer(2, 2).propose([row([1, 2, 3, 4, 1, 2, 3], budget=3)])
    assert proposal.tokens == (4, 1, 2)
    assert proposal.is_chain and proposal.method == "ngram" and proposal.q is None


@pytest.mark.parametrize(
    ("tokens", "longest", "shortest", "budget", "expected"),
    [
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, 1, (8,)),  # the most recent occurrence
        ([7, 1, 2, 9, 5, 2, 8, 7, 1, 2], 3, 1, 1, (9,)),  # the longest suffix, though a shorter one is nearer
        ([3, 1, 2, 9, 5, 2, 8, 7, 1, 2], 3, 1, 1, (9,)),  # two tokens, when three do not match
        ([5, 6, 5, 6], 2, 2, 5, (5, 6, 5, 6, 5)),  # past the end: the period goes on
        ([4, 4], 1, 1, 3, (4, 4, 4)),
        ([1, 2, 3, 4], 3, 1, 4, ()),
        ([1], 3, 1, 4, ()),
        ([1, 1], 5, 2, 4, ()),  # (1, 1) occurs once
    ],
)
def test_by_hand(
    tokens: list[int], longest: int, shortest: int, budget: int, expected: tuple[int, ...]
) -> None:
    (proposal,) = NgramProposer(longest, shortest).propose([row(tokens, budget=budget)])
    assert proposal.tokens == expected
    assert brute_force(tokens, longest, shortest, budget) == expected
    assert expected or proposal is EMPTY_PROPOSAL


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_equals_brute_force_however_the_text_arrives(
    tokens: list[int], a: int, b: int, budget: int, steps: list[int]
) -> None:
    longest, shortest = max(a, b), min(a, b)
    proposer = NgramProposer(longest, shortest)
    n = 0
    for step in [*steps, len(tokens)]:
        n = min(n + step, len(tokens))
        (proposal,) = proposer.propose([row(tokens[:n], budget=budget)])
        assert proposal.tokens == brute_force(tokens[:n], longest, shortest, budget)
        if n == len(tokens):
            break


def test_depth_and_budget_bound_the_draft() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    for budget, max_depth in ((2, 9), (9, 2)):
        (proposal,) = NgramProposer(2, 2).propose([row(tokens, budget=budget, max_depth=max_depth)])
        assert proposal.tokens == (3, 4)


def test_requests_do_not_see_each_other() -> None:
    proposer = NgramProposer(2, 2)
    first, second = proposer.propose([row([1, 2, 3, 1, 2], rid=1), row([1, 2, 7, 1, 2], rid=2)])
    assert (first.tokens[0], second.tokens[0]) == (3, 7)
    assert proposer.propose([row([5, 1, 2], rid=3)]) == [EMPTY_PROPOSAL]


def test_removed_and_resumed() -> None:
    proposer = NgramProposer(2, 1)
    proposer.propose([row([1, 2, 3, 1], rid=1), row([4, 4, 4], rid=2)])
    proposer.remove(1)
    proposer.remove(1)
    assert set(proposer._indexes) == {2}, "nothing stays behind"
    (proposal,) = proposer.propose([row([1, 2, 3, 1, 2], rid=1)])
    assert proposal.tokens == brute_force([1, 2, 3, 1, 2], 2, 1, 4)


def test_a_request_that_became_shorter_is_indexed_anew() -> None:
    proposer = NgramProposer(2, 1)
    proposer.propose([row([1, 2, 3, 1, 2, 3, 1, 2], rid=1)])
    (proposal,) = proposer.propose([row([9, 8, 7, 9], rid=1)])
    assert proposal.tokens[0] == 8


def test_other_integer_types_mean_the_same() -> None:
    tokens = np.array([1, 2, 3, 4, 1, 2, 3], dtype=np.int64)
    request = row([0])
    wide = DraftRow(
        **{f: getattr(request, f) for f in DraftRow.__slots__ if f != "token_ids_np"}, token_ids_np=tokens
    )
    assert NgramProposer(2, 2).propose([wide])[0].tokens == (4, 1, 2, 3)


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (5, 0), (-1, -1)])
def test_lengths_that_make_no_sense(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramProposer(longest, shortest)


@pytest.mark.parametrize(
    ("longest", "shortest", "sizes"),
    [(None, None, [5, 4, 3, 2]), (4, None, [4]), (None, 3, [3]), (4, 2, [4, 3, 2])],
)
def test_create_takes_the_lengths_from_the_configuration(
    longest: int | None, shortest: int | None, sizes: list[int]
) -> None:
    class Speculative:
        prompt_lookup_max, prompt_lookup_min = longest, shortest
        num_speculative_tokens = 3

    class Context:
        speculative = Speculative()

    assert list(NgramProposer.create(Context()).sizes) == sizes  # type: ignore[arg-type]


def test_the_cost_of_a_step_does_not_grow_with_the_context() -> None:
    """Ratio of medians: 16 times the context may cost a little more (larger tables), not 16 times as much."""
    tokens = np.random.default_rng(0).integers(0, 50, 34_000).astype(np.int32)

    def median(context: int) -> float:
        proposer = NgramProposer()
        proposer.propose([row(tokens[:context])])
        times = []
        for n in range(context + 3, context + 903, 3):
            request = row(tokens[:n])
            start = time.perf_counter()
            proposer.propose([request])
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    short, long = median(2_000), median(32_000)
    assert long < 5 * short
    assert long < 500e-6


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 6),
    st.booleans(),
)
def test_native_and_python_say_the_same(
    texts: list[list[int]], a: int, b: int, budget: int, step: int, forced: bool
) -> None:
    """Several requests in one call, at different lengths, some with tokens that a grammar forces."""
    native_or_skip()
    ours, reference = (NgramProposer(max(a, b), min(a, b), native=native) for native in (True, False))
    for end in range(1, 41, step):
        rows = [row(text[:end], rid, budget, 1 + rid * 3) for rid, text in enumerate(texts)]
        if forced:
            rows[0].forced = (1, 2)[: rows[0].max_depth]
        assert ours.look_ups(rows) == reference.look_ups(rows)


def test_a_text_that_begins_anew_has_an_index_of_its_own() -> None:
    for native in (None, False):
        proposer = NgramProposer(2, 2, native=native)
        assert proposer.propose([row([1, 2, 3, 1, 2])])[0].tokens[:1] == (3,)
        assert proposer.propose([row([1, 2])])[0] is EMPTY_PROPOSAL
        assert proposer.propose([row([1, 2, 4, 1, 2])])[0].tokens[:1] == (4,)


def test_many_ngrams_find_their_places() -> None:
    """Tables grow; nothing is lost on the way."""
    native_or_skip()
    tokens = [(7 * i * i + i // 3) % 97 for i in range(3000)]
    ours, reference = NgramProposer(5, 1, native=True), NgramProposer(5, 1, native=False)
    for end in range(100, 3001, 100):
        one = [row(tokens[:end])]
        assert ours.look_ups(one) == reference.look_ups(one)

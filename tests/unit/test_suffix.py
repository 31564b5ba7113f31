"""The suffix proposer: what it drafts for requests that come, go, return and repeat each other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.suffix_rows import TEXT, array, row, run
from tests.native import native_or_skip

from draftwise.config.trees import DynamicTree
from draftwise.propose.lookup.suffix import SuffixProposer
from draftwise.propose.lookup.suffix_native import NativeSuffixTree
from draftwise.propose.lookup.suffix_python import PythonSuffixTree, SuffixLimits, draft
from draftwise.types import EMPTY_PROPOSAL, Proposal


@pytest.fixture(params=["native", "python"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param == "native":
        native_or_skip()
    return bool(request.param == "native")


# -------------------------------------------------------------------------------------------- what is drafted


def test_forced_tokens_are_followed_by_what_followed_them(native: bool) -> None:
    """A grammar knows the next tokens: the draft goes on behind them, in the request's text or another's."""
    proposer = SuffixProposer(native=native)
    run(proposer, 7, [1], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9])
    forced = replace(row([1, 2, 3, 70, 5], 0, num_prompt=2), forced=(6, 7))
    (got,) = proposer.propose([forced])
    assert got.tokens == (6, 7, 8, 9, 5) and got.is_chain and got.method == "suffix"
    (short,) = proposer.propose([replace(forced, budget=3)])
    assert short.tokens == (6, 7, 8)
    # Nothing behind them, or no room: they are proposed by whoever knows the grammar.
    for lost in (replace(forced, budget=2), replace(row([1, 2, 3], 1), forced=(90, 91))):
        assert proposer.propose([lost]) == [EMPTY_PROPOSAL]


def test_a_dynamic_tree_has_the_likeliest_nodes(native: bool) -> None:
    proposer = SuffixProposer(native=native, min_token_prob=0.0)
    text = [1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3, 4, 6, 1, 2, 3]
    plain, dynamic = row(text, 0, num_prompt=18), row(text, 1, num_prompt=18)
    dynamic = replace(dynamic, speculation=replace(dynamic.speculation, dynamic=DynamicTree()))
    (chained,), (tree,) = proposer.propose([plain]), proposer.propose([dynamic])
    assert chained.is_chain and chained.tokens[0] == 4
    assert tree == SuffixProposer(native=native, min_token_prob=0.0, tree=True).propose([plain])[0]
    assert {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent < 0} == {4, 5}


def test_repetition_within_a_request(native: bool) -> None:
    proposer = SuffixProposer(native=native, max_cached_requests=0)
    (first,) = proposer.propose([row([1, 2, 3, 4, 5, 6])])
    assert first is EMPTY_PROPOSAL
    # 1 2 3 occurred twice, once at the end: 4 follows with probability 1/2, and then 5 and 6 for certain.
    (second,) = proposer.propose([row([1, 2, 3, 4, 5, 6, 1, 2, 3])])
    assert second == Proposal((4, 5, 6), (-1, 0, 1), "suffix")
    assert second.draw == "fixed" and second.q is None


def test_past_outputs_are_drafted_from_and_prompts_are_not(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    run(proposer, 1, [1, 2, 3, 4, 5, 6], TEXT)
    (after_prompt,) = proposer.propose([row([8, 2, 3, 4], 2, num_prompt=4)])
    assert after_prompt is EMPTY_PROPOSAL
    (known,) = proposer.propose([row([9, *TEXT[:4]], 3)])
    # The request's own four tokens are an occurrence too, with nothing behind it: probability 1/2.
    assert known.tokens == tuple(TEXT[4:8])
    (prompt_too,) = proposer.propose([row([7, *TEXT[10:14]], 4, num_prompt=5)])
    assert prompt_too.tokens == tuple(TEXT[14:18]), "the end of a prompt is looked up as well"


def test_the_last_tokens_of_an_output_are_known(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    run(proposer, 1, [1], TEXT, chunk=len(TEXT) - 1)
    (found,) = proposer.propose([row([2, *TEXT[-4:-1]], 2)])
    assert found.tokens == (TEXT[-1],)


def test_concurrent_requests_learn_from_each_other(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    proposer.propose([row([1, *TEXT[:20]], 1), row([2], 2)])
    (found,) = proposer.propose([row([2, *TEXT[:6]], 2)])
    assert found.tokens == tuple(TEXT[6:12])


@pytest.mark.parametrize(
    ("factor", "offset", "wanted"), [(1.0, 0.0, 5), (0.5, 0.0, 2), (2.0, 1.0, 11), (9.0, 0.0, 15)]
)
def test_longer_matches_draft_more(native: bool, factor: float, offset: float, wanted: int) -> None:
    proposer = SuffixProposer(native=native, max_spec_factor=factor, max_spec_offset=offset)
    run(proposer, 1, [1], TEXT)
    (found,) = proposer.propose([row([99, *TEXT[:5]], 2)])
    assert found.tokens == tuple(TEXT[5 : 5 + wanted])


def test_budget_depth_and_probability_bound_the_draft(native: bool) -> None:
    proposer = SuffixProposer(native=native, min_token_prob=0.3)
    run(proposer, 1, [1], TEXT)
    for limits in ({"budget": 2}, {"max_depth": 2}):
        (found,) = proposer.propose([row([99, *TEXT[:5]], 2, **limits)])
        assert found.tokens == tuple(TEXT[5:7])
    unsure = SuffixProposer(native=native, min_token_prob=0.3)
    for i in range(4):
        run(unsure, i, [1], [5, 6, 7, 8 + i])
    # 5 6 7 occurred five times, with this request's own, and four different tokens followed.
    assert unsure.propose([row([99, 5, 6, 7], 9)]) == [EMPTY_PROPOSAL]
    sure = SuffixProposer(native=native, min_token_prob=0.2)
    for i in range(4):
        run(sure, i, [1], [5, 6, 7, 8 + i])
    assert sure.propose([row([99, 5, 6, 7], 9)])[0].tokens == (11,), "of equal ones the last"


def test_dynamic_tree(native: bool) -> None:
    proposer = SuffixProposer(native=native, tree=True, max_spec_factor=2.0)
    run(proposer, 1, [1], [5, 6, 7, 8])
    run(proposer, 2, [1], [5, 6, 7, 8])
    run(proposer, 3, [1], [5, 6, 9, 3])
    (found,) = proposer.propose([row([99, 5, 6], 4, budget=8)])
    assert found.tokens == (7, 8, 9, 3)
    assert found.parents == (-1, 0, -1, 2)
    (narrow,) = proposer.propose([row([99, 5, 6], 4, budget=3)])
    assert (narrow.tokens, narrow.parents) == ((7, 8, 9), (-1, 0, -1))
    (flat,) = proposer.propose([row([99, 5, 6], 4, max_depth=1)])
    assert (flat.tokens, flat.parents) == ((7, 9), (-1, -1))


def test_given_tree(native: bool) -> None:
    proposer = SuffixProposer(native=native, max_spec_factor=9.0)
    run(proposer, 1, [1], [5, 6, 7, 8])
    run(proposer, 2, [1], [5, 6, 7, 8])
    run(proposer, 3, [1], [5, 6, 9, 3])
    parents = (-1, -1, 0, 0, 1)
    for ranks in ((0, 1, 0, 1, 0), None):
        (found,) = proposer.propose([row([99, 5, 6], 4, tree=parents, ranks=ranks)])
        assert (found.tokens, found.parents) == ((7, 9, 8, 3), (-1, -1, 0, 1)), (
            "only one token followed 5 6 7"
        )
    (skipped,) = proposer.propose([row([99, 5, 6], 4, tree=(-1, 0), ranks=(1, 0))])
    assert (skipped.tokens, skipped.parents) == ((9, 3), (-1, 0))


# ------------------------------------------------------------------------------------ requests come and go


def test_oldest_outputs_leave_first(native: bool) -> None:
    proposer = SuffixProposer(native=native, max_cached_requests=3)
    texts = [list(range(100 * i, 100 * i + 12)) for i in range(1, 5)]
    for rid, text in enumerate(texts):
        run(proposer, rid, [1], text)
    assert proposer.num_cached_requests == 3
    # Who asks has an output of its own, which pushes one more out: text 1, then 2, then 3.
    for rid, (i, known) in enumerate([(0, False), (3, True), (2, False), (3, False)], 10):
        (found,) = proposer.propose([row([99, *texts[i][:5]], rid)])
        assert found.tokens == (tuple(texts[i][5:10]) if known else ()), rid
    assert proposer.num_cached_requests == 3


def test_a_running_request_may_lose_its_place(native: bool) -> None:
    proposer = SuffixProposer(native=native, max_cached_requests=1)
    proposer.propose([row([1, *TEXT[:10]], 1)])
    proposer.propose([row([2, 500], 2)])
    (found,) = proposer.propose([row([1, *TEXT[:10], *TEXT[:3]], 1)])
    assert found.tokens == tuple(TEXT[3:6]), "its own tree is still there"
    run(proposer, 2, [2], [500, 501, 502, 503])
    (found,) = proposer.propose([row([1, *TEXT[:10], 500, 501], 1)])
    assert found.tokens == (502, 503), "and what others said"
    proposer.leaving(1, array([1, *TEXT]))
    proposer.remove(1)
    assert proposer.num_cached_requests == 1


def test_no_cache(native: bool) -> None:
    proposer = SuffixProposer(native=native, max_cached_requests=0)
    run(proposer, 1, [1], TEXT)
    assert proposer.propose([row([99, *TEXT[:5]], 2)]) == [EMPTY_PROPOSAL]
    assert (proposer.num_cached_requests, proposer.num_cached_tokens) == (0, 0)


def test_cached_tokens_are_bounded(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    proposer.max_cached_tokens = 400
    rng = np.random.default_rng(0)
    for rid in range(60):
        run(proposer, rid, [1], rng.integers(0, 50, int(rng.integers(1, 60))).tolist())
        assert proposer.num_cached_tokens < 400 + 130, (
            "the limit, the newest output, and what is being taken away"
        )
    assert proposer.num_cached_tokens > 300
    assert 5 < proposer.num_cached_requests < 60


def test_a_preempted_request_is_counted_once(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    for n in (5, 10, 20):
        proposer.propose([row([1, *TEXT[:n]], 1)])
        proposer.leaving(1, array([1, *TEXT[: n + 3]]))  # the last step's tokens, never drafted from
        proposer.remove(1)
    proposer.propose([row([1, *TEXT[:30]], 1)])
    assert (proposer.num_cached_requests, proposer.num_cached_tokens) == (1, 30)
    tree: Any = proposer._global
    assert [tree.count(TEXT[i : i + 3]) for i in range(28)] == [1] * 28, (
        "also across the places where it left"
    )
    proposer.remove(1)
    # Another request with the same number: an engine does not do that, but it must not mix them up.
    proposer.propose([row([1, *TEXT[40:45]], 1)])
    assert (proposer.num_cached_requests, proposer.num_cached_tokens) == (2, 35)


def test_forget(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    run(proposer, 1, [1], TEXT)
    proposer.propose([row([1, *TEXT[:10]], 2)])
    proposer.forget()
    assert (proposer.num_cached_requests, proposer.num_cached_tokens) == (0, 0)
    (own,) = proposer.propose([row([1, *TEXT[:10], *TEXT[:3]], 2)])
    assert own.tokens == tuple(TEXT[3:6]), "a request that runs keeps its own tree"
    proposer.leaving(2, array([1, *TEXT]))
    proposer.remove(2)
    assert proposer.propose([row([9, *TEXT[20:25]], 3)]) == [EMPTY_PROPOSAL]
    assert proposer.num_cached_requests == 1


def test_nothing_is_made_before_it_is_used(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    proposer.leaving(1, array(TEXT))
    proposer.remove(1)
    assert proposer._global is None
    assert not proposer._requests and not proposer._output_of


def test_nothing_grows_with_finished_requests(native: bool) -> None:
    proposer = SuffixProposer(native=native, max_cached_requests=3)
    for rid in range(40):
        run(proposer, rid, [1, 2], [rid, 3, rid, 4, rid, 5, rid])
    assert not proposer._requests
    assert len(proposer._output_of) == len(proposer._cached) == 3


def test_other_integer_types_mean_the_same(native: bool) -> None:
    proposer = SuffixProposer(native=native)
    wide = replace(row([1]), token_ids_np=np.array([1, 2, 3, 1, 2], np.int64))
    assert proposer.propose([wide])[0].tokens == (3, 1)
    proposer.leaving(0, np.array([1, 2, 3, 1, 2, 3, 4], np.int64))
    assert proposer.num_cached_tokens == 6


# ------------------------------------------------------------------------------------------ native = Python


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_both_ways_propose_the_same(seed: int) -> None:
    """Requests of a few tokens' vocabulary that come, leave, return and repeat each other; small caches."""
    native_or_skip()
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "max_tree_depth": rng.randint(2, 8),
        "max_cached_requests": rng.choice([0, 1, 2, 5]),
        "max_spec_factor": rng.choice([0.5, 1.0, 3.0]),
        "min_token_prob": rng.choice([0.0, 0.1, 0.4]),
        "tree": rng.random() < 0.5,
    }
    both = [SuffixProposer(native=True, **options), SuffixProposer(native=False, **options)]
    limit = rng.choice([30, 100_000])
    for proposer in both:
        proposer.max_cached_tokens = limit
    texts: dict[int, list[int]] = {}
    prompts: dict[int, int] = {}
    for _ in range(rng.randint(1, 50)):
        rid = rng.randint(0, 5) if rng.random() < 0.7 else rng.randint(0, 30)
        if rid not in texts:
            texts[rid] = [rng.randint(0, 3) for _ in range(rng.randint(1, 12))]
            prompts[rid] = len(texts[rid])
        else:
            texts[rid] += [rng.randint(0, 3) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.2:
            for proposer in both:
                proposer.leaving(rid, array(texts[rid]))
                proposer.remove(rid)
            if rng.random() < 0.5:
                del texts[rid]
            continue
        tree = rng.choice([None, (-1, -1, 0, 1, 1)])
        asked = row(texts[rid], rid, num_prompt=prompts[rid], budget=rng.randint(1, 9), tree=tree)
        one, two = (proposer.propose([asked])[0] for proposer in both)
        assert one == two
        assert len(one) <= asked.budget
        assert both[0].num_cached_tokens == both[1].num_cached_tokens
        if both[0]._global is not None:
            assert isinstance(both[0]._global, NativeSuffixTree)
            both[0]._global.check()


def test_a_draft_is_that_of_the_definition() -> None:
    """The proposer's book-keeping against trees that are built from scratch for every look-up."""
    native_or_skip()
    rng = random.Random(5)
    proposer = SuffixProposer(native=True, max_tree_depth=6)
    outputs: list[list[int]] = []
    for rid in range(12):
        prompt = [rng.randint(0, 3) for _ in range(4)]
        outputs.append([])
        for _ in range(8):
            outputs[-1] += [rng.randint(0, 3) for _ in range(rng.randint(1, 3))]
            local, global_ = PythonSuffixTree(6), PythonSuffixTree(6)
            local.append(local.begin(), array(prompt + outputs[-1]))
            for output in outputs:
                global_.append(global_.begin(), array(output))
            expected = draft(local, global_, prompt + outputs[-1], SuffixLimits(budget=15))
            (found,) = proposer.propose([row(prompt + outputs[-1], rid, num_prompt=4)])
            assert found.tokens == expected.tokens
        proposer.remove(rid)


def test_many_requests_in_one_call_get_what_they_get_alone() -> None:
    """Chains and trees by counts, requests of different lengths, a cache that they share; and where requests enter, or
    the cache is full, the call is taken apart."""
    native_or_skip()
    together, alone = SuffixProposer(native=True), SuffixProposer(native=True)
    texts = [[(3 * i * i + rid * i) % 11 for i in range(60 + 5 * rid)] for rid in range(4)]
    calls = 0
    for end in range(20, 60, 3):
        rows = [
            row(text[:end], rid, num_prompt=10 + rid, budget=3 + 4 * rid) for rid, text in enumerate(texts)
        ]
        rows[1].speculation = replace(rows[1].speculation, dynamic=DynamicTree())
        expected = [alone.look_up(one) for one in rows]
        assert together.look_ups(rows) == expected
        calls += sum(bool(found.tokens) for found, _ in expected)
    assert calls > 20
    together.max_cached_tokens = alone.max_cached_tokens = 100
    for proposer in (together, alone):
        proposer.leaving(3, array(texts[3]))
        proposer.remove(3)
    rows = [row(text, rid, num_prompt=10 + rid) for rid, text in enumerate(texts[:3])]
    assert together.look_ups(rows) == [alone.look_up(one) for one in rows]
    assert together.num_cached_requests == alone.num_cached_requests

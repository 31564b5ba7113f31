"""Where requests go: the choice as a function, and the books that the router keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.fleet.choice import Candidate, cost, ranked
from draftwise.fleet.kinship import Kinship, shingles
from draftwise.fleet.router import Router
from draftwise.kv.prefix_cache import block_digests, root_digest
from draftwise.types import IntArray

BLOCK = 4


@st.composite
def candidates(draw: Callable[..., int]) -> list[Candidate[int]]:
    sizes = st.integers(0, 5000)
    return [
        Candidate(name, draw(sizes), float(draw(sizes)), float(draw(st.integers(0, 64))), name)
        for name in range(draw(st.integers(1, 6)))
    ]  # fmt: skip


@given(candidates(), st.integers(1, 6000), st.randoms())
def test_the_choice_is_a_function_of_what_is_seen(
    them: list[Candidate[int]], tokens: int, random: object
) -> None:
    order = ranked(them, tokens)
    assert sorted(order) == sorted(them)
    costs = [cost(c, tokens) for c in order]
    assert costs == sorted(costs)
    random.shuffle(them)  # type: ignore[attr-defined]
    assert [c[1:] for c in ranked(them, tokens)] == [c[1:] for c in order]


@given(candidates(), st.integers(1, 6000), st.integers(1, 3000))
def test_more_of_the_prefix_or_less_to_do_never_loses_a_request(
    them: list[Candidate[int]], tokens: int, more: int
) -> None:
    best = ranked(them, tokens)[0]
    others = [c for c in them if c.name != best.name]
    for better in (
        best._replace(cached=best.cached + more),
        best._replace(load=max(best.load - more, 0)),
        best._replace(kin=best.kin + more),
    ):
        assert ranked([*others, better], tokens)[0].name == best.name


@given(candidates(), st.integers(1, 6000), st.integers(0, 10**6))
def test_only_the_preferred_replicas_own_load_takes_a_request_away(
    them: list[Candidate[int]], tokens: int, busy: int
) -> None:
    """Another replica may be as busy as it likes: affinity is not switched off for those who prefer a third one."""
    best, *others = ranked(them, tokens)
    for other in others:
        rest = [c for c in others if c.name != other.name]
        assert ranked([best, *rest, other._replace(load=other.load + busy)], tokens)[0].name == best.name


def ids(rng: np.random.Generator, count: int) -> IntArray:
    return rng.integers(0, 1000, count).astype(np.int32)


def digests(tokens_np: IntArray, salt: str | None = None) -> list[bytes]:
    return block_digests(root_digest(salt), tokens_np, BLOCK, 0, len(tokens_np) // BLOCK)


def make(count: int, **options: bool) -> Router:
    router = Router(BLOCK, **options)
    for name in range(count):
        router.add(name)
    return router


def send(router: Router, tokens_np: IntArray, **options: int) -> int:
    route = router.route(tokens_np, **options)
    name = route.names[0]
    router.begin(route, name)
    assert isinstance(name, int)
    return name


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(0, 60), st.integers(1, 3))
def test_a_cached_prefix_is_counted_as_the_cache_itself_counts_it(
    seed: int, length: int, stored: int, count: int
) -> None:
    from draftwise.kv.prefix_cache import PrefixCache

    rng = np.random.default_rng(seed)
    prompt_np, router, cache = ids(rng, length), make(count), PrefixCache(BLOCK)
    made = digests(prompt_np)[:stored]
    router.stored(0, made)
    for block, digest in enumerate(made):
        cache.register(digest, block)
    route = router.route(prompt_np)
    assert route.cached[0] == len(cache.match(prompt_np, None).blocks) * BLOCK
    assert all(route.cached[name] == 0 for name in range(1, count))
    router.removed(0, made[:1])
    assert router.route(prompt_np).cached[0] == 0
    router.stored(0, made)
    router.cleared(0)
    assert router.route(prompt_np).cached[0] == 0


def test_a_prompt_under_way_draws_those_that_begin_like_it() -> None:
    rng, router = np.random.default_rng(0), make(3)
    prefix_np = ids(rng, 400)
    first = send(router, prefix_np, max_tokens=1)
    assert send(router, np.concatenate([prefix_np, ids(rng, 20)]), max_tokens=1) == first
    assert send(router, ids(rng, 400), max_tokens=1) != first, "a strange one goes where less is to be done"


def test_what_ended_leaves_no_trace_but_the_mean_of_outputs() -> None:
    router = make(2)
    prompt_np = ids(np.random.default_rng(1), 100)
    route = router.route(prompt_np)
    tickets = [router.begin(route, 0), router.begin(router.route(prompt_np), 0)]
    assert router.num_requests(0) == 2 and router.load(0) > 100
    for ticket in [*tickets, *tickets]:  # twice is once
        router.end(ticket, 10)
    assert router.num_requests(0) == 0 and router.load(0) == 0
    assert router.route(prompt_np).cached == {0: 0, 1: 0}
    assert router.route(prompt_np).num_output < 128


def test_a_hot_prefix_spills_over_and_others_keep_their_replica() -> None:
    """Requests of one prefix flood four replicas, and nothing ends. All of them work in the end; the loads are no
    further apart than the prefix is worth; and who has a prefix elsewhere still finds it."""
    rng, router = np.random.default_rng(2), make(4)
    hot_np, own_np = ids(rng, 1000), ids(rng, 1000)
    router.stored(3, digests(own_np))
    for number in range(400):
        send(router, np.concatenate([hot_np, ids(rng, 20)]), max_tokens=16)
        loads = [router.load(name) for name in range(4)]
        assert max(loads) - min(loads) <= 2 * 1000 + 2 * 1100
        if number % 40 == 0:
            assert router.route(np.concatenate([own_np, ids(rng, 20)])).names[0] == 3
    assert min(router.num_requests(name) for name in range(4)) > 60


def test_loads_from_outside_take_the_place_of_the_books() -> None:
    router = make(2)
    prompt_np = ids(np.random.default_rng(3), 50)
    assert router.route(prompt_np, loads={0: 500.0}).names == (1, 0)
    assert router.route(prompt_np, loads={1: 500.0}).names == (0, 1)
    assert router.route(prompt_np, among=[1, "gone"]).names == (1,)


def test_adapters_have_blocks_of_their_own() -> None:
    router = make(2)
    prompt_np = ids(np.random.default_rng(4), 80)
    router.stored(1, digests(prompt_np, "adapter 2"))
    assert router.route(prompt_np).cached == {0: 0, 1: 0}
    route = router.route(prompt_np, salts={0: "adapter 1", 1: "adapter 2"})
    assert route.cached == {0: 0, 1: 76} and route.names[0] == 1
    router.begin(route, 0, "adapter 1")
    assert router.route(prompt_np, salts={0: "adapter 1", 1: "adapter 1"}).cached == {0: 76, 1: 0}


def test_replicas_come_and_go() -> None:
    router = make(2)
    prompt_np = ids(np.random.default_rng(5), 40)
    ticket = router.begin(router.route(prompt_np), 0)
    router.remove(0)
    router.remove(0)
    router.stored(0, digests(prompt_np))
    assert router.names == (1,) and router.route(prompt_np).names == (1,)
    router.add(0)
    router.end(ticket, 3)  # of the one before
    assert router.num_requests(0) == 0 and router.load(0) == 0
    with pytest.raises(KeyError):
        router.add(1)
    router.remove(0)
    router.remove(1)
    assert router.route(prompt_np).names == ()


def test_equals_take_turns() -> None:
    router, rng = make(3, prefixes=False), np.random.default_rng(6)
    names = []
    for _ in range(6):
        route = router.route(ids(rng, 30), max_tokens=4)
        names.append(route.names[0])
        router.end(router.begin(route, names[-1]), None)
    assert sorted(names[:3]) == [0, 1, 2] and names[3:] == names[:3]


def test_prompts_that_are_alike_have_windows_in_common() -> None:
    rng = np.random.default_rng(7)
    body_np = ids(rng, 400)
    one, two = np.concatenate([ids(rng, 3), body_np]), np.concatenate([ids(rng, 50), body_np])
    assert 20 < len(shingles(one)) < 120
    assert len(shingles(one) & shingles(two)) > 0.8 * len(shingles(one))
    assert not shingles(one) & shingles(ids(rng, 400))
    assert shingles(body_np[:7]) == frozenset()
    kinship = Kinship()
    kinship.learn(shingles(one))
    assert kinship.share(shingles(two)) > 0.7 and kinship.share(frozenset()) == 0.0


def test_where_drafters_learn_alike_prompts_meet() -> None:
    rng = np.random.default_rng(8)
    body_np = ids(rng, 300)
    router = make(2, kinship=True)
    for tokens_np in (
        np.concatenate([ids(rng, 4), body_np]),
        ids(rng, 304),
    ):  # the second one lands on the other
        route = router.route(tokens_np, max_tokens=100)
        router.end(router.begin(route, route.names[0]), 100)
    alike_np = np.concatenate([ids(rng, 4), body_np])  # no block in common, for its beginning differs
    assert router.route(alike_np, max_tokens=100).names[0] == 0
    busy = router.route(alike_np, max_tokens=100, loads={0: 200.0})
    assert busy.names[0] == 1, "what drafts save is not worth any wait"


def test_conversations_find_what_they_would_find_in_one_cache() -> None:
    """At least 95 % of it, also where caches are small: blocks and requests are counted, no model runs."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks/fleet.py"), "--only", "hits"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["hits"]["one cache"] > 0.5
    assert found["hits"]["ratio"] > 0.95 and found["hits, small caches"]["ratio"] > 0.95

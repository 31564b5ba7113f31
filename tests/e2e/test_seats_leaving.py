"""Requests that leave their seats, take others, are cancelled, or have a drafter that fails: each goes on as it
stood."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from draftwise import LLM, AsyncLLM, SamplingParams
from draftwise.graphs.seats.shaping import Shaping
from draftwise.graphs.seats.step import SeatedSteps
from draftwise.runner.seats import Seats
from tests.e2e.conftest import token_ids
from tests.e2e.seated_engines import (
    Engines,
    engines,
    entry_of,
    failing,
    forests,
    graphs,
    growing,
    params_of,
    seats,
    sent_away_at_times,
    some,
    three_layers,
)

__all__ = ["engines", "forests", "growing", "graphs"]  # fixtures


def test_what_waited_when_a_request_came_is_not_kept(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proposal holds distributions over the vocabulary, for which no memory is planned once they are copied."""
    entered, kept = [], []
    enter, finish = Seats._enter, Seats.finish

    def noticed(self: Seats, *args: Any) -> Any:
        member = enter(self, *args)
        entered.extend([] if member is None or member.before is None else [member.before.q])
        return member

    def finished(self: Seats, flight: Any) -> Any:
        rows = finish(self, flight)
        kept.extend(member.before for member, _ in flight.members)
        return rows

    monkeypatch.setattr(Seats, "_enter", noticed)
    monkeypatch.setattr(Seats, "finish", finished)
    sent_away_at_times(monkeypatch)
    llm = engines.pair(entry_of(engines, "draft_model")).ahead
    llm.generate(engines.prompts, params_of("rejection", "draft_model", max_tokens=20))
    assert any(q is not None for q in entered) and kept == [None] * len(kept) != []


def test_cancelling_in_the_middle_disturbs_nobody(engines: Engines) -> None:
    params = params_of("coupled", "eagle3", output_kind="delta")
    wanted = token_ids(
        engines.waiting.generate(engines.prompts, [p.replace(output_kind="cumulative") for p in params])
    )
    options = engines.options(
        async_scheduling=True, num_kv_blocks=40, speculative_config=entry_of(engines, "eagle3")
    )

    async def one(llm: AsyncLLM, i: int) -> tuple[int, ...]:
        got: list[int] = []
        stop_at = 5 if i % 2 else 99
        async for output in llm.generate(engines.prompts[i], params[i]):
            got += output.outputs[0].token_ids
            if len(got) >= stop_at:
                break
        return tuple(got)

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(engines.target, **options) as llm:
            got = await asyncio.gather(*(one(llm, i) for i in range(8)))
            llm.check_integrity()
            return got

    for i, got in enumerate(asyncio.run(run())):
        assert got == wanted[i][: len(got)] and len(got) >= (5 if i % 2 else 14)


@pytest.mark.parametrize(
    ("method",),
    some(
        [("dflash",), ("three layers",), ("hybrid",)],  # a hybrid has a draft model
        [("draft_model",), ("eagle3",), ("ngram",), ("medusa",), ("early_exit",)],
    ),
)
def test_who_leaves_a_seat_goes_on_as_it_stood(
    engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive one after the other and leave their seats every few steps; drafts, what they were drawn from and
    a head's features go with the requests, so that no draw changes."""
    sent_away_at_times(monkeypatch)
    entry = three_layers(engines) if method == "three layers" else entry_of(engines, method)
    params = params_of("rejection", entry["method"], max_tokens=20)
    # a head that did not see a shared prefix drafts something else, which changes what is drawn
    options = engines.options(enable_prefix_caching=False, speculative_config=entry, async_scheduling=True)
    wanted = token_ids(engines.pair(entry).waiting.generate(engines.prompts, params))
    found: list[Seats] = []

    async def one(llm: AsyncLLM, i: int) -> tuple[int, ...]:
        got: tuple[int, ...] = ()
        async for output in llm.generate(engines.prompts[i], params[i]):
            got = tuple(output.outputs[0].token_ids)
        return got

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(engines.target, **options) as llm:
            executor: Any = llm._engine.core.executor
            found.append(executor.inner.seats)
            tasks = []
            for i in range(8):
                tasks.append(asyncio.create_task(one(llm, i)))
                steps = found[0].num_steps
                for _ in range(200):
                    if found[0].num_steps > steps + 2:
                        break
                    await asyncio.sleep(0.002)
            return list(await asyncio.gather(*tasks))

    assert asyncio.run(run()) == wanted
    assert found[0].num_entered > 12


def moving(engines: Engines, what: str) -> tuple[dict[str, Any], list[SamplingParams]]:
    """A drafter and requests of which the last one stays when all others have ended, and so takes the first seat.
    What is drawn depends on what was drafted, and that on features; or on what the request has said, and its biases."""
    if what == "features":
        entry, rule, more = three_layers(engines), "rejection", {}
    else:
        entry, rule = entry_of(engines, "draft_model"), "coupled"
        more = {"frequency_penalty": 1.2, "repetition_penalty": 1.3, "logit_bias": {3: 1.5, 7: -100.0}}
    params = params_of(rule, entry["method"], max_tokens=4)
    return entry, [*params[:7], params[7].replace(max_tokens=30, **more)]


def text_and_moves(engines: Engines, entry: dict[str, Any], params: list[SamplingParams]) -> tuple[Any, int]:
    """What an engine with seats says, and how often a request took another one."""
    moved: list[int] = []
    move = SeatedSteps.move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeatedSteps, "move", lambda *args: (moved.append(args[1]), move(*args)))
        return token_ids(engines.pair(entry).ahead.generate(engines.prompts, params)), len(moved)


@pytest.mark.parametrize("what", ["features", "shaping"])
def test_who_takes_another_seat_goes_on_as_it_stood(engines: Engines, what: str) -> None:
    entry, params = moving(engines, what)
    wanted = token_ids(engines.pair(entry).waiting.generate(engines.prompts, params))
    found, moved = text_and_moves(engines, entry, params)
    assert found == wanted and moved


def test_who_leaves_its_penalties_behind_does_not(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices it. What features a head reads may change no draw: `tests/unit/test_seats.py`."""
    entry, params = moving(engines, "shaping")
    wanted = token_ids(engines.pair(entry).waiting.generate(engines.prompts, params))
    monkeypatch.setattr(Shaping, "move", lambda *_: None)
    found, moved = text_and_moves(engines, entry, params)
    assert moved and found[:7] == wanted[:7] and found[7] != wanted[7]


LEAVING = [
    ("forests", "draft_model", "rejection"),
    ("engines", "hybrid", "coupled"),
]
MORE_LEAVING = [
    ("forests", "draft_model", "coupled"),
    ("forests", "eagle3", "coupled"),
    ("forests", "medusa", "block"),
]


@pytest.mark.parametrize(("family", "method", "rule"), some(LEAVING, MORE_LEAVING))
def test_who_leaves_a_seat_takes_its_drafts_along(
    request: pytest.FixtureRequest, family: str, method: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is verified in an ordinary step, and drafted on from there: all is accepted that would have been."""
    forests: Engines = request.getfixturevalue(family)
    sent_away_at_times(monkeypatch)
    params = params_of(rule, method, max_tokens=24)
    pair = forests.pair(entry_of(forests, method))
    before = seats(pair.ahead).num_entered
    found = []
    for llm in (pair.waiting, pair.ahead):
        done = llm.generate(forests.prompts, params)
        found.append([(o.outputs[0].token_ids, o.outputs[0].trace) for o in done])
        llm.check_integrity()
    assert found[0] == found[1]
    assert seats(pair.ahead).num_entered - before > 12


def test_a_drafter_stops_at_its_longest_context(engines: Engines) -> None:
    """Behind it nothing is drafted, and a head that is left there goes on behind a gap."""
    entry = next(entry for entry in engines.chosen if entry["method"] == "eagle3")
    options = engines.options(
        speculative_config=entry | {"max_model_len": 24}, enable_prefix_caching=False, num_kv_blocks=80
    )
    params = params_of("rejection", "eagle3", max_tokens=20)
    found = []
    for ahead in (False, True):
        with LLM(engines.target, async_scheduling=ahead, **options) as llm:
            done = llm.generate(engines.prompts, params)
            found.append([(o.outputs[0].token_ids, o.metrics.speculation.num_draft_tokens) for o in done])
    assert found[0] == found[1]


WRONG: dict[str, list[Any]] = {
    "kind": [failing, lambda *_: "guess"],
    "catch_up": [failing, lambda *_: 10_000, lambda *_: None],
    "place": [failing, lambda *_: (10_000, 0, 0), lambda *_: 3],
    "seats": [failing],
    "prepare": [failing],
    "went_on": [failing, lambda *_: (10_000, 0), lambda *_: (1, 99), lambda *_: None],
    "left": [failing],
}


class BesideMtp(NamedTuple):
    """A method, and an engine of it and of MTP; what it is asked, and the text of the engine that waits."""

    method: str
    llm: LLM
    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]
    wanted: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def beside_mtp(request: pytest.FixtureRequest, engines: Engines) -> Iterator[BesideMtp]:
    method, prompts = request.param, engines.prompts[:4]
    params = [params_of("coupled", method, max_tokens=8 + 2 * i)[i] for i in range(3)]
    params.append(params_of("coupled", "mtp", max_tokens=6)[3])
    wanted = token_ids(engines.waiting.generate(prompts, params))
    used = [entry_of(engines, method), entry_of(engines, "mtp")]
    with engines.make(async_scheduling=True, speculative_config=used, max_num_seqs=3) as llm:
        yield BesideMtp(method, llm, prompts, params, wanted)


# a head: those that its features go through; --all: every one
HOOKS = [*(("draft_model", hook) for hook in WRONG), ("eagle3", "catch_up"), ("eagle3", "went_on")]
MORE_HOOKS = [("eagle3", hook) for hook in WRONG]


@pytest.mark.parametrize(("beside_mtp", "hook"), some(HOOKS, MORE_HOOKS), indirect=["beside_mtp"])
def test_a_drafter_that_fails_costs_speculation_only(beside_mtp: BesideMtp, hook: str) -> None:
    """The last request has another drafter, and goes on with it."""
    method, llm, prompts, params, wanted = beside_mtp
    drafter = seats(llm)._seating.drafters[method]._drafter
    for number, wrong in enumerate(WRONG[hook]):
        before = Counter(llm.stats().drafter_failures)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter, hook, wrong)
            if hook == "left":
                sent_away_at_times(patch)
            outputs = llm.generate(prompts, params)
        assert token_ids(outputs) == wanted, number
        assert (
            Counter(llm.stats().drafter_failures)[f"{method}.seated_{hook}"]
            > before[f"{method}.seated_{hook}"]
        ), number
        assert outputs[3].metrics.speculation.num_drafts > 1, "its neighbour goes on"
        llm.check_integrity()
    again = llm.generate(prompts, params)
    assert token_ids(again) == wanted and again[0].metrics.speculation.num_drafts > 1


def test_a_drafter_that_cannot_say_whether_it_takes_part_does_not(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwise.propose.models.draft_model.DraftModelProposer.seated", failing)
    params = params_of("coupled", "draft_model")
    wanted = token_ids(engines.waiting.generate(engines.prompts, params))
    with engines.make(async_scheduling=True, speculative_config=engines.chosen[:1]) as llm:
        outputs = llm.generate(engines.prompts, params)
        assert token_ids(outputs) == wanted and outputs[0].metrics.speculation.num_drafts > 1
        assert llm.stats().drafter_failures == {"draft_model.seated": 1}


def test_who_finds_no_loop_leaves_alone(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One drafter has nothing captured for this kind of draws: its requests decode in the ordinary way from then on,
    those beside them go on in seats."""
    used = [entry_of(engines, "draft_model"), entry_of(engines, "eagle3")]
    methods = ("eagle3", "draft_model", "none")
    params = [params_of("greedy", method)[i] for i, method in enumerate(methods)]
    wanted = token_ids(engines.waiting.generate(engines.prompts[:3], params))
    with engines.make(async_scheduling=True, speculative_config=used) as llm:
        found = seats(llm)
        monkeypatch.setattr(found._seating.drafters["eagle3"]._drafter, "seats", lambda *_: None)
        for _ in range(2):
            before = found.num_steps
            assert token_ids(llm.generate(engines.prompts[:3], params)) == wanted
            assert found._without == {("eagle3", "argmax")} and found.num_steps > before + 5
        assert not llm.stats().drafter_failures
        llm.check_integrity()


def test_ways_that_find_nothing_in_common_leave_those_who_do_not_draft(engines: Engines) -> None:
    """Each drafter finds a pass and a loop, but both do not find one pass."""
    used = [entry_of(engines, "draft_model"), entry_of(engines, "eagle3")]
    ways: dict[Any, Any] = {("draft_model", "argmax"): [], ("none", "argmax"): [], ("eagle3", "argmax"): []}
    with (
        pytest.MonkeyPatch.context() as patch,
        engines.make(async_scheduling=True, speculative_config=used) as llm,
    ):
        found = seats(llm)
        patch.setattr(found, "_shape", lambda some, *_: None if len(some) > 1 else ())
        assert found._uncaptured(ways, 3, 20) == {("draft_model", "argmax"), ("eagle3", "argmax")}

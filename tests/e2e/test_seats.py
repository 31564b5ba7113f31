"""Requests in seats on the device: the text of the engine that waits, with every method and rule, through chunked
prompts, preemption, stop tokens, and requests that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftwise import SamplingParams
from draftwise.runner.threaded import ThreadedExecutor
from tests.e2e.conftest import token_ids
from tests.e2e.seated_engines import (
    METHODS,
    Engines,
    count_ordinary,
    engines,
    forests,
    graphs,
    growing,
    params_of,
    seats,
    some,
)
from tests.fakes.every_method import VOCAB
from tests.fakes.fake_executor import LateExecutor

__all__ = ["engines", "forests", "growing", "graphs"]  # fixtures


CASES = [
    *(("greedy", method) for method in ("none", "eagle", "dflash", "early_exit")),
    *(("coupled", method) for method in ("none", "suffix")),
    *(("rejection", method) for method in ("mtp", "ngram", "hybrid")),
    *(("block", method) for method in ("eagle3", "medusa")),
    ("typical", "draft_model"),
]
MORE_CASES = [
    *(("greedy", method) for method in METHODS),
    *(("coupled", m) for m in ("draft_model", "eagle3", "medusa", "ngram", "early_exit", "hybrid")),
    *(("rejection", method) for method in ("none", "draft_model", "eagle3", "medusa", "early_exit")),
    *(("block", method) for method in ("draft_model", "hybrid")),
    *(("typical", method) for method in ("eagle3", "medusa", "ngram")),
]


@pytest.mark.parametrize(("rule", "method"), some(CASES, MORE_CASES))
def test_text_is_that_of_the_engine_that_waits(engines: Engines, method: str, rule: str) -> None:
    params = params_of(rule, method)
    wanted = engines.waiting.generate(engines.prompts, params)
    before = seats(engines.ahead).num_steps
    found = engines.ahead.generate(engines.prompts, params)
    assert token_ids(found) == token_ids(wanted)
    assert seats(engines.ahead).num_steps > before
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = one.metrics.speculation, other.metrics.speculation
        # a suffix look-up is another one on the device
        assert method == "suffix" or mine.num_accepted_tokens == theirs.num_accepted_tokens
        if method == "hybrid":
            assert mine == theirs, "also of which part the drafts are"
    assert not engines.ahead.stats().drafter_failures and not engines.waiting.stats().drafter_failures
    engines.ahead.check_integrity()


def test_whoever_drafts_when_it_pays_has_a_seat_all_the_same(engines: Engines) -> None:
    """Adaptive control, as by default: requests begin and cease to draft, and change their seats for that."""
    methods = ["eagle3", "draft_model", "ngram", "medusa", "eagle3", "mtp", "none", "suffix"]
    params = [
        params_of("coupled" if i % 2 else "greedy", method, max_tokens=24)[i]
        for i, method in enumerate(methods)
    ]
    wanted = token_ids(engines.waiting.generate(engines.prompts, params))
    used = [entry for entry in engines.chosen if entry["method"] in methods]
    with engines.make(async_scheduling=True, speculation_control="adaptive", speculative_config=used) as llm:
        for _ in range(2):
            assert token_ids(llm.generate(engines.prompts, params)) == wanted
        control = llm.stats().control
        assert control.mode == "adaptive" and control.decisions > 0
        assert seats(llm).num_entered > len(params) and not llm.stats().drafter_failures
        llm.check_integrity()


def test_outputs_of_requests_that_ended_are_looked_up(engines: Engines) -> None:
    """The same request again: its output stands on the device. Forgotten, it is as in the beginning."""
    entry = next(entry for entry in engines.chosen if entry["method"] == "suffix")
    params = params_of("coupled", "suffix", max_tokens=30)[:1]
    with engines.make(async_scheduling=True, speculative_config=entry) as llm:
        core = llm._engine.core  # type: ignore[union-attr]

        def run() -> tuple[tuple[int, ...], int]:
            (done,) = llm.generate(engines.prompts[:1], params)
            return done.outputs[0].token_ids, done.metrics.speculation.num_accepted_tokens

        first, second = run(), run()
        assert second[0] == first[0] and second[1] >= first[1] + 10
        core.executor.forget()
        assert run() == first
        llm.check_integrity()


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 3},
    {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 0.8, "allowed_token_ids": list(range(0, VOCAB, 2)), "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {3: 2.5, 7: -1.0}, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 20, "frequency_penalty": -0.5},
]


def test_requests_of_all_kinds_decode_beside_each_other(engines: Engines) -> None:
    """Drafters, rules, and all that shapes a distribution, in the same steps: nobody's text is another one's."""
    beside = ["medusa", "draft_model", "eagle", "eagle3", "mtp", "none", "suffix", "ngram"]
    # what a drafter makes of top_p depends on whether its loop fits, and so does what rejection draws then
    rules = ["greedy", "coupled", "coupled", "coupled", "rejection", "", "greedy", "block"]
    params = []
    for i, (kind, rule) in enumerate(zip(KINDS, rules, strict=True)):
        method = beside[i]
        own: dict[str, Any] = {"method": method}
        if rule not in ("", "greedy"):
            own["rule"] = rule
        params.append(SamplingParams(seed=i, max_tokens=16, ignore_eos=True, speculation=own, **kind))
    # a head that did not see a shared prefix drafts something else, which changes what is drawn
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "speculative_config": [entry for entry in engines.chosen if entry["method"] in beside],
    }
    with engines.make(**options) as waiting:
        wanted = waiting.generate(engines.prompts, params)
    with engines.make(async_scheduling=True, **options) as llm:
        entered = seats(llm).num_entered
        ordinary = count_ordinary(llm)
        found = llm.generate(engines.prompts, params)
        assert token_ids(found) == token_ids(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert (one.outputs[0].logprobs is None) is (other.outputs[0].logprobs is None)
            # torch's products round differently among other rows
            for mine, theirs in zip(
                one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True
            ):
                assert {token: p.rank for token, p in mine.items()} == {t: p.rank for t, p in theirs.items()}
                assert [p.logprob for p in mine.values()] == pytest.approx(
                    [p.logprob for p in theirs.values()], abs=1e-4
                )
        assert seats(llm).num_entered - entered == len(params), "who has a seat keeps it"
        assert ordinary and not any(ordinary), "prompts are computed, and nothing of them is waited for"
        llm.generate(engines.prompts, [one.replace(max_tokens=3) for one in params])
        assert not any(ordinary), "seats of those who are gone are free in the same step"
        assert not llm.stats().drafter_failures
        llm.check_integrity()


def test_who_has_to_wait_waits_alone(engines: Engines) -> None:
    """A processor of the user's runs on the host; the others' steps stay on the device, and all texts are right."""

    def shifted(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(len(ids) % 3)

    params = params_of("coupled", "eagle3")[:3]
    params.append(params[0].replace(logits_processors=[shifted], speculation={"method": "none"}))
    wanted = token_ids(engines.waiting.generate(engines.prompts[:4], params))
    found = seats(engines.ahead)
    before = found.num_steps, found.num_entered
    assert token_ids(engines.ahead.generate(engines.prompts[:4], params)) == wanted
    assert found.num_entered - before[1] == 3 and found.num_steps > before[0] + 3


def test_most_steps_stay_on_the_device(engines: Engines) -> None:
    """Two prompts of a chunk each, then 13 steps of plain decoding, of which none is an ordinary one."""
    found = seats(engines.ahead)
    before = found.num_steps, found.num_entered
    params = params_of("greedy", "none")[:2]
    engines.ahead.generate(engines.prompts[:2], params)
    # the last plan is made before the tokens that end the requests are known
    assert 12 <= found.num_steps - before[0] <= 14 and found.num_entered - before[1] == 2


COMING = [("engines", "draft_model"), ("engines", "suffix"), ("forests", "eagle3")]
MORE_COMING = [
    *(("engines", method) for method in ("eagle3", "ngram", "medusa", "hybrid")),
    ("forests", "draft_model"),
]


@pytest.mark.parametrize(("family", "method"), some(COMING, MORE_COMING))
def test_requests_come_and_go_among_all_that_happens(
    request: pytest.FixtureRequest, engines: Engines, family: str, method: str
) -> None:
    """A tight cache with preemptions, prompts in chunks, requests of other methods and kinds in between, stop tokens,
    one request that ends after the other; and a device that runs a step as late as can be."""
    drafting: Engines = request.getfixturevalue(family)
    others = [{"method": method}] * 8
    others[4] = {"method": "none"}
    others[6] = {"method": "mtp"}
    params = [
        SamplingParams(
            temperature=0.9 if i == 5 else 0.0,
            max_tokens=8 + i,
            seed=i,
            speculation=speculation,
            stop_token_ids=(i,) if i % 3 == 0 else (),
            ignore_eos=True,
            min_tokens=4,
        )
        for i, speculation in enumerate(others)
    ]
    # the text, which is plain decoding's, of the same target with drafters of chains
    wanted = token_ids(engines.waiting.generate(engines.prompts, params))
    used = [entry for entry in drafting.chosen if entry["method"] in (method, "mtp")]
    tight: dict[str, Any] = {
        "num_kv_blocks": 18,
        "max_num_batched_tokens": 24,
        "speculative_config": used,
    }
    for late in (False, True) if method == "draft_model" else (True,):
        with drafting.make(async_scheduling=True, **tight) as llm:
            core = llm._engine.core  # type: ignore[union-attr]
            found = seats(llm)
            if late:
                assert isinstance(core.executor, ThreadedExecutor)
                core.executor = LateExecutor(core.executor.inner)
            for _ in range(1 + late):  # the second time with prefix hits
                assert token_ids(llm.generate(engines.prompts, params)) == wanted
                llm.check_integrity()
            assert llm.stats().num_preemptions > 0
            assert found.num_entered >= 2 and found.num_steps > 8
            assert not llm.stats().drafter_failures
            while core.has_work:
                core.step()
            assert core.scheduler.kv.num_used == 0


def test_look_ups_that_nobody_configured_take_the_passes_there_are(engines: Engines) -> None:
    """A request may name them in any engine; passes of their own, 6 and 17 rows wide, are not captured."""
    head = next(s for s in engines.chosen if s["method"] == "mtp")
    assert head["num_speculative_tokens"] < 5
    options: dict[str, Any] = {"speculative_config": [head], "enable_prefix_caching": False}
    with engines.make(**options) as waiting, engines.make(async_scheduling=True, **options) as llm:
        ordinary = count_ordinary(llm)
        for method in ("ngram", "suffix"):
            params = params_of("greedy", method, max_tokens=24)
            wanted = token_ids(waiting.generate(engines.prompts, params))
            before = seats(llm).num_entered
            found = llm.generate(engines.prompts, params)
            assert token_ids(found) == wanted, method
            assert seats(llm).num_entered - before >= len(params) and not any(ordinary), method
            told = [o.metrics.speculation for o in found]
            assert sum(one.num_accepted_tokens for one in told if one is not None) > 0, method
            llm.check_integrity()

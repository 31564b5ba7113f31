"""A drafter that raises, or answers what cannot be, in any of its hooks: its requests go on without speculation, and
nobody else notices; the text of all is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from draftwise import LLM, SamplingParams
from draftwise.runner.local import LocalExecutor
from tests.e2e.conftest import token_ids
from tests.fakes.faulty_proposer import BAD, Fault, FaultyProposer, raising, wrong_proposals
from tests.fakes.tiny import VOCAB, TinyModels

RULES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 0.9}}
METHODS = ["faulty", "faulty", "faulty", "draft_model", "ngram", "none", "faulty", "draft_model"]
BAD_ONES = [0, 6]
WRONG: dict[str, dict[str, Callable[[Any], Any]]] = {
    "observe": {},
    "committed": {
        "too short": lambda right: right[:-1],
        "too long": lambda right: [*right, 0],
        "negative": lambda right: [-1 for _ in right],
        "beyond": lambda right: [n + 1000 for n in right],
        "halves": lambda right: [n + 0.5 for n in right],
        "a number": lambda right: 3,
    },
    "propose": dict(wrong_proposals(VOCAB)),
    "filled_after": {
        "None": lambda _: None,
        "negative": lambda _: -1,
        "beyond": lambda right: right + 1,
        "half": lambda right: right + 0.5,
    },
    "drafts_stored": {
        "None": lambda _: None,
        "negative": lambda _: -1,
        "beyond": lambda _: 64,
        "text": lambda _: "1",
    },
    "settle": {"None": lambda _: None, "negative": lambda _: -1, "beyond": lambda _: 10_000},
    "trimmed": {},
    "leaving": {},
    "remove": {},
    "forward_time": {"nan": lambda _: float("nan"), "negative": lambda _: -1.0, "text": lambda _: "soon"},
}
CASES = [(hook, "raises", raising) for hook in WRONG]
CASES += [(hook, name, answer) for hook, found in WRONG.items() for name, answer in found.items()]


class Engines:
    def __init__(self, target: str, near: str) -> None:
        rng = np.random.default_rng(3)
        prompts = []
        for i in range(len(METHODS)):
            ids = [3 + i, *rng.integers(3, 9, int(rng.integers(8, 26))).tolist()]
            if i in BAD_ONES:
                ids[0] = BAD
            elif ids[0] == BAD:
                ids[0] = 30
            prompts.append({"prompt_token_ids": ids})
        prompts[2] = {"prompt_token_ids": [*prompts[1]["prompt_token_ids"], 5]}  # a prefix in common
        prompts[6] = {"prompt_token_ids": [*prompts[0]["prompt_token_ids"], 5]}
        self.prompts = prompts
        self._options: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 40,
            "max_num_batched_tokens": 40,
            "speculation_control": "static",
        }
        specs = [
            {"method": "tests.fakes.faulty_proposer.FaultyProposer", "num_speculative_tokens": 5},
            {"method": "draft_model", "model": near, "num_speculative_tokens": 3},
            {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
        ]
        self.names = {"faulty": specs[0]["method"]}
        with LLM(target, **self._options) as llm:
            self.plain = {
                rule: token_ids(llm.generate(prompts, self.params(rule, plain=True))) for rule in RULES
            }
        self.made: dict[bool, tuple[LLM, FaultyProposer]] = {}
        for ahead in (False, True):
            llm = LLM(target, speculative_config=specs, async_scheduling=ahead, **self._options)
            self.made[ahead] = llm, FaultyProposer.last

    def script(self, rule: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        """What comes after each prompt."""
        prompts = [tuple(prompt["prompt_token_ids"]) for prompt in self.prompts]
        return dict(zip(prompts, self.plain[rule], strict=True))

    def params(self, rule: str, plain: bool = False) -> list[SamplingParams]:
        return [
            SamplingParams(
                max_tokens=20 + i,
                ignore_eos=True,
                seed=i,
                speculation={"method": "none" if plain else self.names.get(method, method)},
                **RULES[rule],
            )
            for i, method in enumerate(METHODS)
        ]

    def close(self) -> None:
        for llm, _ in self.made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tiny: TinyModels) -> Iterator[Engines]:
    made = Engines(tiny.target, tiny.near)
    yield made
    made.close()


def executor_of(llm: LLM) -> LocalExecutor:
    assert llm._engine is not None
    executor: Any = llm._engine.core.executor
    found = getattr(executor, "inner", executor)
    assert isinstance(found, LocalExecutor)
    return found


@pytest.mark.parametrize(
    ("hook", "name", "answer", "ahead"),
    [
        pytest.param(
            *case,
            ahead,
            id=f"{case[0]}-{case[1]}-{'async' if ahead else 'sync'}",
            # each fault in one kind of engine, in turns; --all: in both
            marks=[pytest.mark.slow] if (i + ahead) % 2 else [],
        )
        for i, case in enumerate(CASES)
        for ahead in (False, True)
    ],
)
def test_its_requests_lose_their_speculation_and_nobody_anything_else(
    engines: Engines, hook: str, name: str, answer: Callable[[Any], Any], ahead: bool
) -> None:
    llm, proposer = engines.made[ahead]
    count = 0
    for rule in RULES:
        llm.reset_prefix_cache()
        before, preempted = dict(llm.stats().drafter_failures), llm.stats().num_preemptions
        proposer.reset(Fault(hook, answer), engines.script(rule))
        outputs = llm.generate(engines.prompts, engines.params(rule))
        assert token_ids(outputs) == engines.plain[rule], rule
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * len(METHODS)
        llm.check_integrity()
        assert llm.stats().num_preemptions > preempted, "requests that come back are among them"
        # the next step tells the executor who has left
        llm.generate(
            [{"prompt_token_ids": [9]}], SamplingParams(max_tokens=1, speculation={"method": "none"})
        )
        proposer.fault = Fault()
        failures = {
            kind: times - before.get(kind, 0)
            for kind, times in llm.stats().drafter_failures.items()
            if times > before.get(kind, 0)
        }
        assert set(failures) <= {f"{engines.names['faulty']}.{hook}"}, failures
        count += sum(failures.values())
        assert proposer.lies == []
        assert proposer.asked_again == [], "a failed drafter is asked no more"
        drafts = [o.metrics.speculation.num_drafts for o in outputs]
        assert drafts[3] > 0 and drafts[4] > 0 and drafts[7] > 0, "neighbours with other methods go on"
        if hook not in ("observe", "committed", "trimmed"):  # which concern all of the method here
            assert drafts[1] > 0 and drafts[2] > 0, "neighbours of the method go on"
        executor = executor_of(llm)
        assert len(executor._rows) <= 1 and not executor._drafting.guard._failed, "nothing is left of them"
        assert llm.stats().num_used_blocks == 0
    # blocks are trimmed now and then, and hardly ever ahead: see tests/unit/test_drafting_guard.py
    assert count >= (2 if hook != "trimmed" else 0 if ahead else 1), "it did fail"


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_without_a_fault_nothing_fails_and_marks_are_true(engines: Engines, ahead: bool) -> None:
    """The drafter of these tests is one that is drafted with, through preemption and prefix hits."""
    llm, proposer = engines.made[ahead]
    for rule in RULES:
        before = dict(llm.stats().drafter_failures)
        proposer.reset(Fault(), engines.script(rule))
        for _ in range(2):  # the second time on cached prefixes
            outputs = llm.generate(engines.prompts, engines.params(rule))
            assert token_ids(outputs) == engines.plain[rule]
        assert llm.stats().drafter_failures == before and proposer.lies == []
        counts = outputs[0].metrics.speculation
        assert counts.num_drafts > 3 and 5 < counts.num_accepted_tokens < counts.num_draft_tokens
        assert {"observe", "committed", "propose", "filled_after", "settle", "leaving"} <= set(proposer.calls)


def test_forgetting_may_fail(engines: Engines) -> None:
    llm, proposer = engines.made[False]
    proposer.reset(Fault("forget"), engines.script("greedy"))
    llm.reset_drafters()
    outputs = llm.generate(engines.prompts, engines.params("greedy"))
    assert token_ids(outputs) == engines.plain["greedy"] and outputs[0].metrics.speculation.num_drafts > 3
    assert llm.stats().drafter_failures[f"{engines.names['faulty']}.forget"] == 1


def test_a_failure_is_said_once(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    llm, proposer = engines.made[False]

    def never_said(_: Any) -> Any:
        raise LookupError("a kind of its own")

    proposer.reset(Fault("drafts_stored", never_said), engines.script("greedy"))
    for _ in range(2):
        llm.generate(engines.prompts, engines.params("greedy"))
    said = [record for record in caplog.records if "failed in drafts_stored" in record.getMessage()]
    assert len(said) == 1 and "a kind of its own" in (said[0].exc_text or str(said[0].exc_info))

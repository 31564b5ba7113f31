"""What a drafter answers depends on the request alone: the same when it is asked twice, as it is when a call failed for
somebody else's sake and is repeated, and the same alone as among others who draw in other ways. Tokens, and the
distributions that they were drawn from, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.propose.base import DraftRow
from draftwise.types import Proposal
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target

ASKED = [case for case in CASES if case[1] not in ("ngram", "suffix", "hybrid", "synthetic")]
"""Look-ups draw from no distribution, and learn from the others who are asked with them."""
RULES = ("greedy", "rejection", "rejection", "coupled", "block", "rejection")


class Engines:
    def __init__(self, root: Path) -> None:
        self._target = make_target(root)
        self._families = make_families(root)
        self._made: dict[str, LLM] = {}
        rng = np.random.default_rng(9)
        self.prompts = [
            {"prompt_token_ids": rng.integers(0, VOCAB, int(rng.integers(3, 24))).tolist()} for _ in RULES
        ]

    def get(self, family: str) -> LLM:
        if family not in self._made:
            self._made[family] = LLM(
                self._target,
                dtype="float32",
                device="cpu",
                skip_tokenizer_init=True,
                block_size=4,
                num_kv_blocks=128,
                speculation_control="static",
                speculative_config=self._families[family],
            )
        return self._made[family]

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("company"))
    yield made
    made.close()


def check_same(one: Proposal, other: Proposal, when: str) -> None:
    assert (one.tokens, one.parents, one.draw) == (other.tokens, other.parents, other.draw), when
    if one.q is None or other.q is None:
        assert one.q is other.q, when
        return
    for node, (a, b) in enumerate(zip(one.q_rows, other.q_rows, strict=True)):
        assert torch.equal(one.q[a], other.q[b]), f"{when}: q of node {node}"
        assert one.q[a][one.tokens[node]] > 0, "drawn from it"


class Asking:
    """Asks a proposer several times for the same drafts. ``wrong``: the first thing that was: the engine would ask
    again, and go on."""

    def __init__(self, proposer: Any) -> None:
        self._propose = proposer.propose
        self.compared = self.sampled = 0
        self.wrong: Exception | None = None

    def __call__(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        try:
            return self._ask(rows)
        except Exception as error:
            self.wrong = self.wrong or error
            raise

    def _ask(self, rows: Sequence[DraftRow]) -> Sequence[Proposal]:
        together = self._propose(rows)
        turned = self._propose(rows[::-1])[::-1]
        for row, first, second in zip(rows, together, turned, strict=True):
            check_same(first, second, "asked again, in another order")
            check_same(first, self._propose([row])[0], "alone")
            self.compared += len(first.tokens)
            self.sampled += first.q is not None
        return self._propose(rows)


@pytest.mark.parametrize("case", ASKED, ids=case_id)
def test_drafts_are_the_requests_own(
    engines: Engines, case: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    family, method, shape = case
    llm = engines.get(family)
    executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
    proposer = executor._drafting._proposers[method]
    params = [
        SamplingParams(
            temperature=0.0 if rule == "greedy" else 0.9,
            max_tokens=12 + i % 2,
            ignore_eos=True,
            seed=i,
            speculation={"method": method, **({} if rule == "greedy" else {"rule": rule}), **SHAPES[shape]},
        )
        for i, rule in enumerate(RULES)
    ]
    asking = Asking(proposer)
    proposer.propose = asking
    try:
        llm.generate(engines.prompts, params)
    finally:
        del proposer.propose
    assert asking.wrong is None
    assert not llm.stats().drafter_failures
    assert "cannot be recorded" not in caplog.text, "the same drafts, by the slow way"
    assert asking.compared > 30
    if shape != "dynamic" and method != "medusa":
        assert asking.sampled > 5

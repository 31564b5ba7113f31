"""Ordinary steps, in columns, against the same steps request by request: texts, drafts, what drafters are said to have
stored, and which blocks are marked. Every method in every shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwise import LLM, SamplingParams
from draftwise.runner.ordinary import OrdinaryStep, OrdinarySteps
from draftwise.runner.placing import Placing
from draftwise.runner.rounds import RoundSteps
from draftwise.sched import rounds as sched_rounds
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target
from tests.native import native_or_skip

ASKED = [case for case in CASES if case[1] != "synthetic"]  # what that drafts depends on the request's number
IN_COLUMNS = {"ngram", "suffix", "draft_model", "early_exit", "eagle", "eagle3", "mtp", "hybrid"}
"""Methods that draft chains for all requests in columns."""


PASSES_IN_ROUNDS = {"draft_model", "early_exit", "eagle", "eagle3", "mtp"}
IN_ROUNDS = PASSES_IN_ROUNDS | {"ngram", "suffix"}
"""Methods whose steps are one native call, and may have several rounds: of chains; and of trees, too."""


class Engines:
    def __init__(self, root: Path) -> None:
        self._target = make_target(root)
        self._families = make_families(root)
        self._made: dict[str, LLM] = {}
        rng = np.random.default_rng(11)
        self.prompts = [
            {"prompt_token_ids": (rng.integers(0, VOCAB, int(rng.integers(3, 12))).tolist() * 2)[:20]}
            for _ in range(5)
        ]

    def get(self, family: str, crowded: bool = False) -> LLM:
        """``crowded``: few requests run at once, and a step has few rows: prompts come in parts, beside others."""
        name = f"{family}, crowded" if crowded else family
        if name not in self._made:
            more: dict[str, int] = {"max_num_seqs": 6, "max_num_batched_tokens": 32} if crowded else {}
            self._made[name] = LLM(
                self._target,
                dtype="float32",
                device="cpu",
                skip_tokenizer_init=True,
                block_size=4,
                num_kv_blocks=128,
                speculation_control="static",
                keep_trace=True,
                speculative_config=self._families[family],
                **more,
            )
        return self._made[name]

    def close(self) -> None:
        for llm in self._made.values():
            llm.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    native_or_skip()
    made = Engines(tmp_path_factory.mktemp("ordinary"))
    yield made
    made.close()


def run(
    llm: LLM, prompts: list[Any], params: list[SamplingParams], ordinary: bool, rounds: int = 1
) -> list[Any]:
    """What came of it, and of every step what the executor says of its rows. Steps of several ``rounds`` (the most that
    one may have): what each round said of each request, and not what the executor had between them. 0: native code
    computes no whole steps."""
    core: Any = llm._engine.core  # type: ignore[union-attr]
    executor = core.executor
    llm.reset_prefix_cache()
    llm.reset_drafters()
    kept = executor._ordinary, executor._drafting._placing, executor._rounds
    if not ordinary:
        executor._ordinary = executor._drafting._placing = None
    if rounds == 0:
        executor._rounds = None
    seen: list[Any] = []
    said: dict[int, list[Any]] = {}
    room = core.scheduler._rounds
    # however slow the machine is
    room._most, room._seconds, room.took = max(rounds, 1), [1e-6, 1e-6], lambda *_: None
    patience, sched_rounds.UNREAD_SECONDS = sched_rounds.UNREAD_SECONDS, 60.0
    execute, marks = executor.execute, executor._drafting.fills.marks

    def watched(plan: Any) -> Any:
        result = execute(plan)
        for rows in (*result.earlier, result.rows):
            for row in rows:
                said.setdefault(row.rid - first, []).append(row._replace(rid=0))
        seen.append([row._replace(rid=row.rid - first) for row in result.rows])
        for row in executor._rows.values():
            waiting = row.proposal
            q = None if waiting.q is None else waiting.q[list(waiting.q_rows)].tolist()
            seen.append((row.rid - first, row.tokens_np[: row.num_tokens].tolist(), row.num_computed))
            seen.append((waiting.tokens, waiting.parents, waiting.draw, q))
            seen.append({name: (fill.tokens, fill.drafts) for name, fill in row.fill.items()})
            seen.append({name: own[row.blocks_np].tolist() for name, own in marks.items()})
        return result

    executor.execute = watched
    try:
        first = llm._engine.processor._next_rid  # type: ignore[union-attr]
        outputs = llm.generate(prompts, params)
    finally:
        del executor.execute
        sched_rounds.UNREAD_SECONDS = patience
        executor._ordinary, executor._drafting._placing, executor._rounds = kept
    texts = [(o.outputs[0].token_ids, o.outputs[0].trace) for o in outputs]
    return [said, texts] if rounds > 1 else [said, texts, seen]


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(
            rule,
            case,
            id=f"{rule}-{case_id(case)}",
            # each case under one rule, in turns; --all: under all
            marks=[pytest.mark.slow] if (i + j) % 4 else [],
        )
        for i, rule in enumerate(("greedy", "rejection", "coupled", "all"))
        for j, case in enumerate(ASKED)
    ],
)
def test_the_same_as_request_by_request(
    engines: Engines, case: tuple[str, str, str], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, method, shape = case
    llm = engines.get(family)
    rules = ("greedy", "rejection", "coupled", "block", "greedy") if rule == "all" else (rule,) * 5
    params = [
        SamplingParams(
            temperature=0.0 if own == "greedy" else 0.8,
            max_tokens=4 if rule == "all" and i == 4 else 14 + 2 * i,
            ignore_eos=True,
            seed=i,
            # the first tokens of one request are adjusted, one has another end, and one is reported on for a while
            min_tokens=3 if rule == "all" and i == 1 else 0,
            stop_token_ids=[5] if i == 2 else None,
            logprobs=1 if rule == "all" and i == 4 else None,
            speculation={"method": method, **({} if own == "greedy" else {"rule": own}), **SHAPES[shape]},
        )
        for i, own in enumerate(rules)
    ]
    counts = {"ordinary": 0, "columns": 0, "rounds": 0}

    def counted(cls: type, name: str, key: str) -> None:
        function = getattr(cls, name)

        def call(*args: Any) -> Any:
            answer = function(*args)
            counts[key] += answer not in (
                False,
                None,
            )  # drafts that were not placed, steps that were not computed
            return answer

        monkeypatch.setattr(cls, name, call)

    counted(OrdinarySteps, "results", "ordinary")
    counted(RoundSteps, "run", "rounds")
    counted(Placing, "place_chains", "columns")
    assert isinstance(llm._engine.core.executor._ordinary, OrdinarySteps)  # type: ignore[union-attr]
    expected = run(llm, engines.prompts, params, False)
    assert not any(counts.values())
    assert run(llm, engines.prompts, params, True) == expected
    assert counts["ordinary"] > 0
    steps = counts["rounds"]
    if family == "methods" and shape == "chain" and method in IN_ROUNDS and rule != "all":
        assert steps > 0
    if (
        family == "methods"
        and shape != "chain"
        and method in PASSES_IN_ROUNDS
        and rule in ("greedy", "coupled")
    ):
        assert steps > 0
    assert run(llm, engines.prompts, params, True, rounds=8) == expected[:2]
    if steps > 5 and family == "methods" and shape == "chain" and method in IN_ROUNDS and rule != "all":
        assert counts["rounds"] < 1.8 * steps, "several rounds a step"
    counts["columns"] = 0
    assert run(llm, engines.prompts, params, True, rounds=0) == expected
    if family == "methods" and shape == "chain" and method in IN_COLUMNS and rule != "all":
        assert counts["columns"] > 0


MIXED: list[dict[str, Any]] = [
    {},
    {"logprobs": 2, "max_tokens": 9},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.3, "temperature": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 3))},
    {"logit_bias": {3: 4.0}},
    {"frequency_penalty": 0.4, "logprobs": 0},
    {},
    {"presence_penalty": 0.5},
    {"temperature": 1.1},
]
"""Parameters of requests, some of which go in columns and some of which do not."""


@pytest.mark.parametrize(
    "method", ["none", "ngram", "suffix", "draft_model", "draft_model:tree", "eagle", "medusa"]
)
def test_mixed_steps_the_same_as_request_by_request(
    engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in parts, prompts' ends, and requests that are looked at, beside ordinary ones: in one step, each in its
    own way."""
    name, _, tree = method.partition(":")
    llm = engines.get("methods", crowded=True)
    rng = np.random.default_rng(3)
    prompts = [
        {"prompt_token_ids": (rng.integers(0, VOCAB, int(rng.integers(4, 20))).tolist() * 2)} for _ in MIXED
    ]
    shape = SHAPES["static"] if tree else SHAPES["chain"]
    params = [
        SamplingParams(
            **{
                "temperature": 0.0,
                "max_tokens": 8 + i,
                "ignore_eos": True,
                "seed": i,
                "speculation": {"method": name, **(shape if name != "none" else {})},
                **more,
            }
        )
        for i, more in enumerate(MIXED)
    ]
    gather = OrdinarySteps.gather
    seen: list[OrdinaryStep] = []

    def watched(self: OrdinarySteps, *args: Any) -> OrdinaryStep | None:
        step = gather(self, *args)
        if step is not None:
            seen.append(step)
        return step

    monkeypatch.setattr(OrdinarySteps, "gather", watched)
    expected = run(llm, prompts, params, False)
    assert not seen
    assert run(llm, prompts, params, True) == expected
    assert run(llm, prompts, params, True, rounds=8) == expected[:2]
    mixed = [step for step in seen if step.apart is not None]
    assert len(mixed) > 5
    assert any(
        len(step.apart.owners) < len(step.apart.steps) for step in mixed if step.apart
    )  # a part of a prompt
    assert any(step.apart.prompt for step in mixed if step.apart)
    assert any(
        set(step.decided.of(step.plan.num_new)) > {1} for step in seen
    )  # an end of a prompt, in columns

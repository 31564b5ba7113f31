"""Steps of several rounds, as a user asks for them: the same text, cut where it would be, from fewer steps of the
scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise import LLM, LoRARequest, SamplingParams
from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError
from draftwise.sched import rounds as sched_rounds
from draftwise.sched.columns import PlanColumns
from draftwise.types import CUT_BYTES, RoundCuts, StepPlan, StepResult
from tests.fakes.lora import save_adapter
from tests.native import native_or_skip

PROMPTS = ["def main(", "class Point:\n    def __init__(self, x, y", "import os\nimport sys\n\nfor name in"]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60, speculation={"rule": "coupled"}),
    SamplingParams(temperature=0.0, max_tokens=60, stop=["self", "\n\n"]),
]


def without_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is time for all rounds, whatever the machine."""
    for name in ("ROUND_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(sched_rounds, name, 60.0)


def said(llm: LLM) -> tuple[list[Any], int]:
    """Texts, why they end, and how many plans the scheduler made for them."""
    assert llm._engine is not None
    scheduler = llm._engine.core.scheduler
    before = scheduler._step
    outputs = [output for params in ASKED for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    found = [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]
    llm.check_integrity()
    return found, scheduler._step - before


@pytest.mark.parametrize(
    ("method", "control"),
    [
        # each method under one control, in turns; --all: under both
        pytest.param(method, control, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, method in enumerate(("none", "suffix", "mtp", "hybrid", "medusa"))
        for j, control in enumerate(("static", "adaptive"))
    ],
)
def test_the_same_text_from_fewer_steps(method: str, control: str) -> None:
    native_or_skip()
    options: dict[str, Any] = {"speculative_config": {"method": method}, "speculation_control": control}
    with LLM(rounds_per_step=1, **options) as one, LLM(**options) as several:
        expected, steps = said(one)
        found, fewer = said(several)
        assert found == expected
        assert several.stats().speculation.num_drafts > 0 or method == "none"
        if method == "none":  # how often there is time for another round is the machine's affair
            assert fewer <= steps


DRAFTERS: list[dict[str, Any]] = [
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "draft_model"},
    {"method": "mtp", "speculative_token_tree": [[0], [1], [0, 0]]},
    {"method": "eagle3"},
    {"method": "medusa", "num_speculative_tokens": 3, "speculative_token_tree": [[0], [1], [0, 0]]},
    {"method": "hybrid", "hybrid_lookup": "ngram", "hybrid_drafter": {"method": "draft_model"}},
]
MORE_DRAFTERS: list[dict[str, Any]] = [
    {"method": "mtp"},
    {"method": "medusa", "num_speculative_tokens": 3},
    {"method": "hybrid"},
    {"method": "hybrid", "hybrid_lookup": "ngram", "hybrid_min_match": 2},
    {"method": "hybrid", "hybrid_drafter": {"method": "medusa", "num_speculative_tokens": 2}},
]
"""For the slow tests alone: the parts of these stand above in other company, and the first three draft so in
`test_who_comes_between_rounds_changes_nobodys_drafts`, too."""


@pytest.mark.parametrize(
    "spec",
    [*DRAFTERS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in MORE_DRAFTERS)],
    ids=lambda spec: "-".join(map(str, spec.values())),
)
def test_drafts_are_those_of_steps_with_one_round(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rule ``rejection`` the text of a seed depends on what was drafted, and on its distribution."""
    native_or_skip()
    without_hurry(monkeypatch)
    options: dict[str, Any] = {"speculative_config": spec, "speculation_control": "static"}
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=70 + 9 * i, speculation={"rule": "rejection"})
        for i, t in enumerate((0.7, 0.9, 0.0))
    ]
    if "speculative_token_tree" in spec:  # trees that are drawn are Python's
        params = [SamplingParams(temperature=0.0, max_tokens=70 + 9 * i) for i in range(3)]
    found = []
    for rounds in (1, 8):
        with LLM(rounds_per_step=rounds, **options) as llm:
            outputs = [llm.generate(PROMPTS[:n], params[:n], use_tqdm=False) for n in (3, 1)]
            counts = llm.stats().speculation
            assert llm._engine is not None
            found.append(
                (
                    [o.outputs[0].token_ids for own in outputs for o in own],
                    (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens),
                )
            )
            if rounds > 1:
                assert llm._engine.core.totals.num_steps > 1.5 * llm._engine.core.scheduler._step
            llm.check_integrity()
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_who_drafts_once_drafts_behind_the_first_round(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups go on without it; with a model there is one round."""
    native_or_skip()
    without_hurry(monkeypatch)
    prompts = ["a b c d e f g h " * 8, "for i in range(10):\n    " * 8]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    seen: list[tuple[int, list[int], list[int]]] = []  # rounds, and what waits behind each of either request
    with LLM(speculative_config={"method": method}, speculation_control="static", rounds_per_step=8) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        core: Any = llm._engine.core  # type: ignore[union-attr]
        rounds, execute = core.scheduler._controller.rounds, core.executor.execute

        def told(rids: list[int], most: int, usual: int) -> tuple[int, RoundCuts | None]:
            answer = rounds(rids, most, usual)
            if len(rids) != 2 or answer[0] < 2:
                return answer
            whole = 4 * bytes(range(CUT_BYTES // 4))
            return answer[0], RoundCuts(2 * whole, bytes([3, 3]), bytes([1, 0]))

        def watched(plan: StepPlan) -> StepResult:
            result = execute(plan)
            if plan.cuts is not None and len(plan.rows) == 2:
                waits = [[row.num_proposed for row in rows] for rows in (*result.earlier, result.rows)]
                seen.append((len(waits), *map(list, zip(*waits, strict=True))))
            return result

        monkeypatch.setattr(core.scheduler._controller, "rounds", told, raising=False)
        monkeypatch.setattr(core.executor, "execute", watched)
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        assert found == expected
        assert seen
        if method == "draft_model":
            assert {count for count, _, _ in seen} == {1}
        else:
            assert max(count for count, _, _ in seen) > 2
            assert any(once[0] for _, once, _ in seen)
            assert not any(any(once[1:]) for _, once, _ in seen)
            assert any(any(always[1:]) for _, _, always in seen)


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "mtp"},
        pytest.param({"method": "eagle3"}, marks=pytest.mark.slow),  # a head, as MTP
        {"method": "hybrid", "hybrid_lookup": "ngram"},
        {"method": "medusa"},
    ],
    ids=lambda spec: spec["method"],
)
def test_who_comes_between_rounds_changes_nobodys_drafts(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rule ``rejection`` a head that missed something of a request, or read another one's, would draft
    something else, and so would the text."""
    native_or_skip()
    without_hurry(monkeypatch)
    options: dict[str, Any] = {"speculative_config": spec, "speculation_control": "static"}
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=40 + 25 * i, speculation={"rule": "rejection"})
        for i in range(6)
    ]
    prompts = PROMPTS * 2
    with LLM(rounds_per_step=1, **options) as one:
        expected = [o.outputs[0].token_ids for o in one.generate(prompts, params, use_tqdm=False)]
    with LLM(**options) as llm:
        assert llm._engine is not None
        core, processor = llm._engine.core, llm._engine.processor
        requests = []
        with torch.inference_mode():
            for prompt, own in zip(prompts, params, strict=True):
                (request,) = processor.group(prompt, own).requests
                core.add(request)
                requests.append(request)
                for _ in range(2 + len(requests) % 2):
                    core.step()
            while core.has_work:
                core.step()
        assert core.totals.num_steps > 1.5 * core.scheduler._step
        llm.check_integrity()
    found = [tuple(r.tokens_np[r.num_prompt : r.num_tokens].tolist()) for r in requests]
    assert found == [tuple(tokens) for tokens in expected]


# far too few, hardly enough, and so many that nobody misses any
@pytest.mark.parametrize(
    "blocks",
    [24, pytest.param(40, marks=pytest.mark.slow), 64, pytest.param(120, marks=pytest.mark.slow), 240],
)
def test_nobody_misses_the_blocks_that_rounds_take(blocks: int) -> None:
    """Where blocks are short, requests are admitted, draft and lose their places as without rounds: the text of a seed
    depends on how much was drafted, so that it tells."""
    native_or_skip()
    options: dict[str, Any] = {
        "speculative_config": {"method": "ngram"},
        "speculation_control": "static",
        "num_kv_blocks": blocks,
        "block_size": 4,
        "enable_prefix_caching": False,
    }
    params = [
        SamplingParams(temperature=0.6, seed=i, max_tokens=20 + 13 * i, speculation={"rule": "rejection"})
        for i in range(6)
    ]
    with LLM(rounds_per_step=1, **options) as one, LLM(**options) as several:
        expected, found = [llm.generate((PROMPTS * 2), params, use_tqdm=False) for llm in (one, several)]
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
        preempted = []
        for llm in (one, several):
            assert llm._engine is not None
            llm.check_integrity()
            preempted.append(llm._engine.core.scheduler.num_preemptions)
        assert preempted[0] == preempted[1]


@pytest.mark.parametrize(("method", "most"), [("medusa", 8), ("mtp", 1)])
def test_who_drafts_for_nobody_need_not_stop_rounds(
    method: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where control lets nobody draft, decoding is as quick as without a drafter, unless it must be told of tokens."""
    native_or_skip()
    without_hurry(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    options: dict[str, Any] = {"speculative_config": {"method": method}, "speculation_control": "static"}
    with LLM(rounds_per_step=8, **options) as llm:
        assert llm._engine is not None
        core = llm._engine.core
        expected = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
        execute, taken = core.executor.execute, []

        def executed(plan: StepPlan) -> StepResult:
            columns = plan.rows
            if len(taken) >= 3 and isinstance(columns, PlanColumns):
                for i in range(len(columns.budgets)):
                    columns.budgets[i] = 0
            result = execute(plan)
            taken.append(result.num_rounds)
            return result

        monkeypatch.setattr(core.executor, "execute", executed)
        found = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
        assert found == expected
        assert max(taken[5:]) == most


@pytest.mark.parametrize("comes", [True, False])
def test_who_comes_meanwhile_waits_for_one_round(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    without_hurry(monkeypatch)
    with LLM(speculative_config={"method": "none"}, rounds_per_step=8) as llm:
        assert llm._engine is not None
        core, processor = llm._engine.core, llm._engine.processor

        def ask() -> int:
            params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
            (request,) = processor.group(PROMPTS[0], params).requests
            core.add(request)
            return request.rid

        first = ask()
        execute = core.executor.execute
        taken: list[int] = []

        def executed(plan: StepPlan) -> StepResult:
            if len(taken) == 4:  # the plan is made: as another thread would
                if comes:
                    ask()
                else:
                    core.cancel(first)
            result = execute(plan)
            taken.append(result.num_rounds)
            return result

        monkeypatch.setattr(core.executor, "execute", executed)
        while core.has_work:
            core.step()
        assert taken[3:6] == ([8, 1, 1] if comes else [8, 1])
        assert taken[-1] > 1 or not comes
        llm.check_integrity()


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_who_waits_for_a_place_stops_no_rounds(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken until a request ends, and the rounds of a step end with it."""
    native_or_skip()
    without_hurry(monkeypatch)
    params = [SamplingParams(temperature=0.0, max_tokens=30 + 11 * i, ignore_eos=True) for i in range(6)]
    options: dict[str, Any] = {"speculative_config": {"method": method}, "speculation_control": "static"}
    found, while_waiting = [], []
    for rounds in (1, 8):
        with LLM(rounds_per_step=rounds, max_num_seqs=2, **options) as llm:
            assert llm._engine is not None
            core = llm._engine.core
            execute = core.executor.execute

            def executed(
                plan: StepPlan, core: Any = core, execute: Callable[[StepPlan], StepResult] = execute
            ) -> StepResult:
                waiting = core.scheduler.num_waiting
                result = execute(plan)
                if waiting:
                    while_waiting.append(result.num_rounds)
                return result

            monkeypatch.setattr(core.executor, "execute", executed)
            outputs = llm.generate(PROMPTS * 2, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            llm.check_integrity()
        assert max(while_waiting) == rounds
    assert found[0] == found[1]


def test_steps_are_long_where_nobody_reads_meanwhile() -> None:
    """A call of `LLM.generate` is answered at its end. Stop strings are looked for behind each step."""
    native_or_skip()

    def planned(params: SamplingParams, *, at_once: bool) -> set[float]:
        with LLM(speculative_config={"method": "none"}) as llm:
            assert llm._engine is not None
            core, processor = llm._engine.core, llm._engine.processor
            seen, execute = set(), core.executor.execute

            def executed(plan: StepPlan) -> StepResult:
                if isinstance(plan.rows, PlanColumns) and list(plan.rows.num_new) == [1]:
                    seen.add(plan.round_seconds)
                    assert plan.rounds <= 8 or not params.stop
                return execute(plan)

            core.executor.execute = executed  # type: ignore[method-assign]
            if at_once:
                llm.generate(PROMPTS[0], params, use_tqdm=False)
            else:
                core.add(processor.group(PROMPTS[0], params).requests[0])
                with torch.inference_mode():
                    while core.has_work:
                        core.step()
        return seen

    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole, read, stopped = (
        params,
        params.replace(output_kind="final_only"),
        params.replace(stop=["this never comes"]),
    )
    assert planned(whole, at_once=True) == {sched_rounds.UNREAD_SECONDS}
    assert planned(read, at_once=False) == {sched_rounds.UNREAD_SECONDS}
    assert planned(whole, at_once=False) == {sched_rounds.ROUND_SECONDS}
    assert planned(stopped, at_once=True) == {sched_rounds.ROUND_SECONDS}


def test_steps_are_short_while_control_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    without_hurry(monkeypatch)
    with LLM(speculative_config={"method": "ngram"}) as llm:
        assert llm._engine is not None
        core, seen = llm._engine.core, []
        execute = core.executor.execute

        def executed(plan: StepPlan) -> StepResult:
            seen.append((core.scheduler._controller.settled, plan.rounds))
            return execute(plan)

        monkeypatch.setattr(core.executor, "execute", executed)
        params = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True)
        while len(seen) < 100:
            llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert max(rounds for settled, rounds in seen if not settled) == 8
    assert max(rounds for settled, rounds in seen if settled) == 32


def test_what_a_round_of_the_later_half_takes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    without_hurry(monkeypatch)
    with LLM(speculative_config={"method": "none"}) as llm:
        assert llm._engine is not None
        executor = llm._engine.core.executor
        execute, results = executor.execute, []

        def executed(plan: StepPlan) -> StepResult:
            results.append(execute(plan))
            return results[-1]

        monkeypatch.setattr(executor, "execute", executed)
        llm.generate(PROMPTS[0], ASKED[0].replace(max_tokens=100, ignore_eos=True), use_tqdm=False)
    several = [result for result in results if result.num_rounds > 1]
    assert len(several) >= 3
    for result in several:
        whole = result.forward_time + result.verify_time + result.draft_time
        # what lies between two rounds is a part of it, too; half of them take as long or longer
        assert 0 < result.steady_round_time < 2.5 * (whole + result.input_time) / result.num_rounds


def test_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"rounds_per_step: only native code"):
        LLM(rounds_per_step=4, async_scheduling=True)
    with pytest.raises(ConfigError, match="rounds_per_step"):
        LLM(rounds_per_step=0)


@pytest.mark.parametrize("method", ["none", pytest.param("ngram", marks=pytest.mark.slow), "mtp"])
def test_requests_with_adapters_go_in_rounds(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native_or_skip()
    without_hurry(monkeypatch)
    own = [
        LoRARequest(f"a{i}", i, save_adapter(tmp_path / f"a{i}", embedded_path("target"), i, size=0.15))
        for i in (1, 2)
    ]
    options: dict[str, Any] = {"speculative_config": {"method": method}, "speculation_control": "static"}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    found = []
    for rounds in (1, 8):
        with LLM(rounds_per_step=rounds, enable_lora=True, **options) as llm:
            texts = []
            for adapters in ([None, own[0], own[1]], [own[1], None, own[1]]):
                outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
                texts.append([output.outputs[0].token_ids for output in outputs])
            found.append(texts)
            if rounds > 1:
                assert llm._engine is not None
                assert llm._engine.core.totals.num_steps > 1.5 * llm._engine.core.scheduler._step
            llm.check_integrity()
    assert found[0] == found[1]
    (first, second) = found[0]
    assert first[2] == second[2] and first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_no_number_is_no_text(method: str, temperature: float, tmp_path: Path) -> None:
    """An adapter full of NaN: its requests fail and say so, those beside them are as they are alone."""
    folder = Path(save_adapter(tmp_path / "broken", embedded_path("target"), 1, size=float("nan")))
    broken = LoRARequest("broken", 1, str(folder))
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=20, ignore_eos=True)
    with LLM(enable_lora=True, speculative_config={"method": method}) as llm:
        [alone] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        found, failed = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False, lora_request=[None, broken])
        llm.check_integrity()
    assert found.outputs[0].token_ids == alone.outputs[0].token_ids
    assert failed.outputs[0].finish_reason == "error" and not failed.outputs[0].token_ids
    assert "not finite" in str(failed.outputs[0].error)

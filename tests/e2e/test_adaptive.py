"""Whatever a controller decides, the text is the same: real engines under controllers that decide at random, and the
adaptive one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from draftwise import LLM, RequestOutput, SamplingParams
from draftwise.adapt.controller import Controller, most_nodes
from draftwise.errors import ConfigError
from draftwise.types import Speculation
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


class Whim(Controller):
    """Drafts and verifies any number of nodes, by chance."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        return self._random.randint(0, most_nodes(speculation, batch_size, {}))

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        return self._random.randint(0, num_proposed)


class Pattern(Controller):
    """Drafts in some steps of every 24, everything; counted over all requests."""

    def __init__(self, drafting: range) -> None:
        self._drafting = drafting
        self._step = 0

    def begin(self, batch_size: int) -> None:
        self._step += 1

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        return most_nodes(speculation, batch_size, {}) if self._step % 24 in self._drafting else 0


def put(llm: LLM, controller: Controller) -> None:
    assert llm._engine is not None
    llm._engine.core.scheduler._controller = controller


def drafters(tiny: TinyModels) -> list[dict[str, Any]]:
    return [
        {"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"method": "suffix"},
        {"method": "synthetic", "num_speculative_tokens": 4},
    ]


def counts(outputs: list[RequestOutput]) -> tuple[int, int]:
    """Drafted and accepted tokens of all requests."""
    speculation = [output.metrics.speculation for output in outputs]
    return sum(s.num_draft_tokens for s in speculation), sum(s.num_accepted_tokens for s in speculation)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "params",
    [GREEDY, GREEDY.replace(temperature=0.9, seed=5, speculation={"rule": "coupled"})],
    ids=["greedy", "coupled"],
)
def test_text_does_not_depend_on_what_is_decided(
    make_llm: Callable[..., LLM], tiny: TinyModels, params: SamplingParams, seed: int
) -> None:
    llm = make_llm(speculative_config=drafters(tiny))
    prompts = random_prompts(8, seed=seed)
    given = dict(params.speculation or {})
    wanted = token_ids(llm.generate(prompts, params.replace(speculation={**given, "method": "none"})))
    put(llm, Whim(seed))
    for method in ("draft_model", "ngram", "suffix", "synthetic"):
        outputs = llm.generate(prompts, params.replace(speculation={**given, "method": method}))
        assert token_ids(outputs) == wanted, method
        assert counts(outputs)[0] > 0
    tree = {**given, "method": "synthetic", "speculative_token_tree": TREE}
    assert token_ids(llm.generate(prompts, params.replace(speculation=tree))) == wanted


@pytest.mark.parametrize("drafting", [range(3), range(1), range(0, 24, 2)])
def test_steps_without_drafting_do_no_harm_to_drafts(
    make_llm: Callable[..., LLM], tiny: TinyModels, drafting: range
) -> None:
    """The drafter is the target itself, so that a draft is rejected only where its K/V is wrong."""
    llm = make_llm(
        speculative_config={"method": "draft_model", "model": tiny.target, "num_speculative_tokens": 4}
    )
    put(llm, Pattern(drafting))
    prompts = random_prompts(4, seed=3, low=20)
    for _ in range(2):  # the second time with prefix hits whose blocks the drafter has seen in part
        drafted, accepted = counts(llm.generate(prompts, GREEDY.replace(max_tokens=100)))
        assert drafted > 0
        assert accepted > 0.97 * drafted, "near the end of a request the last drafts are cut"


def test_not_drafting_does_not_call_the_drafter(
    make_llm: Callable[..., LLM], tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwise.propose.models.draft_model import DraftModelProposer

    llm = make_llm(speculative_config={"method": "draft_model", "model": tiny.near})
    put(llm, Pattern(range(0)))

    def refuse(*args: object) -> None:
        raise AssertionError("drafted")

    monkeypatch.setattr(DraftModelProposer, "propose", refuse)
    (output,) = llm.generate(random_prompts(1), GREEDY)
    assert output.metrics.speculation.num_drafts == 0
    assert output.metrics.speculation.steps_by_method == {"none": 40}


def test_the_adaptive_engine(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    llm = make_llm(speculative_config=drafters(tiny), speculation_control="adaptive")
    prompts = random_prompts(8, seed=4)
    wanted = token_ids(llm.generate(prompts, GREEDY.replace(speculation={"method": "none"})))
    mixed = [
        GREEDY.replace(speculation={"method": ("draft_model", "ngram", "suffix", "none")[i % 4]})
        for i in range(8)
    ]
    for _ in range(3):
        assert token_ids(llm.generate(prompts, GREEDY)) == wanted
        assert token_ids(llm.generate(prompts, mixed)) == wanted
    control = llm.stats().control
    assert control.mode == "adaptive" and control.decisions > 0
    assert {group.method for group in control.groups} <= {"draft_model", "ngram", "suffix"}
    assert control.as_dict()["mode"] == "adaptive"
    assert make_llm().stats().control.mode == "static"


def test_the_option_is_checked(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="speculation_control"):
        make_llm(speculation_control="sometimes")

"""Steps of several rounds, as a user asks for them: the same text, cut where it would be, from fewer steps of the
scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError
from tests.native import native_or_skip

PROMPTS = ["def main(", "class Point:\n    def __init__(self, x, y", "import os\nimport sys\n\nfor name in"]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60, speculation={"rule": "coupled"}),
    SamplingParams(temperature=0.0, max_tokens=60, stop=["self", "\n\n"]),
]


def said(llm: LLM) -> tuple[list[Any], int]:
    """Texts, why they end, and how many plans the scheduler made for them."""
    assert llm._engine is not None
    scheduler = llm._engine.core.scheduler
    before = scheduler._step
    outputs = [output for params in ASKED for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    found = [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs]
    llm.check_integrity()
    return found, scheduler._step - before


@pytest.mark.parametrize("control", ["static", "adaptive"])
@pytest.mark.parametrize("method", ["none", "suffix", "mtp", "hybrid", "medusa"])
def test_the_same_text_from_fewer_steps(method: str, control: str) -> None:
    native_or_skip()
    options: dict[str, Any] = {"speculative_config": {"method": method}, "speculation_control": control}
    with LLM(**options) as one, LLM(rounds_per_step=8, **options) as several:
        expected, steps = said(one)
        found, fewer = said(several)
        assert found == expected
        assert several.stats().speculation.num_drafts > 0 or method == "none"
        if method == "none":  # how often there is time for another round is the machine's affair
            assert fewer <= steps


def test_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"rounds_per_step: only native code"):
        LLM(rounds_per_step=4, async_scheduling=True)
    with pytest.raises(ConfigError, match="rounds_per_step"):
        LLM(rounds_per_step=0)

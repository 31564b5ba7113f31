"""A drafter that fails while native code is told how it drafts in rounds: its requests go on without speculation."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from draftwise import LLM, SamplingParams
from draftwise.kernels.cpu import rounds as native_rounds
from draftwise.propose.heads.proposer import HeadProposer
from draftwise.propose.lookup.ngram import NgramProposer
from tests.native import native_or_skip

PROMPTS = ["def main(", "import os\nimport sys\n\nfor name in"]
KINDS = {"ngram": NgramProposer, "mtp": HeadProposer}
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


def failing(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("out of ideas")


@pytest.mark.parametrize("hook", ["round_drafts", "after_rounds"])
@pytest.mark.parametrize("method", KINDS)
def test_its_requests_lose_their_speculation_and_nothing_else(
    method: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_or_skip()
    with LLM() as plain:
        expected = [o.outputs[0].text for o in plain.generate(PROMPTS, PARAMS)]
    with LLM(speculative_config={"method": method}, speculation_control="static") as llm:
        with monkeypatch.context() as patched:
            patched.setattr(KINDS[method], hook, failing)
            assert [o.outputs[0].text for o in llm.generate(PROMPTS, PARAMS)] == expected
        assert llm.stats().drafter_failures[f"{method}.{hook}"] == 1
        llm.check_integrity()
        before = llm.stats().speculation.num_drafts
        assert [o.outputs[0].text for o in llm.generate(PROMPTS, PARAMS)] == expected
        assert llm.stats().speculation.num_drafts > before  # the next requests draft again
        assert llm.stats().drafter_failures == {f"{method}.{hook}": 1}


@pytest.mark.parametrize(("method", "kind"), [("mtp", "RoundFeatures"), ("mtp", "RoundDrafts")])
def test_so_they_do_when_what_it_gave_cannot_be_told(
    method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_or_skip()
    with LLM() as plain:
        expected = [o.outputs[0].text for o in plain.generate(PROMPTS, PARAMS)]
    kinds = [getattr(native_rounds, kind)]
    for each in kinds:
        kinds += each.__subclasses__()
    with LLM(speculative_config={"method": method}, speculation_control="static") as llm:
        with monkeypatch.context() as patched:
            for each in kinds:
                if "tell" in vars(each):
                    patched.setattr(each, "tell", failing)
            assert [o.outputs[0].text for o in llm.generate(PROMPTS, PARAMS)] == expected
        assert llm.stats().drafter_failures[f"{method}.round_drafts"] == 1
        llm.check_integrity()

"""Acceptance rules that a program registers, named by its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from draftwise import LLM, SamplingParams, register_verifier
from draftwise.engine.speculating import SpeculationChoice
from draftwise.errors import RequestError
from draftwise.types import Verification
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.typical import TypicalRule


class FirstOnly(Rule):
    """One draft at most: accepted if it is the likeliest token. Never a token but the likeliest."""

    lossless = False

    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        out = []
        for request in requests:
            best = int(logits[request.row_of(-1)].argmax())
            if request.proposal.tokens[:1] == (best,):
                out.append(Verification((0,), (best, int(logits[request.row_of(0)].argmax()))))
            else:
                out.append(Verification((), (best,)))
        return out


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    register_verifier("first_only", FirstOnly)
    register_verifier("bold", lambda: TypicalRule(epsilon=0.05))
    register_verifier("not_a_rule", dict)  # type: ignore[arg-type]
    with LLM(max_model_len=256, num_kv_blocks=64, speculation_control="static") as made:
        yield made


def asking(rule: str, **more: object) -> SamplingParams:
    speculation = {"method": "draft_model", "rule": rule, "num_speculative_tokens": 4}
    return SamplingParams(max_tokens=24, ignore_eos=True, speculation=speculation, **more)  # type: ignore[arg-type]


def test_a_registered_rule_decides_the_requests_that_name_it(llm: LLM) -> None:
    prompt = "def main():\n    parser = argparse.ArgumentParser()\n    parser."
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation={"method": "none"})
    both = llm.generate([prompt] * 3, [asking("first_only", temperature=0.9), greedy, asking("bold", seed=1)])
    own, plain, bold = (output.outputs[0] for output in both)
    assert own.token_ids == plain.token_ids
    speculation = both[0].metrics.speculation
    assert 0 < speculation.num_accepted_tokens == speculation.num_accepted_tokens_per_pos[0]
    assert len(bold.token_ids) == 24 and both[2].metrics.speculation.num_accepted_tokens > 0


def test_ranks_do_not_have_it(llm: LLM) -> None:
    choice = SpeculationChoice([], {}, "none", None, elsewhere=True)
    with pytest.raises(RequestError, match="ranks"):
        choice.resolve(SamplingParams(speculation={"rule": "bold"}))
    assert choice.resolve(SamplingParams(speculation={"rule": "block"})).rule == "block"


def test_other_names_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="did you mean 'first_only'"):
        llm.generate("x", asking("first_onli"))
    with pytest.raises(RequestError, match="is a dict"):
        llm.generate("x", asking("not_a_rule"))

"""Rules from outside fail the requests that name them, and nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.test_verify_rules import TREE, V, peaked, request

from draftwise.errors import RequestError
from draftwise.types import EMPTY_PROPOSAL, Verification, chain
from draftwise.verify.base import Rule, VerifyRequest
from draftwise.verify.batch import verify_batch
from draftwise.verify.registry import register_verifier


class Scripted(Rule):
    """Does what it is told to."""

    lossless = True
    answer: Callable[[list[VerifyRequest]], Any] = staticmethod(lambda requests: [])

    def verify(self, logits: torch.Tensor, requests: list[VerifyRequest]) -> Any:
        return type(self).answer(requests)


register_verifier("scripted", Scripted)


def decided(answer: Callable[[list[VerifyRequest]], Any], *, in_main: bool = True) -> list[Any]:
    """Two requests of the rule around a greedy one."""
    Scripted.answer = staticmethod(answer)
    requests = [
        request(chain((5,), "t"), "scripted", 0),
        request(EMPTY_PROPOSAL, "greedy", 2, temperature=0),
        request(TREE, "scripted", 3),
    ]
    found: list[Any] = []

    def decide() -> None:
        found.extend(verify_batch(peaked(5, 6, 7, 7, 0, 2, 0, 4, 6), requests))

    if in_main:
        decide()
    else:
        thread = threading.Thread(target=decide)
        thread.start()
        thread.join()
    return found


def raising(error: BaseException) -> Callable[[list[VerifyRequest]], Any]:
    def answer(requests: list[VerifyRequest]) -> Any:
        if any(one.proposal is TREE for one in requests):
            raise error
        return [Verification((0,), (5, 6)) for _ in requests]

    return answer


@pytest.mark.parametrize("error", [ValueError("why"), SystemExit("why"), KeyboardInterrupt("why")], ids=repr)
def test_who_is_at_fault_fails_alone(error: BaseException) -> None:
    first, plain, failed = decided(raising(error), in_main=False)
    assert first == Verification((0,), (5, 6)) and plain == Verification((), (7,))
    assert isinstance(failed, RequestError) and failed.__cause__ is error
    assert str(failed) == f"verification rule 'scripted' failed: {type(error).__name__}: why"


def test_what_ends_the_program_passes_in_the_main_thread() -> None:
    assert isinstance(decided(raising(ValueError("why")))[2], RequestError)
    with pytest.raises(SystemExit):
        decided(raising(SystemExit("why")))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "NoneType is no Verification"),
        (Verification((0, 1), (5, 7, 1)), "none of the proposal's"),  # two children of the root
        (Verification((5,), (5, 1)), "none of the proposal's"),
        (Verification((1,), (5, 1)), "are not those of path"),
        (Verification((1,), (7,)), "are not those of path"),
        (Verification((), ()), "are not those of path"),
        (Verification((), (V,)), "outside of the vocabulary"),
        (Verification((), (-2,)), "outside of the vocabulary"),
        (Verification((), (1.5,)), "cannot be interpreted as an integer"),  # type: ignore[arg-type]
    ],
)
def test_answers_that_are_none(answer: Any, says: str) -> None:
    def answers(requests: list[VerifyRequest]) -> Any:
        return [answer if one.proposal is TREE else Verification((), (3,)) for one in requests]

    first, plain, failed = decided(answers)
    assert first == Verification((), (3,)) and plain == Verification((), (7,))
    assert isinstance(failed, RequestError) and says in str(failed)


def test_a_wrong_number_of_answers() -> None:
    for failed in decided(lambda requests: [])[::2]:
        assert isinstance(failed, RequestError) and "0 answers for 1 requests" in str(failed)


def test_right_answers() -> None:
    def answers(requests: list[VerifyRequest]) -> Any:
        one = Verification((1, 3), tuple(torch.tensor([7, 2, 4])))  # type: ignore[arg-type]
        return [one if r.proposal is TREE else Verification((), (-1,)) for r in requests]

    not_finite, _, found = decided(answers)
    assert found == Verification((1, 3), (7, 2, 4)) and type(found.token_ids[0]) is int
    assert isinstance(not_finite, RequestError) and "not finite" in str(not_finite)

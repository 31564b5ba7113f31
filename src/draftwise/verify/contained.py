"""Rules from outside, which can only fail the requests that name them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import index

import torch

from draftwise.errors import RequestError
from draftwise.types import Verification
from draftwise.verify.base import Rule, VerifyRequest


def decided_alone(
    rule: Rule, name: str, logits: torch.Tensor, requests: Sequence[VerifyRequest]
) -> list[Verification | Exception]:
    """`Rule.verify`. Where it raises or gives an invalid answer, every request is decided alone, to find the cause.

    What ends programs, such as `SystemExit`, is an error of the rule, too: in the thread of an engine it would end the
    requests of everybody. In the main thread it is left alone: a handler of a signal may have raised it.
    """
    try:
        answers = rule.verify(logits, requests)
        if len(answers) != len(requests):
            raise ValueError(f"{len(answers)} answers for {len(requests)} requests")
        return [_checked(answer, one, logits) for answer, one in zip(answers, requests, strict=True)]
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise
        if len(requests) > 1:
            return [answer for one in requests for answer in decided_alone(rule, name, logits, [one])]
        failure = RequestError(f"verification rule {name!r} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return [failure]


def _checked(answer: Verification, request: VerifyRequest, logits: torch.Tensor) -> Verification:
    """The answer, its numbers as int. Raises TypeError or ValueError if it is none for this request."""
    if not isinstance(answer, Verification):
        raise TypeError(f"{type(answer).__name__} is no Verification")
    path, token_ids = tuple(map(index, answer.path)), tuple(map(index, answer.token_ids))
    drafts, parents = request.proposal.tokens, request.proposal.parents
    before = -1
    for node in path:
        if not 0 <= node < len(drafts) or parents[node] != before:
            raise ValueError(f"path {path} is none of the proposal's, whose parents are {tuple(parents)}")
        before = node
    if token_ids[:-1] != tuple(drafts[node] for node in path) or len(token_ids) != len(path) + 1:
        raise ValueError(f"tokens {token_ids} are not those of path {path} and one more")
    if not -1 <= token_ids[-1] < logits.shape[1]:  # -1: the row is no distribution
        raise ValueError(f"token {token_ids[-1]} is outside of the vocabulary")
    return Verification(path, token_ids, answer.logprobs)

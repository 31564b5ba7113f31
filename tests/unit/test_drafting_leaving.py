"""What a proposer is told of a request that leaves: all its tokens, as far as they were delivered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from draftwise.propose.base import Proposer
from draftwise.runner.drafting import Drafting
from draftwise.types import IntArray, Proposal, Speculation


class Listener(Proposer):
    name: ClassVar[str] = "listener"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def propose(self, rows: Any) -> list[Proposal]:
        raise AssertionError("not called here")

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:
        self.heard.append((rid, token_ids_np.tolist()))

    def remove(self, rid: int) -> None:
        self.heard.append(rid)


@pytest.mark.parametrize(
    ("tokens", "max_total", "stops", "min_tokens", "expected"),
    [
        ([1, 2, 3, 4, 5], 9, set(), 0, [1, 2, 3, 4, 5]),
        ([1, 2, 3, 4, 5], 4, set(), 0, [1, 2, 3, 4]),  # accepted past max_tokens
        ([1, 2, 3, 9, 5], 9, {9}, 0, [1, 2, 3, 9]),  # accepted past a stop token
        ([9, 9, 3, 4, 9], 9, {9}, 0, [9, 9, 3, 4, 9]),  # stop tokens of the prompt do not stop
        (
            [1, 2, 9, 9, 5],
            9,
            {9},
            2,
            [1, 2, 9, 9],
        ),  # min_tokens: the second output token is the first that may
        ([1, 2, 9, 9, 5], 9, {9}, 3, [1, 2, 9, 9, 5]),
        ([1, 2], 9, {9}, 0, [1, 2]),
    ],
)
def test_a_proposer_hears_what_was_delivered(
    tokens: list[int], max_total: int, stops: set[int], min_tokens: int, expected: list[int]
) -> None:
    listener = Listener()
    drafting = Drafting(
        {"listener": listener},
        num_blocks=1,
        block_size=4,
        vocab_size=10,
        device=torch.device("cpu"),
    )
    row: Any = SimpleNamespace(
        rid=7,
        tokens_np=np.array([*tokens, 0, 0, 0], np.int32),
        num_tokens=len(tokens),
        is_full=len(tokens) >= max_total,
        drafting_failed=False,
        num_prompt=2,
        max_total=max_total,
        stop_token_ids=frozenset(stops),
        speculation=Speculation("listener"),
        state=SimpleNamespace(params=SimpleNamespace(min_tokens=min_tokens)),
    )
    drafting.removed(row)
    assert listener.heard == [(7, expected), 7], "first its tokens, then that it left"


def test_proposers_need_not_listen() -> None:
    class Deaf(Proposer):
        name: ClassVar[str] = "deaf"

        def propose(self, rows: Any) -> list[Proposal]:
            return []

    Deaf().leaving(1, np.zeros(1, np.int32))

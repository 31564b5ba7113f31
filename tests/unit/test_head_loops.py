"""What a head remembers when all of a draft is asked of it in one call: stored rows, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.tree_model import draft_row

from draftwise.propose.heads.loops import HeadLoops
from draftwise.propose.heads.passes import HeadPasses
from draftwise.propose.heads.state import Features, HeadState

VOCAB = 50
KNOWN = [6, 9]
"""Known tokens of two requests; features of all but the last one are there, and no row is stored."""


class Head:
    """Answers, or raises, what it is told to; notes what it was given."""

    num_depths = 1
    inputs_on = torch.device("cpu")

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.given: list[Any] = []

    def draft_chains(self, batch: Any, features: Any, kv: Any, last: Any, steps: int, draws: Any) -> Any:
        self.given = [batch.token_ids.tolist(), batch.positions.tolist(), features[:, 0].tolist(), last]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def draft_trees(self, batch: Any, features: Any, kv: Any, last: Any, draws: Any) -> Any:
        return self.draft_chains(batch, features, kv, last, 1, draws)


class Passes:
    """As much of `HeadPasses` as loops need."""

    block_size = 4
    packer = None
    kv = None
    first_missing = staticmethod(HeadPasses.first_missing)

    def __init__(self, head: Head) -> None:
        self.head = head

    def add_time(self, start: float) -> None:
        pass


def states() -> list[HeadState]:
    found = []
    for number, known in enumerate(KNOWN):
        state = HeadState.opened(1, 0, 0, None)
        values = torch.arange(known - 1, dtype=torch.float32)[:, None] + 100 * number
        state.tracks[0].queue.append(Features.of(values), 0, known - 1)
        found.append(state)
    return found


def rows() -> list[Any]:
    return [draft_row(VOCAB, rid=i, tokens=list(range(3, 3 + known))) for i, known in enumerate(KNOWN)]


def book(state: HeadState) -> tuple[Any, ...]:
    track = state.tracks[0]
    pieces = track.queue.of(track.queue.first, track.queue.end)
    return track.next, track.queue.first, track.queue.end, [(p.start, p.stop) for p in pieces]


@pytest.mark.parametrize("kind", ["chains", "trees"])
@pytest.mark.parametrize("answer", [None, RuntimeError("no")])
def test_who_cannot_has_stored_nothing(kind: str, answer: Any) -> None:
    loops: Any = HeadLoops(Passes(Head(answer)))  # type: ignore[arg-type]
    own = states()
    before = [book(state) for state in own]
    arguments = (rows(), own, 3, None) if kind == "chains" else (rows(), own, [])
    if answer is None:
        assert getattr(loops, kind)(*arguments) is None
    else:
        with pytest.raises(RuntimeError):
            getattr(loops, kind)(*arguments)
    assert [book(state) for state in own] == before and loops.filled == []


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_who_can_has_stored_all_known_tokens(kind: str) -> None:
    """Row s is token s with the feature of token s - 1, at position s - 1; the feature of the last row is kept."""
    head = Head(["drafts"])
    loops: Any = HeadLoops(Passes(head))  # type: ignore[arg-type]
    own = states()
    arguments = (rows(), own, 3, None) if kind == "chains" else (rows(), own, [])
    assert getattr(loops, kind)(*arguments) == ["drafts"]
    tokens, positions, features, last = head.given
    assert tokens == [*range(4, 9), *range(4, 12)] and positions == [*range(5), *range(8)]
    assert features == [*range(5), *range(100, 108)] and last == [4, 12]
    assert loops.filled == KNOWN
    assert [book(state) for state in own] == [
        (6, 4, 5, [(4, 5)]),
        (9, 7, 8, [(7, 8)]),
    ]


def test_tables_with_scratch_blocks_are_read_where_they_are_given() -> None:
    seen: list[Any] = []

    class Looking(Head):
        def draft_trees(self, batch: Any, *_: Any) -> Any:
            seen.append(batch.attention.block_tables_np.tolist())
            return ["drafts"]

    loops: Any = HeadLoops(Passes(Looking(None)))  # type: ignore[arg-type]
    asked = rows()
    tables = [np.array([9, 8, 7, 90], np.int32), np.array([6, 5, 4, 91], np.int32)]
    loops.trees(asked, states(), [], tables)
    assert seen == [[[9, 8, 7, 90], [6, 5, 4, 91]]]

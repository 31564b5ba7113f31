"""Features of committed tokens: computed late, for many steps in one go, and the same as at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwise.models.heads.base import pick_rows
from draftwise.propose.base import DraftRow
from draftwise.propose.heads.features import FeatureSource
from draftwise.propose.heads.passes import HeadDraft
from draftwise.propose.heads.state import MANY_FEATURES, FeatureQueue, Features, Piece, joined
from draftwise.types import Speculation, TargetOutput

SIZE = 3
NO_ENDS = np.zeros((2, 0), np.int64)


class Head:
    """Adds up what it is asked to read."""

    def __init__(self, layers: tuple[int, ...] | None) -> None:
        self.feature_layers = layers
        self.calls = 0

    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        self.calls += 1
        if self.feature_layers is None:
            return pick_rows(output.hidden, rows)
        return torch.stack([pick_rows(output.captured[i], rows) for i in self.feature_layers]).sum(0)


def make(layers: tuple[int, ...] | None = None, blocks: int = 8) -> tuple[Any, FeatureSource, Tensor]:
    head: Any = Head(layers)
    kept = torch.zeros(blocks, 1, SIZE)
    return head, FeatureSource(head, kept), kept


def step(rows: int, seed: int) -> TargetOutput:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(rows, SIZE, generator=generator) for _ in range(3)]
    return TargetOutput(values[0], {1: values[1], 4: values[2]})


@pytest.mark.parametrize("layers", [None, (1, 4)])
def test_many_steps_in_one_go(layers: tuple[int, ...] | None) -> None:
    head, source, _ = make(layers)
    steps = [(step(6, 0), [0, 1, 2]), (step(4, 1), [1, 3]), (step(9, 2), [8])]
    found = [source.wait(output, np.array(rows), NO_ENDS) for output, rows in steps]
    assert head.calls == 0
    for features, (output, rows) in zip(found, steps, strict=True):
        wanted = Head(layers).combine(output, torch.tensor(rows))
        torch.testing.assert_close(features.value, wanted, rtol=0, atol=0)
    assert head.calls == 1
    source.compute()
    assert head.calls == 1, "nothing waits any longer"


def test_features_of_blocks_last_tokens_are_kept_beside_them() -> None:
    _, source, kept = make()
    first, second = step(4, 0), step(4, 1)
    source.wait(first, np.array([0, 2, 3]), np.array([[1, 2], [5, 6]]))
    source.wait(second, np.array([1]), np.array([[0], [6]]))  # block 6 has another owner by now
    source.compute()
    assert torch.equal(kept[5, 0], first.hidden[2])
    assert torch.equal(kept[6, 0], second.hidden[1])
    assert not kept[[0, 1, 2, 3, 4, 7]].any()


def test_what_waits_is_bounded() -> None:
    head, source, _ = make()
    for i in range(31):
        source.wait(step(1, i), np.array([0]), NO_ENDS)
        source.bound()
    assert head.calls == 0
    source.wait(step(1, 31), np.array([0]), NO_ENDS)
    source.bound()
    assert head.calls == 1
    long = step(600, 0)  # one long pass is not kept for a few of its rows
    features = source.wait(long, np.array([7, 8]), NO_ENDS)
    source.bound()
    assert head.calls == 2
    assert features.value.untyped_storage().nbytes() < 600 * SIZE


def test_a_queue_over_pieces_of_steps() -> None:
    """Tokens 10..: three of one step's features, two of another's, one that is there."""
    one, two = torch.arange(12.0).view(6, 2), torch.arange(20.0, 28.0).view(4, 2)
    queue = FeatureQueue(10)
    queue.append(Features.of(one), 2, 5)
    queue.append(Features.of(two), 1, 3)
    queue.append(Features.of(torch.tensor([[90.0, 91.0]])), 0, 1)
    whole = torch.cat([one[2:5], two[1:3], torch.tensor([[90.0, 91.0]])])
    assert (queue.first, queue.end) == (10, 16)
    for start in range(10, 17):
        for stop in range(start, 17):
            found = queue.of(start, stop)
            assert torch.equal(joined(found) if found else whole[:0], whole[start - 10 : stop - 10])
    queue.drop(14)
    assert (queue.first, queue.end) == (14, 16)
    assert torch.equal(joined(queue.of(14, 16)), whole[4:])
    queue.drop(9)
    queue.drop(99)
    assert (queue.first, queue.end) == (16, 16) and queue.of(16, 16) == []


def test_pieces_that_stand_side_by_side_are_one_view() -> None:
    features, other = Features.of(torch.arange(12.0).view(6, 2)), Piece.of(torch.full((1, 2), 9.0))
    together = [Piece(features, 1, 3), Piece(features, 3, 4), Piece(features, 4, 6)]
    assert joined(together).data_ptr() == features.value[1:].data_ptr()
    assert torch.equal(joined(together), features.value[1:])
    apart = [Piece(features, 0, 2), Piece(features, 3, 4), other, Piece(features, 4, 5)]
    assert torch.equal(
        joined(apart), torch.cat([features.value[[0, 1, 3]], other.features.value, features.value[4:5]])
    )


def test_what_is_left_of_a_prompt_does_not_keep_it() -> None:
    prompt = torch.zeros(2 * MANY_FEATURES, SIZE)
    queue = FeatureQueue(0)
    queue.append(Features.of(prompt), 0, len(prompt))
    queue.drop(len(prompt) - 2)
    left = joined(queue.of(len(prompt) - 2, len(prompt)))
    assert left.untyped_storage().nbytes() == 2 * SIZE * 4


def test_features_that_could_not_be_computed() -> None:
    """Whoever asks is told; what waited with them does not wait for ever."""
    head, source, _ = make((1, 4))
    features = source.wait(TargetOutput(torch.zeros(2, SIZE)), np.array([0]), NO_ENDS)
    with pytest.raises(KeyError):
        _ = features.value
    with pytest.raises(AssertionError):
        _ = features.value
    assert source.wait(step(2, 0), np.array([1]), NO_ENDS).value.shape == (1, SIZE)
    assert head.calls == 2


def test_tokens_of_rows_are_known_ones_then_drafts() -> None:
    known_np = np.asarray([5, 6, 7, 8], np.int32)
    row = DraftRow(0, known_np, 2, 4, 4, Speculation("mtp", 4), None, None, 0)  # type: ignore[arg-type]
    draft = HeadDraft(row, 4, [11, 12, 13])
    assert draft.tokens_of(1, 3).tolist() == [6, 7], "known tokens alone, and none behind them"
    assert draft.tokens_of(2, 4).tolist() == [7, 8]
    assert draft.tokens_of(2, 6).tolist() == [7, 8, 11, 12]
    assert draft.tokens_of(5, 7).tolist() == [12, 13]

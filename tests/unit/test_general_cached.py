"""A model's own attention over our cache: how a batch becomes sequences, and what a call's cache stores and gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.general.cached import Cached, layout_of, probe_cache, sequences_of
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.types import StepInput

CPU = torch.device("cpu")
BLOCK = 4
LAYOUT = (
    KVLayerSpec((("keys", (2, 3)), ("values", (2, 5)))),
    KVLayerSpec(()),
    KVLayerSpec((("keys", (1,)),)),
)


def blocks(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def batch(*rows: RowInput) -> StepInput:
    return build_step_input(rows, BLOCK, CPU)


def found(step: StepInput) -> list[tuple[list[list[int]], list[list[int]]]]:
    return [(s.past.tolist(), s.rows.tolist()) for s in sequences_of(step.attention)]


def test_requests_of_one_past_and_length_are_one_call() -> None:
    alike = RowInput([5, 6], 2, blocks(3)), RowInput([7, 8], 2, blocks(1))
    step = batch(*alike, RowInput([9], 2, blocks(0)), RowInput([4], 0, blocks(2)))
    assert found(step) == [([[12, 13], [4, 5]], [[0, 1], [2, 3]]), ([[0, 1]], [[4]]), ([[]], [[5]])]


def test_a_tree_becomes_its_paths() -> None:
    """The example of the module: root a b a1 behind 5 keys, beside 2 rows behind 5 keys."""
    step = batch(
        RowInput([1, 2, 3, 4], 5, blocks(4, 2, 0), parents=(-1, -1, 0)), RowInput([8, 9], 5, blocks(5, 6))
    )
    past, other = [16, 17, 18, 19, 8], [20, 21, 22, 23, 24]
    assert found(step) == [([past, other], [[0, 2], [4, 5]]), ([past], [[0, 1, 3]])]


def test_a_level_of_a_tree_has_its_ancestors_as_past() -> None:
    """Root a b of an earlier pass, then the children of a and b: each has the root and its parent before it."""
    level = RowInput([7, 8], 2, blocks(0, 1, 2), tree_start=3, ancestors=(0b01011, 0b10101))
    assert found(batch(level)) == [([[0, 1, 2, 3], [0, 1, 2, 4]], [[0], [1]])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_call_stores_each_row_once_and_gives_each_path_its_keys(dtype: torch.dtype) -> None:
    kv = KVStorage(LAYOUT, 8, BLOCK, dtype, CPU)
    way = Cached(LAYOUT, None)
    scale = 127.0  # whole numbers up to it, with one of it in each head, have codes of their own

    def keys(rows: torch.Tensor, width: int) -> torch.Tensor:
        """[B, n] tokens -> [B, 2, n, width]: the token in one place, the scale in the others."""
        x = torch.full((*rows.shape, 2, width), scale)
        x[..., 0] = rows[..., None].float()
        return x.movedim(-2, 1)

    def run(step: StepInput) -> list[torch.Tensor]:
        given = []
        for part in way.parts(step, kv):
            cache = part.arguments["past_key_values"]
            length, past = part.token_ids.shape[1], cache.get_seq_length()
            assert cache.get_mask_sizes(length, 0) == (past + length, 0) and not any(cache.is_sliding)
            k, v = cache.update(keys(part.token_ids, 3), keys(part.token_ids, 5), 0)
            assert cache.get_seq_length() == past + length and k.is_contiguous()
            torch.testing.assert_close(k[..., 0], v[..., 0])
            assert bool((k[..., 1:] == scale).all() and (v[..., 1:] == scale).all())
            given.append(k[:, 1, :, 0])
        return given

    (first,) = run(batch(RowInput([50, 51, 52], 0, blocks(6, 2))))
    assert first.tolist() == [[50, 51, 52]]
    tree = batch(RowInput([53, 60, 61, 62], 3, blocks(6, 2), parents=(-1, -1, 0)))
    short, long = run(tree)
    assert short.tolist() == [[50, 51, 52, 53, 61]] and long.tolist() == [[50, 51, 52, 53, 60, 62]]
    parts = way.parts(tree, kv)
    assert [p.rows.tolist() for p in parts if p.rows is not None] == [[0, 2], [1, 3]]
    assert parts[0].places is None and parts[1].places is not None and parts[1].places.tolist() == [1, 2]
    assert "position_ids" not in parts[0].arguments
    told = Cached(LAYOUT, 2).parts(tree, kv)
    assert told[1].arguments["position_ids"].tolist() == [[5, 6, 7]]


def test_what_layers_keep_is_what_they_put_into_a_cache() -> None:
    cache = probe_cache()
    cache.update(torch.zeros(1, 2, 6, 3), torch.zeros(1, 1, 6, 5), 0)
    cache.update(torch.zeros(1, 1, 6, 3), torch.zeros(1, 1, 6, 2), 2)
    cache.update_indexer(torch.zeros(1, 6, 7), 2)
    assert layout_of(cache, 6) == (
        KVLayerSpec((("keys", (2, 3)), ("values", (1, 5)))),
        KVLayerSpec(()),
        KVLayerSpec((("keys", (1, 3)), ("values", (1, 2)), ("index", (7,)))),
    )
    with pytest.raises(ModelLoadError, match=r"layer 0 keeps keys of shape \[1, 2, 6, 3\] for 5 tokens"):
        layout_of(cache, 5)
    with pytest.raises(ModelLoadError, match="no keys and values into a cache"):
        layout_of(probe_cache(), 5)

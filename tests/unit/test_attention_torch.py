"""Random ragged batches: the fast backend against the oracle, and the oracle against the mask rules by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftwise.attention.torch_grouped as torch_grouped
import draftwise.attention.torch_plan as torch_plan
from draftwise.attention.base import (
    AttentionBackend,
    first_key,
    request_keys,
    request_mask,
    request_positions,
    request_slots,
)
from draftwise.attention.reference import ReferenceAttention
from draftwise.attention.torch_grouped import TorchGroupedAttention
from draftwise.kv.storage import LARGEST, quantized
from draftwise.types import AttentionBatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_parents(rng: np.random.Generator, n: int) -> list[int]:
    return [int(rng.integers(-1, i)) if i else -1 for i in range(n)]


def ancestor_bits(parents: list[int]) -> list[int]:
    bits = [1]
    for i, parent in enumerate(parents):
        bits.append(bits[parent + 1] | 1 << (i + 1))
    return bits


def make_batch(
    rng: np.random.Generator,
    requests: list[tuple[int, int, bool]],  # (context, rows, tree)
    block_size: int = 4,
    in_a_row: bool = False,
    gaps: bool = False,
    levels: bool = False,
) -> tuple[AttentionBatch, int]:
    """A batch and the number of slots; no two requests share a block, blocks are shuffled unless ``in_a_row``.

    ``gaps``: some requests have keys that nobody sees; ``levels``: of some trees, a part of the rows is stored already.
    """
    starts = [int(rng.integers(0, 65 - rows)) if levels and tree else 0 for _, rows, tree in requests]
    blocks = [
        -(-(context + start + rows) // block_size)
        for (context, rows, _), start in zip(requests, starts, strict=True)
    ]
    total = sum(blocks) + 1
    order = np.arange(1, total) if in_a_row else 1 + rng.permutation(total - 1)
    tables = np.zeros((len(requests), max(blocks)), np.int32)
    start = 0
    for r, count in enumerate(blocks):
        tables[r, :count] = order[start : start + count]
        start += count
    query_start = np.concatenate(([0], np.cumsum([rows for _, rows, _ in requests]))).astype(np.int32)
    ancestors = None
    if any(tree for *_, tree in requests):
        ancestors = np.zeros(query_start[-1], np.uint64)
        for r, (_, rows, tree) in enumerate(requests):
            if tree:
                bits = ancestor_bits(random_parents(rng, starts[r] + rows - 1))[starts[r] :]
                ancestors[query_start[r] : query_start[r + 1]] = np.array(bits, np.uint64)
    batch = AttentionBatch(
        query_start_np=query_start,
        context_len_np=np.array([context for context, *_ in requests], np.int32),
        is_tree_np=np.array([tree for *_, tree in requests]),
        block_tables_np=tables,
        ancestors_np=ancestors,
        block_size=block_size,
        first_key_np=np.array([rng.integers(0, c + 1) for c, *_ in requests], np.int32) if gaps else None,
        tree_start_np=np.array(starts, np.int32) if levels else None,
    )
    return batch, total * block_size


def run_both(
    rng: np.random.Generator,
    batch: AttentionBatch,
    slots: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grouped, reference), over a cache in which every slot that no request owns is NaN."""
    rows = int(batch.query_start_np[-1])
    dim = 8
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)
    for r in range(len(batch.context_len_np)):
        own = torch.from_numpy(request_slots(batch, r, first_key(batch, r), request_keys(batch, r)))
        kv[own] = torch.randn((len(own), 2 * kv_heads, dim), generator=generator).to(dtype)
    # queries as a strided view, as the packed q/k/v buffer gives them
    q = torch.randn((rows, heads + 2 * kv_heads, dim), generator=generator).to(dtype)[:, :heads]
    entries: tuple[torch.Tensor, ...] = (kv if cache is None else kv.to(cache),)
    if cache in LARGEST:
        entries = quantized(kv, cache)
    backend = TorchGroupedAttention()

    def run(which: AttentionBackend, out: torch.Tensor | None = None) -> torch.Tensor:
        return which.run(
            q, entries, batch, num_kv_heads=kv_heads, scale=dim**-0.5, window=window, softcap=softcap, out=out
        )

    with torch.inference_mode():
        expected = run(ReferenceAttention())
        actual = run(backend)
        buffer = torch.full_like(actual, 7.0)
        assert run(backend, buffer) is buffer
        again = run(backend)  # from the prepared tasks
    torch.testing.assert_close(buffer, actual, rtol=0, atol=0)
    torch.testing.assert_close(again, actual, rtol=0, atol=0)
    assert actual.shape == (rows, heads * dim)
    return actual, expected


requests_strategy = st.lists(
    st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 5, 8, 17, 40, 64, 70]), st.booleans()).map(
        lambda item: (item[0], item[1], item[2] and 1 < item[1] <= 64)
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=150)
@given(
    requests=requests_strategy,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, None, 1, 3, 20]),
    in_a_row=st.booleans(),
    gaps=st.booleans(),
    levels=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_grouped_equals_reference(
    requests: list[tuple[int, int, bool]],
    heads: tuple[int, int],
    window: int | None,
    in_a_row: bool,
    gaps: bool,
    levels: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    batch, slots = make_batch(rng, requests, in_a_row=in_a_row, gaps=gaps, levels=levels)
    actual, expected = run_both(rng, batch, slots, *heads, window)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("context", [0, 90])
def test_long_chunks_are_cut_into_pieces(
    context: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiny limits, so that pieces and masks that are not kept occur; same numbers."""
    monkeypatch.setattr(torch_plan, "_PIECE_ELEMENTS", 3000)
    monkeypatch.setattr(torch_plan, "_KEPT_ELEMENTS", 5000)
    rng = np.random.default_rng(1)
    batch, slots = make_batch(rng, [(context, 130, False), (5, 1, False), (3, 4, True)])
    actual, expected = run_both(rng, batch, slots, 4, 2, window)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    tasks = batch.cache["torch_grouped"][(window, torch.float32)]  # type: ignore[index]
    pieces = [task for task in tasks if isinstance(task, torch_plan.Single) and task.r == 0]
    assert len(pieces) > 2
    assert any(piece.needs_mask and piece.mask is None for piece in pieces)


def test_very_different_lengths_are_not_padded_together() -> None:
    rng = np.random.default_rng(2)
    contexts = [3, 2000, 9, 1500, 30, 400]
    batch, slots = make_batch(rng, [(context, 1, False) for context in contexts], block_size=16)
    actual, expected = run_both(rng, batch, slots, 4, 2, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    tasks = batch.cache["torch_grouped"][(None, torch.float32)]  # type: ignore[index]
    sizes = sorted(task.num_requests for task in tasks if isinstance(task, torch_plan.Group))
    assert sizes == [2, 3]  # 2000 and 1500; 3, 9 and 30; 400 goes alone


@pytest.mark.parametrize("rows", [1, 3])
def test_a_group_is_gathered_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_grouped, "_GATHER_BYTES", 2 * 60 * 4 * 8 * 4)  # about two of seven requests
    rng = np.random.default_rng(6)
    batch, slots = make_batch(rng, [(40 + i, rows, False) for i in range(7)])
    actual, expected = run_both(rng, batch, slots, 4, 2, None)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    (task,) = batch.cache["torch_grouped"][(None, torch.float32)]  # type: ignore[index]
    assert task.scratch.shape[0] == 2 * task.num_keys


def test_keys_in_a_row_are_read_in_place() -> None:
    rng = np.random.default_rng(3)
    for in_a_row in (True, False):
        batch, slots = make_batch(rng, [(30, 2, False)], in_a_row=in_a_row)
        run_both(rng, batch, slots, 4, 2, None)
        (task,) = batch.cache["torch_grouped"][(None, torch.float32)]  # type: ignore[index]
        assert (task.key_index is None) == in_a_row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    batch, slots = make_batch(rng, [(9, 1, False), (40, 5, True), (0, 70, False), (3, 1, False)])
    actual, expected = run_both(rng, batch, slots, 4, 2, None, dtype)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "cache", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("in_a_row", [False, True])
def test_caches_of_other_types_and_soft_caps(
    cache: torch.dtype, softcap: float | None, in_a_row: bool
) -> None:
    rng = np.random.default_rng(8)
    requests = [(9, 1, False), (40, 5, True), (0, 70, False), (0, 1, False), (33, 1, False), (20, 3, False)]
    for some in (requests, [(30, 1, False)], [(0, 9, False)], [(8, 1, False), (9, 1, False)]):
        batch, slots = make_batch(rng, some, in_a_row=in_a_row)
        actual, expected = run_both(rng, batch, slots, 4, 2, None, cache=cache, softcap=softcap)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_soft_cap_by_hand() -> None:
    """Keys 3 and 0, query 1, cap 2: scores 2 tanh(1.5) and 0."""
    batch = AttentionBatch(
        query_start_np=np.array([0, 1], np.int32),
        context_len_np=np.array([1], np.int32),
        is_tree_np=np.array([False]),
        block_tables_np=np.array([[0]], np.int32),
        ancestors_np=None,
        block_size=4,
    )
    kv = torch.zeros(4, 2, 1)
    kv[:2, :, 0] = torch.tensor([[3.0, 5.0], [0.0, -1.0]])
    share = 1 / (1 + np.exp(-2 * np.tanh(1.5)))
    for backend in (ReferenceAttention(), TorchGroupedAttention()):
        out = backend.run(torch.ones(1, 1, 1), (kv,), batch, num_kv_heads=1, scale=1.0, softcap=2.0)
        assert float(out) == pytest.approx(5 * share - (1 - share), abs=1e-5)


def test_mask_rules_by_hand() -> None:
    """The worked example of `attention.base`: context 10, root + tree (-1, -1, 0), window 3."""
    batch = AttentionBatch(
        query_start_np=np.array([0, 4], np.int32),
        context_len_np=np.array([10], np.int32),
        is_tree_np=np.array([True]),
        block_tables_np=np.array([[2, 5, 3, 9]], np.int32),
        ancestors_np=np.array([0b0001, 0b0011, 0b0101, 0b1011], np.uint64),
        block_size=4,
    )
    assert request_positions(batch, 0).tolist() == [10, 11, 11, 12]
    full = request_mask(batch, 0, 0, None)
    assert full[:, :10].all()
    assert full[:, 10:].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    windowed = request_mask(batch, 0, 8, 3)  # keys 8, 9, then the rows
    assert windowed.astype(int).tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 1, 0],
        [0, 0, 1, 1, 0, 1],
    ]
    assert request_slots(batch, 0, 6, 14).tolist() == [22, 23, 12, 13, 14, 15, 36, 37]


@pytest.mark.parametrize("window", [None, 2])
def test_a_tree_level_by_level_equals_one_pass(window: int | None) -> None:
    """Every row of every cut into passes sees what it sees in one pass; the oracle's and the backend's answers."""
    rng = np.random.default_rng(7)
    parents = (-1, -1, 0, 0, 1, 4, 5)
    bits = np.array(ancestor_bits(list(parents)), np.uint64)
    kv = torch.randn((40, 4, 8), generator=torch.Generator().manual_seed(1))
    q = torch.randn((8, 4, 8), generator=torch.Generator().manual_seed(2))
    table = rng.permutation(10).astype(np.int32)[None]

    def run(start: int, end: int, backend: AttentionBackend) -> torch.Tensor:
        batch = AttentionBatch(
            query_start_np=np.array([0, end - start], np.int32),
            context_len_np=np.array([10], np.int32),
            is_tree_np=np.array([True]),
            block_tables_np=table,
            ancestors_np=bits[start:end],
            block_size=4,
            first_key_np=np.array([3], np.int32),
            tree_start_np=np.array([start], np.int32),
        )
        return backend.run(q[start:end], (kv,), batch, num_kv_heads=2, scale=0.5, window=window)

    whole = run(0, 8, ReferenceAttention())
    for backend in (ReferenceAttention(), TorchGroupedAttention()):
        for borders in ((0, 8), (0, 1, 3, 5, 6, 7, 8), (0, 3, 8)):
            for start, end in pairwise(borders):
                torch.testing.assert_close(run(start, end, backend), whole[start:end], rtol=1e-5, atol=1e-5)


def test_a_full_tree_of_64_rows() -> None:
    rng = np.random.default_rng(5)
    batch, slots = make_batch(rng, [(33, 64, True), (5, 64, True), (7, 60, True)])
    actual, expected = run_both(rng, batch, slots, 4, 2, 40)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)

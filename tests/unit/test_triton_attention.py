"""Triton's paged attention, in its interpreter where there is no GPU, against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.unit.test_attention_torch import make_batch

from draftwise.attention.base import first_key, request_keys, request_slots
from draftwise.attention.reference import ReferenceAttention
from draftwise.graphs.buffers import captured_input
from draftwise.kernels.triton.attention import TritonAttention, _tasks
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.tiling import Tiling, free_tiling
from draftwise.kv.storage import LARGEST, quantized
from draftwise.types import AttentionBatch, StaticRows

DEVICE = torch.device("cpu" if interpreted() else "cuda")
SMALL = Tiling(block_n=16, partition=32, slots=2)
FREE = Tiling(block_n=16, partition=16, slots=2, fixed=False)
TWICE = Tiling(block_n=16, partition=16, slots=2)
"""Of three partitions the first and the last share a slot."""


def filled_cache(
    batch: AttentionBatch, slots: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """[slots, 2 * Hkv, D]; NaN in every slot that nobody may read."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)
    for r in range(len(batch.context_len_np)):
        own = torch.from_numpy(request_slots(batch, r, first_key(batch, r), request_keys(batch, r)))
        kv[own] = torch.randn((len(own), 2 * kv_heads, dim), generator=generator).to(dtype)
    return kv


def check(
    batch: AttentionBatch,
    slots: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    tiling: Tiling | None = SMALL,
    workspace: int = 1 << 20,
    limit: float = 1e-5,
    whole: bool = False,
) -> torch.Tensor:
    kv = filled_cache(batch, slots, kv_heads, dim, dtype)
    entries: tuple[torch.Tensor, ...] = (kv if cache is None else kv.to(cache),)
    if cache in LARGEST:
        entries = quantized(kv.nan_to_num(5.0), cache)
    generator = torch.Generator().manual_seed(1)
    rows = int(batch.query_start_np[-1])
    packed = torch.randn((rows, heads + 2 * kv_heads, dim), generator=generator).to(dtype)
    entries = tuple(part.to(DEVICE) for part in entries)
    q = packed.to(DEVICE)[:, :heads]  # strided, as the packed q/k/v buffer gives it
    scale = dim**-0.5
    options = {"num_kv_heads": kv_heads, "scale": scale, "window": window, "softcap": softcap, "whole": whole}
    expected = ReferenceAttention().run(q, entries, batch, **options)  # type: ignore[arg-type]
    buffer = torch.full_like(expected, 7.0)
    backend = TritonAttention(tiling, workspace)
    actual = backend.run(q, entries, batch, out=buffer, **options)  # type: ignore[arg-type]
    assert actual is buffer
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=limit)
    return actual


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("tiling", [SMALL, TWICE, FREE], ids=["small", "twice", "free"])
def test_rows_see_those_behind_them_where_they_are_told_to(window: int | None, tiling: Tiling) -> None:
    batch, slots = make_batch(
        np.random.default_rng(7), [(9, 8, False), (40, 1, False), (0, 20, False), (28, 9, False)]
    )
    seen = check(batch, slots, window=window, tiling=tiling, whole=True)
    assert not torch.equal(seen, check(batch, slots, window=window, tiling=tiling))


MIXED = [(9, 1, False), (40, 5, True), (0, 20, False), (0, 0, False), (33, 1, False), (31, 3, True)]


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_ragged_batches_with_gaps_and_levels(window: int | None, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    batch, slots = make_batch(rng, MIXED, gaps=True, levels=True)
    check(batch, slots, heads=heads[0], kv_heads=heads[1], window=window)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_nodes_are_seen_through_masks(heads: tuple[int, int]) -> None:
    batch, slots = make_batch(np.random.default_rng(5), MIXED, gaps=True, levels=True)
    check(batch, slots, heads=heads[0], kv_heads=heads[1], tiling=FREE)


@pytest.mark.parametrize("window", [64, 70, 101])
def test_windows_over_nodes_seen_through_masks(window: int) -> None:
    """Contexts that the window hides in part, of trees and of chunks, tiles of which no row sees anything."""
    parts = [(109, 9, False), (140, 15, True), (60, 20, True), (33, 1, False), (131, 30, True)]
    batch, slots = make_batch(np.random.default_rng(5), parts, gaps=True)
    check(batch, slots, window=window, tiling=FREE)


@pytest.mark.parametrize("window", [1, 7, 40])
def test_short_windows_without_trees(window: int) -> None:
    parts = [(9, 1, False), (40, 5, False), (0, 20, False), (0, 0, False), (31, 3, False)]
    batch, slots = make_batch(np.random.default_rng(5), parts, gaps=True)
    check(batch, slots, window=window, tiling=FREE)


@pytest.mark.parametrize("tiling", [SMALL, FREE], ids=["small", "free"])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64])
def test_lengths_at_the_borders_of_tiles_and_partitions(context: int, tiling: Tiling) -> None:
    rng = np.random.default_rng(context)
    batch, slots = make_batch(rng, [(context, 1, False), (context, 4, True)], block_size=16)
    check(batch, slots, tiling=tiling)


def test_tiles_follow_the_batch() -> None:
    """An 8B shape: 32 query heads on 8."""
    tiling = functools.partial(free_tiling, dim=128, hopper=True)
    one, some, many = (tiling(4, requests * 8, 2048) for requests in (1, 16, 64))
    assert (one.slots, some.slots, many.slots) == (32, 8, 2)
    assert tiling(4, 64 * 8, 131072).slots == 8, "a long one among many is done by more programs"
    assert tiling(8 * 4, 8, 2048) == one, "verification of eight rows as plain decoding"
    assert tiling(61 * 4, 8, 2048).block_m == 64


@pytest.mark.parametrize("tiling", [SMALL, FREE], ids=["small", "free"])
def test_sizes_that_are_no_powers_of_two(tiling: Tiling) -> None:
    batch, slots = make_batch(np.random.default_rng(2), [(21, 2, False), (8, 6, True)], block_size=5)
    check(batch, slots, heads=6, kv_heads=2, dim=20, tiling=tiling)


@pytest.mark.parametrize("tiling", [SMALL, FREE], ids=["small", "free"])
def test_a_group_wider_than_a_block(tiling: Tiling) -> None:
    batch, slots = make_batch(np.random.default_rng(2), [(21, 2, False), (8, 3, True)])
    check(batch, slots, heads=20, kv_heads=1, tiling=tiling)


@pytest.mark.parametrize("tiling", [SMALL, FREE], ids=["small", "free"])
@pytest.mark.parametrize("cache", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_caches_of_other_types_and_soft_caps(
    cache: torch.dtype, softcap: float | None, tiling: Tiling
) -> None:
    batch, slots = make_batch(np.random.default_rng(8), MIXED)
    check(batch, slots, cache=cache, softcap=softcap, tiling=tiling)


@pytest.mark.parametrize("tiling", [SMALL, FREE], ids=["small", "free"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_activations(dtype: torch.dtype, tiling: Tiling) -> None:
    batch, slots = make_batch(np.random.default_rng(4), MIXED)
    check(batch, slots, dtype=dtype, limit=2e-2, tiling=tiling)


@pytest.mark.parametrize("tiling", [Tiling(), None], ids=["fixed", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("nodes", [5, 40])
def test_the_default_tiles(tiling: Tiling | None, dtype: torch.dtype, window: int | None, nodes: int) -> None:
    batch, slots = make_batch(np.random.default_rng(4), [(600, 1, False), (520, nodes, True)], block_size=16)
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    check(batch, slots, tiling=tiling, window=window, dtype=dtype, limit=limit)


def test_a_pass_larger_than_the_workspace_is_launched_in_pieces() -> None:
    batch, slots = make_batch(np.random.default_rng(4), MIXED)
    whole = check(batch, slots)
    assert torch.equal(check(batch, slots, workspace=1), whole)
    assert torch.equal(check(batch, slots, workspace=10 * 4 * 2 * (8 + 2) * 4), whole)


@pytest.mark.parametrize("window", [None, 40])
def test_the_number_of_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    batch, slots = make_batch(np.random.default_rng(5), [(150, 1, False), (100, 6, True)], gaps=True)
    whole = check(batch, slots, window=window)
    for programs in (1, 8, 12):  # 3 tasks x 2 heads: one program each, and two
        monkeypatch.setattr("draftwise.kernels.triton.attention._PROGRAMS", programs)
        assert torch.equal(check(batch, slots, window=window), whole)


@pytest.mark.parametrize("window", [None, 20, 75])
@pytest.mark.parametrize("slots_of_row", [1, 3, 32])
@pytest.mark.parametrize("fixed", [True, False])
def test_slots_that_hold_many_partitions(window: int | None, slots_of_row: int, fixed: bool) -> None:
    """Contexts of up to eight partitions, and chunks whose rows end in different ones."""
    tiling = Tiling(block_n=16, partition=16, slots=slots_of_row, fixed=fixed)
    tree = fixed or window is None or window >= 64
    batch, slots = make_batch(np.random.default_rng(6), [(118, 2, False), (90, 5, tree), (30, 9, False)])
    check(batch, slots, window=window, tiling=tiling)


def test_launches_do_not_grow_with_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured pass of 64 requests of 6 rows of an 8B model: only its shapes count, nothing is run."""
    from draftwise.kernels.triton.device import attention as device

    launches: list[tuple[int, ...]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: launches.append(grid)

    for name in ("partial_attention", "combine_partitions", "tree_rows"):
        monkeypatch.setattr(device, name, Counted())
    found = []
    for max_keys in (8192, 131072):
        launches.clear()
        backend = TritonAttention(Tiling())
        words = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        static = StaticRows(
            rows=6,
            max_keys=max_keys,
            context=words,
            first_key=words,
            is_tree=words,
            tables=torch.zeros((64, 8), dtype=torch.int32, device=DEVICE),
            ancestors=torch.zeros(64 * 6, dtype=torch.int64, device=DEVICE),
        )
        batch = AttentionBatch(
            query_start_np=np.arange(65, dtype=np.int32) * 6,
            context_len_np=np.zeros(64, np.int32),
            is_tree_np=np.zeros(64, np.bool_),
            block_tables_np=np.zeros((64, 1), np.int32),
            ancestors_np=None,
            block_size=16,
            static=static,
        )
        q = torch.zeros((64 * 6, 32, 128), dtype=torch.bfloat16, device=DEVICE)
        kv = torch.zeros((16, 16, 128), dtype=torch.bfloat16, device=DEVICE)
        backend.run(q, (kv,), batch, num_kv_heads=8, scale=1.0)
        found.append(list(launches))
    assert found[0] == found[1]
    assert len(found[0]) == 1 + 2 * 4, "rows of trees; four pieces of 64 MiB of partial results"


def test_empty_pass() -> None:
    batch, slots = make_batch(np.random.default_rng(4), [(4, 0, False)])
    assert check(batch, slots).shape == (0, 32)


def test_tasks_by_hand() -> None:
    counts = np.array([5, 0, 2], np.int32)
    assert _tasks(counts, np.array([0, 5, 5, 7], np.int32), 4).tolist() == [[0, 0, 4], [0, 4, 1], [2, 5, 2]]


def products_depend_on_the_place() -> bool:
    """Whether numpy, which multiplies for the interpreter, sums a row in another order where it stands elsewhere among
    the rows, as OpenBLAS's kernels for AVX do. No GPU does."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 8), np.float32), rng.standard_normal((8, 16), np.float32)
    return not np.array_equal(np.roll(a, 1, axis=0) @ b, np.roll(a @ b, 1, axis=0))


@pytest.mark.skipif(
    interpreted() and products_depend_on_the_place(),
    reason="numpy's products depend on a row's place: start with OPENBLAS_CORETYPE=Prescott",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "tiling"), [(None, SMALL), (9, SMALL), (None, TWICE), (30, TWICE)])
def test_a_token_has_the_same_bits_in_a_tree_a_chunk_and_alone(
    dtype: torch.dtype, window: int | None, tiling: Tiling
) -> None:
    """A path of 7 tokens behind 28 others, across the borders of a tile and of a partition: decoded token by token,
    as one chunk, and as nodes of a tree whose other nodes stand between them, beside another request."""
    context, depth, dim = 28, 7, 8
    nodes = [0, 2, 3, 7, 8, 11, 12]  # the path's rows among the 14 of the tree
    kv = torch.randn((64, 2, dim), generator=torch.Generator().manual_seed(3)).to(dtype)
    q = torch.randn((depth, 4, dim), generator=torch.Generator().manual_seed(4)).to(dtype)
    backend = TritonAttention(tiling)

    def run(queries: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        return backend.run(
            queries.to(DEVICE), (cache.to(DEVICE),), batch, num_kv_heads=1, scale=0.3, window=window
        ).cpu()

    def batch_of(
        rows: list[int], contexts: list[int], masks: list[int] | None, tables: list[list[int]]
    ) -> AttentionBatch:
        return AttentionBatch(
            query_start_np=np.cumsum([0, *rows]).astype(np.int32),
            context_len_np=np.array(contexts, np.int32),
            is_tree_np=np.array([masks is not None and r == 0 for r in range(len(rows))]),
            block_tables_np=np.array(tables, np.int32),
            ancestors_np=None if masks is None else np.array(masks, np.uint64),
            block_size=16,
        )

    chunk = run(q, kv, batch_of([depth], [context], None, [[0, 1, 2, 3]]))
    alone = [run(q[i : i + 1], kv, batch_of([1], [context + i], None, [[0, 1, 2, 3]])) for i in range(depth)]
    assert torch.equal(torch.cat(alone), chunk)

    scattered = torch.randn((128, 2, dim), generator=torch.Generator().manual_seed(9)).to(dtype)
    scattered[:context] = kv[:context]
    queries = torch.randn((16, 4, dim), generator=torch.Generator().manual_seed(10)).to(dtype)
    masks = [1 | 1 << i for i in range(14)] + [0, 0]  # the other nodes are children of the root
    for i, node in enumerate(nodes):
        scattered[context + node] = kv[context + i]
        queries[node] = q[i]
        masks[node] = sum(1 << n for n in nodes[: i + 1])
    batch = batch_of([14, 2], [context, 5], masks, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert torch.equal(run(queries, scattered, batch)[nodes], chunk)


@pytest.mark.parametrize("window", [None, 5])
def test_captured_rows_see_those_behind_them_too(window: int | None) -> None:
    """Blocks of six rows in a captured pass: the bits of a pass with as many rows."""
    parts = [(9, 6, False), (40, 6, False), (0, 6, False)]
    batch, slots = make_batch(np.random.default_rng(8), parts)
    entries = (filled_cache(batch, slots, 2, 8, torch.float32).nan_to_num(3.0).to(DEVICE),)
    q = torch.randn((18, 4, 8), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    longs = torch.zeros(18, dtype=torch.int64, device=DEVICE)
    words = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    context = torch.from_numpy(batch.context_len_np).to(DEVICE)
    tables = torch.from_numpy(batch.block_tables_np).to(DEVICE)
    static = StaticRows(6, 64, context, words, words, tables, longs)
    passes = (batch, captured_input(longs, longs, longs, batch.block_size, static).attention)
    made = [
        TritonAttention(SMALL).run(q, entries, one, num_kv_heads=2, scale=0.3, window=window, whole=True)
        for one in passes
    ]
    assert torch.equal(*made)

"""Attention in tiles that are computed: every size and border, the same bits in any company, and what stays out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.fakes.attention_batches import Part, make_batch, slots_of
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.attention.reference import ReferenceAttention
from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kv.storage import LARGEST, quantized

NAN = float("nan")
SHAPES = [(2, 2, 32), (3, 1, 40), (8, 2, 64), (7, 1, 80), (20, 1, 96), (8, 1, 128), (40, 1, 32), (2, 1, 256)]
"""Hq, Hkv, D; a group of 40 does not fit one block of 32 vectors."""


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with forced_isa(Isa.EMULATED):
        yield


def run(
    q: Tensor,  # [rows, Hq, D]
    entries: Sequence[Tensor],  # of each request: [keys, 2 * Hkv, D]
    parts: Sequence[Part],
    *,
    threads: int = 2,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 16,
    seed: int = 0,
) -> Tensor:
    batch, slots = make_batch(parts, block_size, seed)
    kv = torch.full((slots, *entries[0].shape[1:]), NAN, dtype=torch.bfloat16)
    for r, (part, own) in enumerate(zip(parts, entries, strict=True)):
        keys = part.context + part.start + part.rows
        kv[slots_of(batch, r, keys)] = own[:keys]
    attention = NativeAttention(native_or_skip(), ThreadPool(native_or_skip(), threads))
    return attention.run(
        q, (kv,), batch, num_kv_heads=kv.shape[1] // 2, scale=0.2, window=window, softcap=softcap
    )


def made(rows: int, keys: int, shape: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Queries [rows, Hq, D], entries [keys, 2 * Hkv, D]."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, dim, generator=generator).to(torch.bfloat16)
    return q, torch.randn(keys, 2 * kv_heads, dim, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_near_the_oracle(
    shape: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    for context, rows in ((0, 9), (30, 3), (250, 12), (256, 1), (300, 1)):
        q, entries = made(rows, context + rows, shape)
        got = run(q, [entries], [Part(context, rows)], window=window, softcap=softcap)
        batch, slots = make_batch([Part(context, rows)])
        kv = torch.zeros(slots, *entries.shape[1:])
        kv[slots_of(batch, 0, context + rows)] = entries.float()
        want = ReferenceAttention().run(
            q.float(), (kv,), batch, num_kv_heads=shape[1], scale=0.2, window=window, softcap=softcap
        )
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_its_bits_in_any_company(shape: tuple[int, int, int], window: int | None) -> None:
    """Around borders of chunks and partitions: row by row, in chunks, beside others, with other threads and blocks."""
    length = 262
    q, entries = made(length, length, shape)
    whole = run(q, [entries], [Part(0, length)], window=window)
    assert not whole.isnan().any()
    for start in (0, 1, 15, 30, 31, 32, 33, 254, 255, 256, 257):
        for rows, block_size in ((1, 16), (2, 4), (5, 5)):
            part = run(
                q[start : start + rows],
                [entries],
                [Part(start, rows)],
                window=window,
                threads=rows,
                block_size=block_size,
                seed=start,
            )
            assert torch.equal(part, whole[start : start + rows]), (start, rows, block_size)
    parts = [Part(250, 12), Part(31, 33), Part(0, 1)]
    rows_of = torch.cat([q[p.context : p.context + p.rows] for p in parts])
    beside = run(rows_of, [entries] * 3, parts, window=window, threads=3).split([p.rows for p in parts])
    for part, out in zip(parts, beside, strict=True):
        assert torch.equal(out, whole[part.context : part.context + part.rows]), part


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100])
def test_every_height_of_a_tile_has_the_same_bits(rows: int) -> None:
    """One to three tiles of vectors, full and with a tail; keys end in every place of a chunk."""
    shape = (2, 1, 64)
    q, entries = made(100, 240, shape)
    whole = run(q, [entries], [Part(140, 100)], threads=1)
    assert torch.equal(run(q[:rows], [entries], [Part(140, rows)], threads=1), whole[:rows])


@pytest.mark.parametrize("shape", [(8, 2, 64), (3, 1, 40), (40, 1, 32)], ids=str)
@pytest.mark.parametrize("context", [0, 1, 31, 32, 33, 250, 255, 256, 257])
def test_a_tree_has_the_bits_of_chains(context: int, shape: tuple[int, int, int]) -> None:
    """In one pass, and its last rows on top of those that earlier passes stored."""
    parents = (-1, -1, 0, 0, 1, 4, -1, 5, 7, 8, 9)
    count = len(parents) + 1
    q, entries = made(count, context + count, shape)
    tree = run(q, [entries], [Part(context, count, parents)])
    late = run(q[7:], [entries], [Part(context, count - 7, parents, start=7)], threads=3)
    assert torch.equal(late, tree[7:])
    for node in range(-1, len(parents)):
        path = [node]
        while path[-1] >= 0:
            path.append(parents[path[-1]])
        rows = [i + 1 for i in reversed(path)]
        line = torch.cat((entries[:context], entries[context:][rows]))
        alone = run(q[rows[-1]][None], [line], [Part(context + len(rows) - 1, 1)], seed=node + 2)
        assert torch.equal(tree[rows[-1]], alone[0]), node


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), NAN])
def test_a_value_that_is_no_number_stays_with_who_sees_it(bad: float) -> None:
    """Zero times it would be NaN. Rows share tiles with rows that do not see it, on both sides in a window."""
    q, entries = made(40, 300, (4, 2, 64))
    spoiled = entries.clone()
    spoiled[280, 2:] = bad  # the value of row 20
    for window in (None, 25):
        good = run(q, [entries], [Part(260, 40)], window=window)
        out = run(q, [spoiled], [Part(260, 40)], window=window)
        sees = torch.zeros(40, dtype=torch.bool)
        sees[20 : 40 if window is None else 20 + window] = True
        assert torch.equal(out[~sees], good[~sees])
        assert not out[sees].isfinite().any()


def test_keys_behind_the_window_are_never_read() -> None:
    """NaN in all that nobody sees: before the first row's window, inside a chunk, and before the first key."""
    q, entries = made(6, 306, (4, 2, 64))
    want = run(q, [entries], [Part(300, 6)], window=20)
    spoiled = entries.clone()
    spoiled[:281] = NAN
    assert torch.equal(run(q, [spoiled], [Part(300, 6)], window=20), want)
    want = run(q, [entries], [Part(300, 6, first=290)])
    spoiled[:290] = NAN
    assert torch.equal(run(q, [spoiled], [Part(300, 6, first=290)]), want)


@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "cache", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str
)
def test_other_types_are_computed_on_vectors(rows: torch.dtype, cache: torch.dtype) -> None:
    """The bits of the level that the other kernels run on; only bfloat16 over bfloat16 has bits of its own."""
    batch, slots = make_batch([Part(300, 5)])
    q, entries = made(5, slots, (4, 2, 64))
    kv = quantized(entries.float(), cache) if cache in LARGEST else (entries.to(cache),)

    def result() -> Tensor:
        attention = NativeAttention(native_or_skip(), ThreadPool(native_or_skip(), 1))
        return attention.run(q.to(rows), kv, batch, num_kv_heads=2, scale=0.2)

    tiles = result()
    with forced_isa(Isa.PORTABLE):
        vectors = result()
    own = rows is torch.bfloat16 and cache is torch.bfloat16
    assert own or torch.equal(tiles, vectors)
    torch.testing.assert_close(tiles, vectors, rtol=2**-7, atol=1e-5)


def test_a_head_is_not_read_into_its_neighbour() -> None:
    """Heads of 40 do not fill a chunk; what stands behind them in the cache is another head, here one of infinities."""
    q, entries = made(3, 67, (2, 2, 40))
    want = run(q, [entries], [Part(64, 3)])
    for spoiled, head in ((1, 0), (2, 1)):  # keys of heads 0 and 1, values of heads 0 and 1
        other = entries.clone()
        other[:, spoiled] = float("inf")
        got = run(q, [other], [Part(64, 3)])
        own = slice(40 * head, 40 * head + 40)
        assert torch.equal(got[:, own], want[:, own]), head
        assert not torch.equal(got, want)

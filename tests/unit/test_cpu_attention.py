"""Native attention: against the oracle, and bit for bit against itself in every batch, chunking and tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def some(firsts: Sequence[Any], seconds: Sequence[Any], skew: int = 0) -> list[Any]:
    """Parameters of a test: every two values of any two kinds together, on every instruction set, in one of the two
    types; --all: in both. ``skew``: which of the two; computed tiles take long over large shapes in bfloat16."""
    return [
        pytest.param(
            isa, first, second, dtype, id=f"{isa.name.lower()}-{first}-{second}-{name}",
            marks=[] if (h + i + j + k) % 2 == skew else pytest.mark.slow,
        )
        for h, isa in enumerate(Isa)
        for i, first in enumerate(firsts)
        for j, second in enumerate(seconds)
        for k, (name, dtype) in enumerate(DTYPES.items())
    ]  # fmt: skip


SHAPES = [(4, 2, 64), (6, 2, 12), (8, 1, 128), (4, 4, 80), (40, 2, 16), (3, 3, 2)]  # Hq, Hkv, D
TREE = (-1, -1, 0, 0, 1, 4, -1, 5)


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


def native(threads: int = 2) -> NativeAttention:
    return NativeAttention(native_or_skip(), ThreadPool(native_or_skip(), threads))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


MIXED = [
    Part(1, 1),
    Part(15, 1),
    Part(16, 3),
    Part(17, 9, TREE),
    Part(255, 9, TREE),
    Part(300, 40),
    Part(0, 33),
    Part(1030, 1),
    Part(1, 20, first=1),
    Part(40, 3, first=33),
    Part(700, 9, TREE, first=613),
    Part(250, 3, TREE, start=5),
    Part(19, 1, TREE, start=8, first=7),
]


@pytest.mark.parametrize(("isa", "shape", "window", "dtype"), some(SHAPES, [None, 7, 300]), indirect=["isa"])
def test_equals_the_oracle(shape: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    batch, slots = make_batch(MIXED)
    rows = int(batch.query_start_np[-1])
    q = random(rows, heads, dim, dtype=dtype)
    kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)  # what nobody sees must not matter
    for r, part in enumerate(MIXED):
        n = part.context + part.start + part.rows
        kv[slots_of(batch, r, n)] = random(n, 2 * kv_heads, dim, dtype=dtype, seed=r + 1)
        kv[slots_of(batch, r, part.first)] = float("nan")
    got = native().run(q, (kv,), batch, num_kv_heads=kv_heads, scale=0.3, window=window)
    want = ReferenceAttention().run(
        q.float(), (kv.float(),), batch, num_kv_heads=kv_heads, scale=0.3, window=window
    )
    assert got.dtype is dtype
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
    else:
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 4095])
def test_context_lengths(context: int) -> None:
    batch, slots = make_batch([Part(context, 2)])
    q, kv = random(2, 8, 64), random(slots, 4, 64, seed=1)
    got = native().run(q, (kv,), batch, num_kv_heads=2, scale=0.125)
    want = ReferenceAttention().run(q, (kv,), batch, num_kv_heads=2, scale=0.125)
    assert float((got - want).norm() / want.norm()) < 1e-5


KINDS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.int8),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
]
"""Rows, cache."""


def cast(kv: Tensor, cache: torch.dtype) -> tuple[Tensor, ...]:
    return quantized(kv, cache) if cache in LARGEST else (kv.to(cache),)


@pytest.mark.parametrize(
    ("shape", "softcap", "dtype", "cache"),
    [  # every two values of any two kinds together, on every instruction set; --all: every three
        pytest.param(
            shape, softcap, dtype, cache, id=f"{shape}-{softcap}-{dtype}-{cache}",
            marks=[] if (i + j + k + k // 4) % 2 else pytest.mark.slow,
        )
        for i, shape in enumerate([(4, 2, 64), (6, 2, 12), (4, 4, 80)])
        for j, softcap in enumerate([None, 2.5])
        for k, (dtype, cache) in enumerate(KINDS)
    ],
)  # fmt: skip
def test_caches_of_other_types(
    shape: tuple[int, int, int], softcap: float | None, dtype: torch.dtype, cache: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    batch, slots = make_batch(MIXED)
    rows = int(batch.query_start_np[-1])
    q = random(rows, heads, dim, dtype=dtype)
    kv = cast(random(slots, 2 * kv_heads, dim, seed=1), cache)
    got = native().run(q, kv, batch, num_kv_heads=kv_heads, scale=0.3, softcap=softcap)
    want = ReferenceAttention().run(q.float(), kv, batch, num_kv_heads=kv_heads, scale=0.3, softcap=softcap)
    assert got.dtype is dtype
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
    else:
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("cache", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_same_bits_over_caches_of_other_types(dtype: torch.dtype, cache: torch.dtype) -> None:
    """One by one, in chunks beside another request, and as nodes of a tree stored in two passes."""
    length, heads, kv_heads, dim = 300, 4, 2, 64
    q = random(length, heads, dim, dtype=dtype)
    entries = random(length, 2 * kv_heads, dim, seed=1)

    def run(parts: Sequence[Part], threads: int = 2) -> Tensor:
        batch, slots = make_batch(parts, seed=len(parts))
        kv = torch.zeros(slots, 2 * kv_heads, dim)
        for r, part in enumerate(parts):
            keys = part.context + part.start + part.rows
            kv[slots_of(batch, r, keys)] = entries[:keys]
        at = [p.context + p.start for p in parts]
        rows = torch.cat([q[a : a + p.rows] for a, p in zip(at, parts, strict=True)])
        return native(threads).run(rows, cast(kv, cache), batch, num_kv_heads=kv_heads, scale=0.3)

    whole = run([Part(0, length)])
    for rows in (1, 3, 8):
        for start in (0, 100, 254, length - rows):
            part = run([Part(start, rows), Part(7, 2)], threads=3)[:rows]
            assert torch.equal(part, whole[start : start + rows]), (rows, start)
    line = tuple(range(-1, 11))
    for start in (0, 5):
        part = run([Part(250, 13 - start, line, start=start)])
        assert torch.equal(part, whole[250 + start : 263]), start


def test_soft_cap() -> None:
    batch, slots = make_batch([Part(40, 1)])
    q, kv = random(1, 1, 16) * 8, random(slots, 2, 16, seed=1)
    got = native().run(q, (kv,), batch, num_kv_heads=1, scale=1.0, softcap=5.0)
    entries = kv[slots_of(batch, 0, 41)]
    scores = torch.tanh(entries[:, 0] @ q[0, 0] / 5.0) * 5.0
    assert scores.abs().max() > 4.5, "a cap that never bites proves nothing"
    torch.testing.assert_close(got[0], scores.softmax(0) @ entries[:, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("isa", "shape", "window", "dtype"),
    some([(4, 2, 64), (6, 2, 12), (8, 1, 128)], [None, 40], skew=1),
    indirect=["isa"],
)
def test_same_bits_for_any_chunking_and_batch(
    shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    """The rows of a sequence one by one, in chunks, and beside other requests in other slots with more threads."""
    heads, kv_heads, dim = shape
    length = 530
    q = random(length, heads, dim, dtype=dtype)
    entries = random(length, 2 * kv_heads, dim, dtype=dtype, seed=1)

    def run(parts: Sequence[tuple[int, int]], threads: int, seed: int) -> list[Tensor]:
        batch, slots = make_batch([Part(c, n) for c, n in parts], seed=seed)
        kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)
        for r, (context, n) in enumerate(parts):
            kv[slots_of(batch, r, context + n)] = entries[: context + n]
        rows = torch.cat([q[c : c + n] for c, n in parts])
        out = native(threads).run(rows, (kv,), batch, num_kv_heads=kv_heads, scale=0.3, window=window)
        return list(out.split([n for _, n in parts]))

    (whole,) = run([(0, length)], threads=2, seed=0)
    for rows in (1, 2, 3, 4, 5, 8, 13, 64, 512):
        for start in (0, 255 - rows // 2, length - rows):
            if start < 0 or start + rows > length:
                continue
            for threads in (1, 3):
                (part,) = run([(start, rows)], threads=threads, seed=rows)
                assert torch.equal(part, whole[start : start + rows]), (rows, start, threads)
    parts = [(i, 1 + i % 9) for i in range(0, 500, 23)]
    for (start, n), part in zip(parts, run(parts, threads=2, seed=5), strict=True):
        assert torch.equal(part, whole[start : start + n]), (start, n)


@pytest.mark.parametrize(
    ("isa", "context", "window", "dtype"), some([0, 5, 250, 255, 256, 770], [None, 20]), indirect=["isa"]
)
def test_tree_paths_have_the_bits_of_chains(context: int, window: int | None, dtype: torch.dtype) -> None:
    """A node in the tree computes what the same token computes when it is decoded plainly."""
    heads, kv_heads, dim = 4, 2, 64
    parents = (*TREE, *range(7, 39))  # crosses a border of partitions wherever it hangs near one
    count = len(parents) + 1
    q = random(count, heads, dim, dtype=dtype)
    entries = random(context + count, 2 * kv_heads, dim, dtype=dtype, seed=1)
    batch, slots = make_batch([Part(3, 1), Part(context, count, parents)], seed=2)
    kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)
    kv[slots_of(batch, 0, 4)] = 1.0
    kv[slots_of(batch, 1, context + count)] = entries
    tree = native(3).run(
        torch.cat((q[:1], q)), (kv,), batch, num_kv_heads=kv_heads, scale=0.2, window=window
    )[1:]
    for node in range(-1, len(parents)):
        path = [node]
        while path[-1] >= 0:
            path.append(parents[path[-1]])
        rows = [i + 1 for i in reversed(path)]  # root first
        chain, needed = make_batch([Part(context + len(rows) - 1, 1)], seed=node + 7)
        line = torch.full((needed, 2 * kv_heads, dim), float("nan"), dtype=dtype)
        at = slots_of(chain, 0, context + len(rows))
        line[at] = torch.cat((entries[:context], entries[context:][rows]))
        alone = native(1).run(
            q[rows[-1] :][:1], (line,), chain, num_kv_heads=kv_heads, scale=0.2, window=window
        )
        assert torch.equal(tree[rows[-1]], alone[0]), node


@pytest.mark.parametrize(
    ("isa", "context", "window", "dtype"), some([1, 250, 770], [None, 4, 300], skew=1), indirect=["isa"]
)
def test_a_tree_level_by_level_has_the_bits_of_one_pass(
    context: int, window: int | None, dtype: torch.dtype
) -> None:
    """In any cut into passes, alone and beside others, with 1 and 3 threads; keys before the first are NaN."""
    heads, kv_heads, dim = 4, 2, 64
    parents = (*TREE, *range(7, 62))
    count, first = len(parents) + 1, min(context, 3)
    q = random(count, heads, dim, dtype=dtype)
    entries = random(context + count, 2 * kv_heads, dim, dtype=dtype, seed=1)
    entries[:first] = float("nan")

    def run(part: Part, beside: bool, threads: int) -> Tensor:
        parts = [Part(5, 2), part] if beside else [part]
        batch, slots = make_batch(parts, seed=part.start)
        kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)
        if beside:
            kv[slots_of(batch, 0, 7)] = 1.0
        stored = context + part.start + part.rows  # nothing of later levels is there
        kv[slots_of(batch, len(parts) - 1, stored)] = entries[:stored]
        rows = q[part.start : part.start + part.rows]
        if beside:
            rows = torch.cat((q[:2], rows))
        out = native(threads).run(rows, (kv,), batch, num_kv_heads=kv_heads, scale=0.2, window=window)
        return out[-part.rows :]

    whole = run(Part(context, count, parents, first=first), beside=False, threads=1)
    assert not whole.isnan().any()
    for borders in ((0, 1, 3, 7, 8, 9, 40, count), (0, 8, count), (0, *range(1, count + 1))):
        for i, (start, end) in enumerate(pairwise(borders)):
            part = Part(context, end - start, parents, start=start, first=first)
            out = run(part, beside=bool(i % 2), threads=1 + 2 * (i % 3 == 0))
            assert torch.equal(out, whole[start:end]), (start, end)


def test_one_request_split_over_threads_has_the_same_bits() -> None:
    """A lone long request with one key/value head is cut along its keys where there are threads."""
    batch, slots = make_batch([Part(5000, 1)])
    q, kv = random(1, 4, 64), random(slots, 2, 64, seed=1)
    alone = native(1).run(q, (kv,), batch, num_kv_heads=1, scale=0.125)
    for threads in (2, 3, 8):
        out = native(threads).run(q, (kv,), batch, num_kv_heads=1, scale=0.125)
        assert torch.equal(out, alone), threads


def test_strided_queries() -> None:
    """Queries stand in the packed rows of q, k and v."""
    batch, slots = make_batch([Part(20, 5)])
    packed, kv = random(5, 8, 16), random(slots, 4, 16, seed=1)
    got = native().run(packed.narrow(1, 0, 4), (kv,), batch, num_kv_heads=2, scale=0.25)
    want = native().run(packed.narrow(1, 0, 4).contiguous(), (kv,), batch, num_kv_heads=2, scale=0.25)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("isa", "part", "window"),
    [  # every two values of any two kinds together; --all: every three
        pytest.param(
            isa, part, window, id=f"{isa.name.lower()}-{part}-{window}",
            marks=[] if (h + i + j) % 2 else pytest.mark.slow,
        )
        for h, isa in enumerate(Isa)
        for i, part in enumerate([Part(5000, 5), Part(4990, 9, TREE), Part(700, 9, TREE), Part(4500, 300)])
        for j, window in enumerate([None, 1300])
    ],
    indirect=["isa"],
)  # fmt: skip
def test_cut_along_the_context_has_the_same_bits(part: Part, window: int | None) -> None:
    """Chains, trees and chunks, for numbers of threads that cut at different partitions."""
    batch, slots = make_batch([part])
    q = random(part.rows, 4, 32, dtype=torch.bfloat16)
    kv = random(slots, 4, 32, dtype=torch.bfloat16, seed=1)
    alone = native(1).run(q, (kv,), batch, num_kv_heads=2, scale=0.2, window=window)
    for threads in (2, 3, 8):
        out = native(threads).run(q, (kv,), batch, num_kv_heads=2, scale=0.2, window=window)
        assert torch.equal(out, alone), threads
    want = ReferenceAttention().run(q.float(), (kv.float(),), batch, num_kv_heads=2, scale=0.2, window=window)
    torch.testing.assert_close(alone.float(), want, rtol=2**-7, atol=1e-5)


def test_rows_have_their_bits_wherever_their_tile_begins() -> None:
    """In a window, a row's first partition is not its neighbours': alone, in pairs, and in a chunk."""
    length, window = 3000, 700
    q, entries = random(length, 4, 32), random(length, 4, 32, seed=1)

    def run(start: int, rows: int) -> Tensor:
        batch, slots = make_batch([Part(start, rows)], seed=rows)
        kv = torch.full((slots, 4, 32), float("nan"))
        kv[slots_of(batch, 0, start + rows)] = entries[: start + rows]
        return native(3).run(q[start : start + rows], (kv,), batch, num_kv_heads=2, scale=0.2, window=window)

    whole = run(0, length)
    for start in (0, 698, 955, 1466, 1723, 2490, 2747):
        for rows in (1, 2, 7, 40):
            assert torch.equal(run(start, rows), whole[start : start + rows]), (start, rows)

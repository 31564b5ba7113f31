"""Rows that see all rows of their request, those behind them, too: torch against the definition, native against torch,
and the same bits in any batch and on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.fakes.attention_batches import Part, make_batch, slots_of
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.attention.whole import attend_whole
from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kv.storage import quantized
from draftwise.types import AttentionBatch

PARTS = [Part(0, 7), Part(1, 1), Part(15, 16), Part(40, 8, first=3), Part(250, 16), Part(600, 40, first=30)]
SHAPES = [(4, 2, 64), (6, 2, 12), (8, 1, 128), (3, 3, 2)]  # Hq, Hkv, D


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def native(threads: int = 2) -> NativeAttention:
    return NativeAttention(native_or_skip(), ThreadPool(native_or_skip(), threads))


def setting(
    shape: tuple[int, int, int], dtype: torch.dtype, parts: list[Part] = PARTS
) -> tuple[Tensor, Tensor, AttentionBatch]:
    heads, kv_heads, dim = shape
    batch, slots = make_batch(parts)
    q = random(int(batch.query_start_np[-1]), heads, dim, dtype=dtype)
    kv = torch.full((slots, 2 * kv_heads, dim), float("nan"), dtype=dtype)  # what nobody sees must not matter
    for r, part in enumerate(parts):
        n = part.context + part.rows
        kv[slots_of(batch, r, n)] = random(n, 2 * kv_heads, dim, dtype=dtype, seed=r + 1)
        kv[slots_of(batch, r, part.first)] = float("nan")
    return q, kv, batch


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_torch_is_what_the_definition_says(window: int | None, softcap: float | None) -> None:
    q, kv, batch = setting((4, 2, 8), torch.float32)
    sinks = random(4, seed=99)
    got = attend_whole(
        q, (kv,), batch, num_kv_heads=2, scale=0.4, window=window, softcap=softcap, sinks=sinks
    )
    row = 0
    for r, part in enumerate(PARTS):
        keys = kv[slots_of(batch, r, part.context + part.rows)]
        for i in range(part.rows):
            place = part.context + i
            seen = keys[
                [
                    p
                    for p in range(part.first, part.context + part.rows)
                    if window is None or place - p < window
                ]
            ]
            for h in range(4):
                scores = (q[row, h] * seen[:, h // 2]).sum(-1) * 0.4
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.cat((scores, sinks[h : h + 1])).softmax(0)
                want = (weights[:-1, None] * seen[:, 2 + h // 2]).sum(0)  # the last one is the sink's
                torch.testing.assert_close(got[row, 8 * h : 8 * h + 8], want, rtol=1e-4, atol=1e-5)
            row += 1


@pytest.mark.parametrize("isa", list(Isa), ids=lambda isa: isa.name.lower(), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 7, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_equals_torch(
    shape: tuple[int, int, int], window: int | None, dtype: torch.dtype, isa: Isa
) -> None:
    q, kv, batch = setting(shape, dtype)
    options = {"num_kv_heads": shape[1], "scale": 0.3, "window": window}
    got = native().run(q, (kv,), batch, **options, whole=True)
    want = attend_whole(q.float(), (kv.float(),), batch, **options)
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6)
    else:
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-5)


def test_a_cache_of_codes() -> None:
    q, kv, batch = setting((4, 2, 64), torch.float32)
    parts = quantized(kv.nan_to_num(0.0))
    got = native().run(q, parts, batch, num_kv_heads=2, scale=0.3, whole=True)
    want = attend_whole(q, parts, batch, num_kv_heads=2, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isa", list(Isa), ids=lambda isa: isa.name.lower(), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_same_bits_alone_and_on_threads(dtype: torch.dtype, isa: Isa) -> None:
    q, kv, batch = setting((4, 2, 64), dtype)
    together = native(3).run(q, (kv,), batch, num_kv_heads=2, scale=0.3, window=40, whole=True)
    for r in range(len(PARTS)):
        start, end = batch.query_start_np[r], batch.query_start_np[r + 1]
        alone = replace(
            batch,
            query_start_np=batch.query_start_np[r : r + 2] - start,
            context_len_np=batch.context_len_np[r : r + 1],
            is_tree_np=batch.is_tree_np[r : r + 1],
            block_tables_np=batch.block_tables_np[r : r + 1].copy(),
            first_key_np=None if batch.first_key_np is None else batch.first_key_np[r : r + 1],
            tree_start_np=None,
            cache={},
        )
        own = native(1).run(q[start:end], (kv,), alone, num_kv_heads=2, scale=0.3, window=40, whole=True)
        assert torch.equal(own, together[start:end])


def test_rows_behind_are_seen() -> None:
    """The control: a causal pass gives other numbers for every row but the last."""
    q, kv, batch = setting((4, 2, 64), torch.float32, [Part(20, 8)])
    whole = native().run(q, (kv,), batch, num_kv_heads=2, scale=0.3, whole=True)
    causal = native().run(q, (kv,), batch, num_kv_heads=2, scale=0.3)
    assert torch.equal(whole[-1], causal[-1])
    assert all(not torch.allclose(a, b) for a, b in zip(whole[:-1], causal[:-1], strict=True))

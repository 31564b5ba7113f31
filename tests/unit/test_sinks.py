"""Attention sinks: a score of one key more for each head, whose value is zero, on every backend."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from tests.fakes.attention_batches import Part, make_batch, slots_of
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.attention.base import AttentionBackend
from draftwise.attention.reference import ReferenceAttention
from draftwise.attention.torch_grouped import TorchGroupedAttention
from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.pool import ThreadPool

TREE = (-1, -1, 0, 0, 1, 4, -1, 5)
PARTS = [
    Part(0, 1),
    Part(15, 1),
    Part(17, 9, TREE),
    Part(300, 40),
    Part(700, 9, TREE, first=613),
    Part(1030, 1),
]
HEADS, KV_HEADS, DIM = 6, 2, 12
SINKS = torch.tensor([0.3, -4.0, 9.0, 120.0, -300.0, 1.5])


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def native(request: pytest.FixtureRequest) -> Iterator[NativeAttention]:
    with forced_isa(request.param):
        yield NativeAttention(native_or_skip(), ThreadPool(native_or_skip(), 2))


def run(
    backend: AttentionBackend,
    sinks: Tensor | None,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[T, Hq, D] float32."""
    batch, slots = make_batch(PARTS)
    rows = int(batch.query_start_np[-1])
    generator = torch.Generator().manual_seed(1)
    kv = torch.full((slots, 2 * KV_HEADS, DIM), torch.nan, dtype=dtype)
    for r, part in enumerate(PARTS):
        own = slots_of(batch, r, part.context + part.rows)
        kv[own] = torch.randn(len(own), 2 * KV_HEADS, DIM, generator=generator).to(dtype)
    q = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    found = backend.run(q, (kv,), batch, num_kv_heads=KV_HEADS, scale=0.6, window=window, sinks=sinks)
    return found.view(rows, HEADS, DIM).float()


def test_the_reference_by_hand() -> None:
    """The first request sees its own key alone: its value times exp(score) / (exp(score) + exp(sink))."""
    plain, found = run(ReferenceAttention(), None), run(ReferenceAttention(), SINKS)
    batch, slots = make_batch(PARTS)
    generator = torch.Generator().manual_seed(1)
    kv = torch.zeros(slots, 2 * KV_HEADS, DIM)
    for r, part in enumerate(PARTS):
        own = slots_of(batch, r, part.context + part.rows)
        kv[own] = torch.randn(len(own), 2 * KV_HEADS, DIM, generator=generator)
    q = torch.randn(int(batch.query_start_np[-1]), HEADS, DIM, generator=generator)
    (slot,) = slots_of(batch, 0, 1)
    for h in range(HEADS):
        score = 0.6 * float(q[0, h] @ kv[slot, h // 3])
        share = 1 / (1 + math.exp(min(float(SINKS[h]) - score, 700.0)))
        torch.testing.assert_close(found[0, h], plain[0, h] * share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7, 300])
def test_native(native: NativeAttention, window: int | None) -> None:
    wanted = run(ReferenceAttention(), SINKS, window)
    torch.testing.assert_close(run(native, SINKS, window), wanted, rtol=1e-4, atol=1e-5)
    narrow = run(native, SINKS, window, torch.bfloat16)
    torch.testing.assert_close(
        narrow, run(ReferenceAttention(), SINKS, window, torch.bfloat16), rtol=0.05, atol=0.02
    )
    none = run(native, torch.full((HEADS,), -1e30), window)
    assert torch.equal(none, run(native, None, window)), "a sink far below every score changes no bit"
    assert bool((run(native, torch.full((HEADS,), 1e30), window) == 0).all()), (
        "one far above takes everything"
    )


@pytest.mark.parametrize("window", [None, 7])
def test_plain_torch(window: int | None) -> None:
    wanted = run(ReferenceAttention(), SINKS, window)
    torch.testing.assert_close(run(TorchGroupedAttention(), SINKS, window), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_triton(window: int | None) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    from tests.unit.test_triton_attention import DEVICE, SMALL

    from draftwise.kernels.triton.attention import TritonAttention

    if DEVICE.type != "cpu":
        pytest.skip("for the interpreter")
    wanted = run(ReferenceAttention(), SINKS, window)
    torch.testing.assert_close(
        run(TritonAttention(SMALL, 1 << 20), SINKS, window), wanted, rtol=1e-4, atol=1e-5
    )


def test_sinks_that_do_not_fit_are_refused() -> None:
    backend = NativeAttention(native_or_skip(), ThreadPool(native_or_skip(), 1))
    for bad in (SINKS[:5], SINKS.bfloat16(), torch.zeros(12)[::2]):
        with pytest.raises(ValueError, match="sinks"):
            run(backend, bad)

"""Chunks of prompts by flash attention, beside rows of every other kind. Flash attention itself is plain torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.flash import flash_forward
from tests.unit.test_attention_torch import make_batch
from tests.unit.test_triton_attention import DEVICE, SMALL, TWICE, filled_cache

from draftwise.attention.reference import ReferenceAttention
from draftwise.kernels.triton import prompts
from draftwise.kernels.triton.attention import TritonAttention
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.ops import TritonOps
from draftwise.kernels.triton.tiling import Tiling
from draftwise.types import AttentionBatch

pytestmark = pytest.mark.skipif(not interpreted(), reason="a device has the true one: tests/gpu")
Kinds = list[tuple[int, int, bool]]
"""Of each request: context, rows, whether it is a tree."""
MIXED: Kinds = [
    (33, 1, False),
    (9, 8, False),
    (0, 20, False),
    (40, 9, True),
    (31, 7, False),
    (50, 8, False),
    (3, 2, False),
]
"""With eight rows or more chunks of prompts: 1 and 2, one behind the other, and 5."""


class Calls:
    """What flash attention was asked for: (sequences, rows, keys)."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        self.seen.append((len(args[3]) - 1, len(args[0]), len(args[1])))
        return flash_forward(*args, **named)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr(prompts, "has_flash", lambda device: True)
    monkeypatch.setattr(prompts, "flash", made)
    yield made


def check(
    batch: AttentionBatch,
    slots: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float16,
    backend: TritonAttention | None = None,
    tiling: Tiling = SMALL,
    window: int | None = None,
    **options: Any,
) -> None:
    """The rows have the results of the reference, whoever computes them."""
    kv = filled_cache(batch, slots, kv_heads, dim, dtype).to(DEVICE)
    rows = int(batch.query_start_np[-1])
    packed = torch.randn((rows, heads + 2 * kv_heads, dim), generator=torch.Generator().manual_seed(1))
    q = packed.to(DEVICE, dtype)[:, :heads]  # strided, as the packed q/k/v buffer gives it
    named = {"num_kv_heads": kv_heads, "scale": dim**-0.5, "window": window, **options}
    expected = ReferenceAttention().run(q, (kv,), batch, **named)
    out = torch.full_like(expected, float("nan"))
    backend = backend or TritonAttention(tiling, prompt_rows=8)
    assert backend.run(q, (kv,), batch, **named, out=out) is out
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_chunks_beside_others(calls: Calls, dtype: torch.dtype, window: int | None) -> None:
    batch, slots = make_batch(np.random.default_rng(3), MIXED, gaps=True, levels=True)
    check(batch, slots, dtype=dtype, window=window)
    assert [seen[:2] for seen in calls.seen] == [(2, 28), (1, 8)]


def test_keys_that_a_window_hides_are_not_gathered(calls: Calls) -> None:
    batch, slots = make_batch(np.random.default_rng(3), [(100, 10, False)])
    check(batch, slots, window=6)
    check(batch, slots)
    assert calls.seen == [(1, 10, 15), (1, 10, 110)]


def test_nothing_but_chunks(calls: Calls) -> None:
    batch, slots = make_batch(np.random.default_rng(3), [(0, 8, False), (70, 12, False)])
    check(batch, slots, tiling=TWICE)
    assert calls.seen == [(2, 20, 90)]


def test_layers_share_what_a_pass_prepares(calls: Calls) -> None:
    batch, slots = make_batch(np.random.default_rng(3), [(5, 9, False), (20, 1, False)])
    backend = TritonAttention(SMALL, prompt_rows=8)
    for window in (None, 12, None, 12):
        check(batch, slots, backend=backend, window=window)
    assert sorted(name for name in batch.cache if name.startswith("prompts")) == [
        "prompts/12",
        "prompts/None",
    ]
    assert len(calls.seen) == 4


def test_many_long_contexts_are_not_gathered_at_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_GATHERED_KEYS", 60)
    batch, slots = make_batch(
        np.random.default_rng(3), [(20, 8, False), (10, 8, False), (90, 8, False), (4, 9, False)]
    )
    check(batch, slots)
    assert calls.seen == [(2, 16, 46), (1, 8, 98), (1, 9, 13)]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"softcap": 0.7}, "a soft cap"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"dtype": torch.float32}, "float32"),
        ({"dim": 20}, "a head that is no multiple of 8"),
        ({"backend": TritonAttention(SMALL)}, "a promise of equal bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_flash_attention_does_not_serve(calls: Calls, named: dict[str, Any], why: str) -> None:
    batch, slots = make_batch(np.random.default_rng(3), MIXED)
    check(batch, slots, **named)
    assert not calls.seen


def test_who_asks_for_it() -> None:
    """Not where a row's bits may not depend on the batch, nor where it is wrong on this machine."""

    def wanted(**options: Any) -> bool:
        backend = TritonOps(torch.float32, DEVICE, **options)._attention
        assert isinstance(backend, TritonAttention)
        return backend._prompt_rows is not None

    assert wanted(batch_invariant=False)
    assert not wanted(batch_invariant=True)
    assert not wanted(batch_invariant=False, replaced=frozenset({"prompts"}))


def test_no_device_no_flash_attention() -> None:
    assert not prompts.has_flash(torch.device("cpu"))

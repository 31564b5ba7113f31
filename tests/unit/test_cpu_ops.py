"""Native row operations: against plain torch, and bit for bit against themselves for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.kernels.base import FUNCTIONS, HeadShape
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.handles import Linear, Norm
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVLayerSpec, KVStorage, dequantized
from draftwise.types import AttentionBatch

CPU = torch.device("cpu")
WIDTHS = [1, 7, 16, 48, 256, 1030]
ROWS = [1, 2, 3, 5, 8, 17, 64, 512]


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value


@pytest.fixture
def ops(dtype: torch.dtype) -> NativeOps:
    return NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 2), dtype)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """float32 to 1e-5; bfloat16 to one unit in the last place, which is where it was rounded."""
    assert got.dtype is dtype
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (2**-7, 1e-3)
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)


def same_for_any_rows(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Rows of one large call equal those of calls with fewer rows, bit for bit."""
    whole = run(x.clone())
    for rows in ROWS:
        for start in (0, x.shape[0] - rows):
            part = run(x[start : start + rows].clone())
            assert torch.equal(part, whole[start : start + rows]), f"{rows} rows from {start}"


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(ops: NativeOps, dtype: torch.dtype, width: int) -> None:
    x, weight = random(512, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    norm = ops.pack_norm(weight, 1e-5)
    wide = x.float()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.float()
    close(ops.rms_norm(x, norm), want, dtype)
    same_for_any_rows(lambda rows: ops.rms_norm(rows, norm), x)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(ops: NativeOps, dtype: torch.dtype, width: int) -> None:
    x, residual = random(512, width, dtype=dtype), random(512, width, dtype=dtype, seed=2)
    norm = ops.pack_norm(random(width, dtype=dtype, seed=1), 1e-6)
    total = residual.clone()
    got = ops.add_rms_norm(x, total, norm)
    assert torch.equal(total, residual + x), "the sum is rounded to the dtype, as torch does"
    assert torch.equal(got, ops.rms_norm(total, norm)), "the norm is of the sum as it was stored"


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(ops: NativeOps, dtype: torch.dtype, width: int) -> None:
    x = random(512, 2 * width, dtype=dtype) * 4
    gate, up = x.float().chunk(2, dim=1)
    close(ops.silu_mul(x.clone()), torch.nn.functional.silu(gate) * up, dtype)
    same_for_any_rows(ops.silu_mul, x)


def test_silu_far_out(ops: NativeOps, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]]).to(dtype)
    got = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))
    close(got, torch.nn.functional.silu(gate.float()), dtype)


def test_embedding_and_copy(ops: NativeOps, dtype: torch.dtype) -> None:
    table = random(50, 37, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(ops.embedding(ids, table), table[ids])
    out = torch.empty(4, 37, dtype=dtype)
    assert ops.embedding(ids, table, out=out) is out
    assert torch.equal(ops.copy(out), table[ids])


@pytest.mark.parametrize("dim", [2, 12, 16, 64, 80, 128])
@pytest.mark.parametrize("norms", [False, True])
def test_qkv_rope_write(ops: NativeOps, dtype: torch.dtype, dim: int, norms: bool) -> None:
    heads = HeadShape(6, 2, dim)
    rows, slots = 40, torch.randperm(90, generator=torch.Generator().manual_seed(3))[:40]
    positions = torch.arange(100, 100 + rows)
    inv_freq = 1.0 / 100 ** (torch.arange(0, dim, 2).float() / dim)
    qkv = random(rows, 10 * dim, dtype=dtype)
    weights = [random(dim, dtype=dtype, seed=i) for i in (4, 5)]
    results = []
    # the oracle is float32 throughout: torch in bfloat16 rounds cosines, sines and every product
    plain = TorchOps(torch.float32, CPU)
    for which, x in ((ops, qkv.clone()), (plain, qkv.float().clone())):
        entries = torch.zeros(90, 4, dim, dtype=x.dtype)
        rotations = which.rope_rows(which.pack_rope(inv_freq, 1.25, 200), positions)
        packed: list[Norm | None] = [which.pack_norm(w.to(x.dtype), 1e-5) if norms else None for w in weights]
        q = which.qkv_rope_write(x, heads, rotations, (entries,), slots, packed[0], packed[1])
        results.append((q.clone(), entries))
    (q, entries), (want_q, want_entries) = results
    # after a norm the head is rounded once before it is rotated: two roundings
    tolerance = 1e-5 if dtype is torch.float32 else 2**-6
    torch.testing.assert_close(q.float(), want_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entries.float(), want_entries, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(90, dtype=torch.bool)
    untouched[slots] = False
    assert not entries[untouched].any()

    table = ops.pack_rope(inv_freq, 1.25, 200)
    norm = ops.pack_norm(weights[0], 1e-5) if norms else None
    other = ops.pack_norm(weights[1], 1e-5) if norms else None
    for r in (0, 7, rows - 1):  # a row alone
        single = torch.zeros(90, 4, dim, dtype=dtype)
        rotation = ops.rope_rows(table, positions[r : r + 1])
        mine = ops.qkv_rope_write(
            qkv[r : r + 1].clone(), heads, rotation, (single,), slots[r : r + 1], norm, other
        )
        assert torch.equal(mine[0], q[r])
        assert torch.equal(single[slots[r]], entries[slots[r]])


@pytest.mark.parametrize(
    "cache", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("dim", [12, 64])
def test_entries_are_rounded_to_the_caches_type(
    ops: NativeOps, dtype: torch.dtype, cache: torch.dtype, dim: int
) -> None:
    """With rotations by nothing, keys and values are what was given: subnormal, huge and zero rows included."""
    heads, rows = HeadShape(3, 2, dim), 40
    qkv = random(rows, 7 * dim, dtype=dtype) * torch.logspace(-9, 6, rows)[:, None].to(dtype)
    qkv[5] = 0.0
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:rows]
    storage = KVStorage((KVLayerSpec.dense(2, dim),), 90, 1, cache, CPU)
    other = KVStorage((KVLayerSpec.dense(2, dim),), 90, 1, cache, CPU)
    plain = TorchOps(dtype, CPU)
    for which, kv in ((ops, storage.layer(0)), (plain, other.layer(0))):
        table = which.pack_rope(torch.zeros(dim // 2), 1.0, 2)
        rotations = which.rope_rows(table, torch.zeros(rows, dtype=torch.int64))
        which.qkv_rope_write(qkv.clone(), heads, rotations, kv, slots)
    for got, want in zip(storage.layer(0), other.layer(0), strict=True):
        if got.dtype is torch.int8:  # at a tie a factor that differs in the last bit decides otherwise
            assert int((got.int() - want.int()).abs().max()) <= 1
            assert float((got != want).float().mean()) < 1e-3
        elif got.dtype is torch.float8_e4m3fn:  # codes of one sign are in order
            ours, theirs = got.view(torch.uint8).int(), want.view(torch.uint8).int()
            assert int((ours - theirs).abs().max()) <= 1
            assert float((ours != theirs).float().mean()) < 1e-3
        else:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    if cache is torch.float16:
        entries = dequantized(storage.layer(0), torch.float32)[slots]
        given = qkv[:, 3 * dim :].float().view(rows, 4, dim).clamp(-65504, 65504)
        torch.testing.assert_close(entries, given, rtol=2**-11, atol=2**-25)
    rotation = ops.rope_rows(ops.pack_rope(torch.zeros(dim // 2), 1.0, 2), torch.zeros(1, dtype=torch.int64))
    for r in (0, 5, rows - 1):  # a row alone
        single = KVStorage((KVLayerSpec.dense(2, dim),), 90, 1, cache, CPU)
        ops.qkv_rope_write(qkv[r : r + 1].clone(), heads, rotation, single.layer(0), slots[r : r + 1])
        for mine, all_rows in zip(single.layer(0), storage.layer(0), strict=True):
            assert torch.equal(mine[slots[r]], all_rows[slots[r]])


def test_every_float16_is_read_and_written_exactly(ops: NativeOps, dtype: torch.dtype) -> None:
    """All finite ones through a cache: stored as they are, and read back as attention's only value."""
    if dtype is torch.bfloat16:
        pytest.skip("bfloat16 rows do not hold every float16")
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()]
    halves = halves[: len(halves) // 64 * 64].view(-1, 1, 64)  # values of one head
    rows = len(halves)
    qkv = torch.cat((torch.zeros(rows, 2, 64), halves.float()), 1).view(rows, 192)
    storage = KVStorage((KVLayerSpec.dense(1, 64),), rows, 1, torch.float16, CPU)
    heads, slots = HeadShape(1, 1, 64), torch.arange(rows)
    rotations = ops.rope_rows(ops.pack_rope(torch.zeros(32), 1.0, 2), torch.zeros(rows, dtype=torch.int64))
    q = ops.qkv_rope_write(qkv, heads, rotations, storage.layer(0), slots)
    stored = storage.layer(0)[0][:, 1:].contiguous()
    assert torch.equal(stored.view(torch.int16), halves.contiguous().view(torch.int16))
    batch = AttentionBatch(
        query_start_np=np.arange(rows + 1, dtype=np.int32),
        context_len_np=np.zeros(rows, np.int32),
        is_tree_np=np.zeros(rows, np.bool_),
        block_tables_np=np.arange(rows, dtype=np.int32)[:, None],
        ancestors_np=None,
        block_size=1,
    )
    out = ops.attention(q, storage.layer(0), batch, heads, 1.0)
    assert torch.equal(out, halves.float().view(rows, 64))


def test_linear_and_logits(ops: NativeOps, dtype: torch.dtype) -> None:
    weight, bias = random(70, 33, dtype=dtype), random(70, dtype=dtype, seed=1)
    x = random(9, 33, dtype=dtype, seed=2)
    packed: Linear = ops.pack_linear(weight, bias)
    want = x.float() @ weight.float().T + bias.float()
    close(ops.linear(x, packed), want, dtype)
    logits = ops.logits(x, packed)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
def test_rows_side_by_side_through_a_layer(ops: NativeOps, dtype: torch.dtype, normed: bool) -> None:
    """`Ops.join_layers` is `linear` of the rows side by side, then the norm, bit for bit."""
    layer = ops.pack_linear(random(24, 3 * 40, dtype=dtype, seed=1))
    norm = ops.pack_norm(random(24, dtype=dtype, seed=2), 1e-5) if normed else None
    for rows in (1, 3, 70):
        parts = [random(rows + 2, 40, dtype=dtype, seed=i)[1 : rows + 1] for i in range(3)]
        want = ops.linear(torch.cat(parts, -1), layer)
        assert torch.equal(
            ops.join_layers(parts, layer, norm), want if norm is None else ops.rms_norm(want, norm)
        )
    with pytest.raises(ValueError, match="do not fit"):
        ops.join_layers(parts[:2], layer, norm)
    with pytest.raises(ValueError, match="side by side"):
        ops.join_layers([part.T.contiguous().T for part in parts], layer, norm)


def test_no_rows(ops: NativeOps, dtype: torch.dtype) -> None:
    empty = torch.empty(0, 16, dtype=dtype)
    norm = ops.pack_norm(torch.ones(16, dtype=dtype), 1e-5)
    assert ops.rms_norm(empty, norm).shape == (0, 16)
    assert ops.silu_mul(empty).shape == (0, 8)
    assert ops.embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 4, dtype=dtype)).shape == (0, 4)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(ops: NativeOps, dtype: torch.dtype, width: int, bias: bool) -> None:
    x = random(512, width, dtype=dtype) * 3 + 1
    weight, offset = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2) if bias else None
    norm = ops.pack_layer_norm(weight, offset, 1e-3)
    plain = TorchOps(dtype, CPU)
    close(ops.layer_norm(x, norm), plain.layer_norm(x, plain.pack_layer_norm(weight, offset, 1e-3)), dtype)
    same_for_any_rows(lambda rows: ops.layer_norm(rows, norm), x)


@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_functions(ops: NativeOps, dtype: torch.dtype, function: str) -> None:
    x = torch.linspace(-9, 9, 512 * 37).view(512, 37).to(dtype)
    close(ops.unary(x, function), TorchOps(dtype, CPU).unary(x, function), dtype)
    same_for_any_rows(lambda rows: ops.unary(rows, function), x)


@pytest.mark.parametrize("width", WIDTHS)
def test_products_number_by_number(ops: NativeOps, dtype: torch.dtype, width: int) -> None:
    x, y = random(512, width, dtype=dtype), random(512, width, dtype=dtype, seed=1)
    close(ops.mul(x, y), x * y, dtype)
    assert torch.equal(ops.mul(x[7:8], y[7:8])[0], ops.mul(x, y)[7])

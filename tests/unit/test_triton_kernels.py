"""Triton's row kernels and linear layers, in the interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise.kernels.base import HeadShape
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kernels.triton import linear as products
from draftwise.kernels.triton import rows
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.linear import (
    LinearTiling,
    TritonLinear,
    linear,
    narrow,
    pack_pairs,
    pack_quantized,
)
from draftwise.kernels.triton.ops import TritonOps
from draftwise.kernels.walk import Walk
from draftwise.kv.storage import LARGEST, KVLayerSpec, KVStorage
from draftwise.quantization.weights import E2M1, FP8, NF4, QuantizedWeight

DEVICE = torch.device("cpu" if interpreted() else "cuda")
TILING = LinearTiling(16, 16, 32)
SPLIT = LinearTiling(16, 16, 32, programs=3)
"""Cuts k into parts, of at least eight blocks each."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    limit = LIMITS[actual.dtype] * factor
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 20, 64])
def test_norms(dtype: torch.dtype, size: int) -> None:
    reference, ops = TorchOps(dtype, DEVICE), TritonOps(dtype, DEVICE)
    x, residual, weight = (
        random(3, size, dtype=dtype),
        random(3, size, dtype=dtype, seed=1),
        random(size, seed=2),
    )
    weight = weight.to(dtype)
    close(
        ops.rms_norm(x, ops.pack_norm(weight, 1e-5)), reference.rms_norm(x, reference.pack_norm(weight, 1e-5))
    )
    sums = residual.clone(), residual.clone()
    actual = ops.add_rms_norm(x, sums[0], ops.pack_norm(weight, 1e-5))
    expected = reference.add_rms_norm(x, sums[1], reference.pack_norm(weight, 1e-5))
    close(actual, expected)
    close(sums[0], sums[1])  # the interpreter does not round to bfloat16 as devices do
    assert ops.rms_norm(x[:0], ops.pack_norm(weight, 1e-5)).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 1030])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = random(2, 2 * size, dtype=dtype) * 3
    gate_up[0, :2] = torch.tensor([-95.0, 95.0])
    expected = torch.nn.functional.silu(gate_up[:, :size].float()) * gate_up[:, size:].float()
    close(rows.silu_mul(gate_up), expected)
    assert rows.silu_mul(gate_up[:0]).shape == (0, size)


def test_gather() -> None:
    table, index = random(7, 3, 5), torch.tensor([6, 0, 6], device=DEVICE)
    assert torch.equal(rows.gather_rows(table, index), table[index])
    assert rows.gather_rows(table, index[:0]).shape == (0, 3, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", [None, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("num_q", [3, 0])
def test_rope_and_kv_write(dtype: torch.dtype, cache: torch.dtype | None, norms: bool, num_q: int) -> None:
    """No query heads: keys and values alone, as block drafters store features."""
    heads, count, dim = HeadShape(num_q, 2, 12), 3, 12
    qkv = random(count, (num_q + 4) * dim, dtype=dtype)
    positions = torch.tensor([0, 9, 4], device=DEVICE)
    slots = torch.tensor([8, 2, 5], device=DEVICE)
    inv_freq = 100.0 ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    weights = random(dim, seed=3).to(dtype), random(dim, seed=4).to(dtype)
    stored, queries = [], []
    for ops in (TritonOps(dtype, DEVICE), TorchOps(torch.float32, DEVICE)):
        storage = KVStorage([KVLayerSpec.dense(2, dim)], 1, 10, cache or ops.dtype, DEVICE)
        rope = ops.rope_rows(ops.pack_rope(inv_freq, 1.0, 10), positions)
        q_norm, k_norm = [ops.pack_norm(w.to(ops.dtype), 1e-5) if norms else None for w in weights]
        kv = storage.layer(0)
        queries.append(ops.qkv_rope_write(qkv.clone().to(ops.dtype), heads, rope, kv, slots, q_norm, k_norm))
        entries = kv[0].float() * kv[1][..., None] if len(kv) == 2 else kv[0].float()
        stored.append(entries)
    close(queries[0], queries[1])
    limit = 0.02 if cache in LARGEST else max(LIMITS[dtype], 1e-3 if cache else 0)
    if cache is torch.float8_e4m3fn:  # where a number lies half between two codes, the other one may be taken
        far = (stored[0] - stored[1]).abs() > limit * stored[1].abs() + 1e-6
        assert float(far.float().mean()) < 0.01
        limit = 1 / 8
    torch.testing.assert_close(stored[0], stored[1], atol=2 * limit, rtol=limit)


def test_a_float16_cache_holds_its_largest_number_instead_of_infinity() -> None:
    ops = TritonOps(torch.float32, DEVICE)
    kv = torch.zeros((1, 2, 4), dtype=torch.float16, device=DEVICE)
    rope = ops.rope_rows(
        ops.pack_rope(torch.ones(2), 1.0, 1), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    )
    qkv = torch.full((1, 12), -1e6, device=DEVICE)
    ops.qkv_rope_write(qkv, HeadShape(1, 1, 4), rope, (kv,), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert (kv == -65504).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_paths_are_compacted_as_by_moves(dtype: torch.dtype) -> None:
    pool = (random(2, 40, 3, 5) * 50).to(dtype)
    slots = torch.tensor([39, 3, 9, 1, 7, 30, 11, 12, 13, 14, 15, 38, 20, 21], device=DEVICE)
    roots = torch.tensor([1, 6, 12], device=DEVICE)
    # length, path, tokens of each request
    packed = [[2, 1, 3, 9, 9] + [0] * 5, [4, 0, 1, 2, 3] + [0] * 5, [0, 9, 9, 9, 9] + [0] * 5]
    walk = Walk(torch.tensor(packed, dtype=torch.int32, device=DEVICE), 4)
    expected = pool.clone()
    expected[:, [9, 1]] = pool[:, [1, 30]]
    rows.compact_paths(pool, slots, roots, walk)
    assert torch.equal(pool, expected)
    rows.compact_paths(pool, slots, roots[:0], Walk(walk.packed[:0], 4))
    assert torch.equal(pool, expected)


def integers(high: int, *shape: int, low: int = 0, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def layers(
    outputs: int, inputs: int, dtype: torch.dtype, tiling: LinearTiling = TILING
) -> list[tuple[TritonLinear, torch.Tensor]]:
    """Each format's layer and the float32 weight that it stands for."""
    dense = random(outputs, inputs, dtype=dtype, seed=1)
    made: list[tuple[TritonLinear, torch.Tensor]] = [(TritonLinear(dense, None, tiling), dense.float())]
    groups = -(-inputs // 32)
    codes8 = integers(128, outputs, inputs, low=-127).to(torch.int8)
    scales = random(outputs, groups, seed=5).cpu() * 0.1
    zeros = integers(16, outputs, groups, seed=7).to(torch.uint8)
    codes4 = integers(16, outputs, inputs, seed=6).to(torch.uint8)
    halves = -(-inputs // 16)
    sixteens = random(outputs, halves, seed=9).cpu() * 0.1
    zeros_of_sixteens = integers(16, outputs, halves, seed=7).to(torch.uint8)
    nf4 = tuple(torch.tensor(NF4).to(dtype).tolist())  # products take numbers of the rows' type
    fp8 = random(outputs, inputs, seed=10).cpu().to(FP8)
    for weight in (
        QuantizedWeight(8, codes8, scales[:, 0].abs().contiguous() * 0.01),
        QuantizedWeight(4, codes4, scales, None, 32),
        QuantizedWeight(4, codes4, scales, zeros, 32),
        QuantizedWeight(4, codes4, scales, None, 32, offsets=random(outputs, groups, seed=8).cpu()),
        QuantizedWeight(4, codes4, scales, None, 32, levels=nf4),
        QuantizedWeight(4, codes4, sixteens, None, 16, levels=E2M1),
        QuantizedWeight(4, codes4, sixteens, zeros_of_sixteens, 16),
        QuantizedWeight(4, codes4, sixteens, None, 16, offsets=random(outputs, halves, seed=8).cpu()),
        QuantizedWeight(8, codes8, scales * 0.1, None, 32),
        QuantizedWeight(8, codes8, sixteens * 0.1, None, 16),
        QuantizedWeight(8, fp8, scales, None, 32),
    ):
        made.append((pack_quantized(weight, None, tiling, DEVICE), weight.dequantize().to(DEVICE)))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (21, 70)])
def test_linear_formats(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x = random(3, inputs, dtype=dtype)
    for layer, weight in layers(outputs, inputs, dtype):
        expected = x.float() @ weight.T
        top = float(expected.abs().max())
        actual = linear(x, layer)
        assert actual.dtype is dtype and layer.num_bytes > 0
        torch.testing.assert_close(actual.float(), expected, atol=top * LIMITS[dtype], rtol=0)
        assert linear(x[:0], layer).shape == (0, outputs)
        wide = linear(x, layer, dtype=torch.float32)
        torch.testing.assert_close(wide, expected, atol=top * 1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (53, 70)])
def test_codes_are_widened_for_many_rows(
    dtype: torch.dtype, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some outputs at a time: of 53, 48 and 5, or fewer."""
    x, bias = random(7, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=11)
    for layer, weight in layers(outputs, inputs, dtype)[1:]:
        layer.bias = bias
        expected = torch.nn.functional.linear(x, weight.to(dtype), bias)
        top = float(expected.abs().max())
        for room in (1, 48 * inputs * dtype.itemsize):
            monkeypatch.setattr(products, "_WIDENED_BYTES", room)
            found = products.widened(x, layer, torch.empty_like(expected))
            torch.testing.assert_close(found, expected, atol=top * LIMITS[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype: torch.dtype) -> None:
    x = random(37, 70, dtype=dtype)
    for layer, _ in layers(21, 70, dtype):
        whole = linear(x, layer)
        for count in (1, 2, 8, 16, 17):
            assert torch.equal(linear(x[5 : 5 + count], layer), whole[5 : 5 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parts_of_k_have_the_same_bits_in_one_program_and_in_several(dtype: torch.dtype) -> None:
    """Up to 16 rows each part is a program of its own, more are summed in one."""
    x = random(17, 550, dtype=dtype)
    for layer, weight in layers(12, 550, dtype, SPLIT):
        # two parts: nine blocks of 32, then the rest; or three, of twelve blocks of 16 at most
        assert layer.part_inputs == (288 if layer.block_k == 32 else 192)
        whole = linear(x, layer)
        expected = x.float() @ weight.T
        top = float(expected.abs().max())
        torch.testing.assert_close(whole.float(), expected, atol=2 * top * LIMITS[dtype], rtol=0)
        for count in (1, 16):
            assert torch.equal(linear(x[1 : 1 + count], layer), whole[1 : 1 + count])


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_of_a_few_rows(dtype: torch.dtype, rows: int) -> None:
    """Rows that lie apart, outputs that are no whole block, results of the rows' type and of float32."""
    x = torch.randn((rows, 600), generator=torch.Generator().manual_seed(1)).to(dtype)[:, :512]
    weight = torch.randn((37, 512), generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = x.double() @ weight.double().T
    for kind in (dtype, torch.float32):
        out = torch.full((rows, 37), float("nan"), dtype=kind, device=DEVICE)
        found = narrow(x.to(DEVICE), weight.to(DEVICE), out)
        assert found is out
        apart = (found.cpu().double() - wanted).norm() / wanted.norm()
        assert apart < (1e-5 if kind is torch.float32 else 5e-3)


def test_parts_by_hand() -> None:
    tiling = LinearTiling()
    assert tiling.part_inputs(4096, 4096, 64) == 1024
    assert tiling.part_inputs(6144, 4096, 64) == 1408  # three parts of 22, 22 and 20 blocks
    assert tiling.part_inputs(128256, 4096, 64) == 4096
    assert tiling.part_inputs(64, 70, 64) == 128  # too short to be cut


def test_bias_and_strided_rows() -> None:
    weight, bias, x = random(9, 20, seed=1), random(9, seed=2), random(4, 30)[:, :20]
    close(linear(x, TritonLinear(weight, bias, TILING)), x @ weight.T + bias, 5.0)


def test_pairs_by_hand() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.uint8)
    assert pack_pairs(codes, 4).tolist() == [[0x31, 0x42, 0x05, 0x06]]


def test_groups_that_the_kernel_does_not_know_are_taken_as_floats() -> None:
    ops = TritonOps(torch.float32, DEVICE, tiling=TILING)
    weight = QuantizedWeight(4, integers(16, 8, 40).to(torch.uint8), torch.rand(8, 2) + 0.1, None, 20)
    layer: Any = ops.pack_quantized(weight, dynamic=False)
    assert layer.bits == 16
    x = random(2, 40)
    close(ops.linear(x, layer), x @ weight.dequantize().T.to(DEVICE), 20.0)

"""Floats of four bits, as GPT-OSS's experts and NVFP4 are stored: computed with as they are, on every level, over
rows as they are and over rows rounded to int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.linear import Epilogue, LinearKernels
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.quantized import QuantizedOps
from draftwise.quantization.fp4 import mxfp4_codes
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import E2M1, NF4, QuantizedWeight, quantize_rows, stack_rows

OVER = pytest.mark.parametrize("dynamic", [False, True], ids=["kept", "rounded"])


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


@pytest.fixture
def kernels(isa: Isa) -> LinearKernels:
    return LinearKernels(native_or_skip(), ThreadPool(native_or_skip(), 2))


def weight_of(outputs: int, blocks: int, low: int = 110, high: int = 130) -> QuantizedWeight:
    """Codes and powers of two by chance, as a checkpoint has them."""
    generator = torch.Generator().manual_seed(outputs + blocks)
    pairs = torch.randint(0, 256, (outputs, blocks, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(low, high, (outputs, blocks), generator=generator, dtype=torch.uint8)
    return mxfp4_codes(pairs, scales)


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)


def met(rows: Tensor, dynamic: bool) -> Tensor:
    """The rows that weights meet, float64."""
    if not dynamic:
        return rows.double()
    codes, scales = quantize_rows(rows)
    return codes.double() * scales.double()[:, None]


def test_codes_mean_what_the_standard_says() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)  # one block: every number twice
    blocks = (codes[0::2] | codes[1::2] << 4).view(1, 1, 16)
    for exponent in (127, 130, 120, 1):
        found = mxfp4_codes(blocks, torch.tensor([[exponent]], dtype=torch.uint8)).dequantize()
        assert torch.equal(found[0], torch.cat([values, -values]).repeat(2) * 2.0 ** (exponent - 127))
    example = torch.full((1, 1, 16), 0xB2, dtype=torch.uint8)
    found = mxfp4_codes(example, torch.tensor([[128]], dtype=torch.uint8)).dequantize()
    assert found[0, :2].tolist() == [2.0, -3.0]
    assert torch.equal(
        torch.tensor(E2M1).to(torch.bfloat16).float(), torch.tensor(E2M1)
    )  # nothing is rounded


def test_a_block_of_zeros_may_have_any_scale() -> None:
    blocks = torch.full((1, 2, 16), 0x22, dtype=torch.uint8)
    blocks[0, 1] = 0x80  # zeros of both signs
    weight = mxfp4_codes(blocks, torch.tensor([[127, 0]], dtype=torch.uint8))
    assert weight.is_exact_in_halves and not bool(weight.dequantize()[0, 32:].any())


@OVER
@pytest.mark.parametrize("group", [8, 16, 32, 64])
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 2), (33, 4), (64, 10), (100, 66)])
def test_products_are_those_of_the_numbers(
    kernels: LinearKernels, outputs: int, blocks: int, group: int, dynamic: bool
) -> None:
    codes = weight_of(outputs, blocks).codes
    scales = torch.rand(outputs, 32 * blocks // group, generator=torch.Generator().manual_seed(2)) + 0.5
    scales = scales.half().float()
    weight = QuantizedWeight(4, codes, scales, group=group, levels=E2M1)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(3))
    packed = kernels.pack_quantized(weight, bias, dynamic=dynamic)
    x = rows_of(19, 32 * blocks)
    wanted = met(x, dynamic) @ weight.dequantize().double().t() + bias.double()
    for rows in (1, 2, 7, 13, 19):
        found = kernels.run(x[:rows], packed, dtype=torch.float32).double()
        assert float((found - wanted[:rows]).norm() / wanted[:rows].norm()) < 1e-5, rows


@OVER
def test_a_number_alone_comes_out_as_it_is(kernels: LinearKernels, dynamic: bool) -> None:
    """Every code times every power of two that a layer may have beside its largest, exactly."""
    exponents = torch.arange(100, 134)
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = torch.zeros(len(exponents) * 16, 1, 16, dtype=torch.uint8)
    blocks[:, 0, 0] = codes.repeat(len(exponents))
    weight = mxfp4_codes(blocks, exponents.repeat_interleave(16)[:, None].to(torch.uint8))
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 127.0  # what rounded rows have a code for
    found = kernels.run(x, kernels.pack_quantized(weight, dynamic=dynamic), dtype=torch.float32)
    assert torch.equal(found[0], weight.dequantize()[:, 0] * 127)


@pytest.mark.parametrize("code", [7, 15])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_the_largest_products_fit(kernels: LinearKernels, code: int, group: int) -> None:
    """Six times 127, as often as a group has inputs, of one sign."""
    codes = torch.full((40, 256), code, dtype=torch.uint8)
    weight = QuantizedWeight(4, codes, torch.ones(40, 256 // group), group=group, levels=E2M1)
    packed = kernels.pack_quantized(weight, dynamic=True)
    x = torch.full((9, 256), 127.0, dtype=torch.bfloat16)
    x[1::2] *= -1
    found = kernels.run(x, packed, dtype=torch.float32)
    assert torch.equal(found, x.float() @ weight.dequantize().t())


@OVER
def test_the_same_bits_for_any_number_of_rows(kernels: LinearKernels, dynamic: bool) -> None:
    packed = kernels.pack_quantized(weight_of(65, 40), dynamic=dynamic)
    x = rows_of(70, 32 * 40)
    single = torch.cat([kernels.run(x[i : i + 1], packed) for i in range(len(x))])
    for rows in (2, 3, 8, 9, 17, 33, 64, 70):
        assert torch.equal(kernels.run(x[:rows], packed), single[:rows]), rows


@OVER
def test_gate_and_up(kernels: LinearKernels, dynamic: bool) -> None:
    weight = weight_of(90, 3)
    x = rows_of(5, 96)
    packed = kernels.pack_quantized(weight, dynamic=dynamic, paired=True)
    both = kernels.run(x, packed, dtype=torch.float32)
    assert torch.equal(
        both, kernels.run(x, kernels.pack_quantized(weight, dynamic=dynamic), dtype=torch.float32)
    )
    found = kernels.run(x, packed, epilogue=Epilogue.SILU_MUL, dtype=torch.float32)
    torch.testing.assert_close(found, torch.nn.functional.silu(both[:, :45]) * both[:, 45:])


def test_what_is_kept_and_what_becomes_floats() -> None:
    library = native_or_skip()
    pool = ThreadPool(library, 2)
    weight, numbers = weight_of(64, 4), 64 * 4 * 32
    kept = NativeOps(library, pool, torch.bfloat16).pack_quantized(weight, dynamic=False)
    assert kept.num_bytes < 0.75 * numbers
    dynamic = NativeOps(library, pool, torch.bfloat16).pack_quantized(weight, dynamic=True)
    assert dynamic.num_bytes == kept.num_bytes
    floats = NativeOps(library, pool, torch.float32)
    assert floats.pack_quantized(weight, dynamic=False).num_bytes >= 4 * numbers
    assert floats.pack_quantized(weight, dynamic=True).num_bytes == kept.num_bytes
    for name in ("int8", "int4", "int8_weight_only", "int4_weight_only"):
        asked = QuantizedOps(library, pool, torch.bfloat16, parse_scheme(name))
        assert asked.pack_quantized(weight, dynamic=False).num_bytes == kept.num_bytes
    far = weight_of(64, 4, 40, 160)  # powers of two that no float16 holds side by side
    assert not far.is_exact_in_halves
    ops = NativeOps(library, pool, torch.bfloat16)
    packed = ops.pack_quantized(far, dynamic=False)
    assert packed.num_bytes >= 2 * numbers
    x = rows_of(3, 128)
    wanted = x.double() @ far.dequantize().double().t()
    assert float((ops.linear(x, packed).double() - wanted).norm() / wanted.norm()) < 1e-2


def test_kernels_refuse_what_they_cannot() -> None:
    kernels = LinearKernels(native_or_skip(), ThreadPool(native_or_skip(), 1))
    weight = weight_of(32, 1)
    with pytest.raises(ValueError, match="floats of four bits"):
        kernels.pack_quantized(replace(weight, levels=NF4), dynamic=True)


def test_rows_in_another_order_and_side_by_side() -> None:
    weight = weight_of(6, 2)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    assert torch.equal(weight.in_order(order).dequantize(), weight.dequantize()[order])
    both = stack_rows([weight, weight.in_order(order)])
    assert both.levels == E2M1 and torch.equal(both.dequantize()[6:], weight.dequantize()[order])

"""Quantised linear layers: against a product of dequantised floats, and bit for bit in every shape of call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.kernels.cpu import linear as linear_module
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.linear import MOST_SUMMED, Epilogue, LinearKernels, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import QuantizedWeight, quantize, quantize_rows

NAMES = [
    "int8_weight_only", "int8_dynamic", "int4_weight_only_g32",
    "int4_weight_only", "int4_dynamic_g32", "int4_dynamic_g128"
]  # fmt: skip
SIZES = [(1, 1), (5, 3), (33, 34), (48, 255), (100, 1030), (64, 4100)]  # out, in


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


@pytest.fixture
def kernels() -> LinearKernels:
    return LinearKernels(native_or_skip(), ThreadPool(native_or_skip(), 2))


def case(
    kernels: LinearKernels,
    name: str,
    outputs: int,
    inputs: int,
    rows: int,
    *,
    zeros: bool = False,
    paired: bool = False,
) -> tuple[QuantizedWeight, NativeLinear, Tensor, Tensor]:
    """Weight, packed, rows, bias."""
    generator = torch.Generator().manual_seed(outputs * 31 + inputs)
    scheme = parse_scheme(name)
    weight = quantize(torch.randn(outputs, inputs, generator=generator) * 0.02, scheme)
    if zeros:
        points = torch.randint(0, 16, weight.scales.shape, generator=generator, dtype=torch.uint8)
        weight = QuantizedWeight(4, weight.codes, weight.scales, points, weight.group)
    x = torch.randn(rows, inputs, generator=generator).to(torch.bfloat16)
    bias = torch.randn(outputs, generator=generator)
    packed = kernels.pack_quantized(weight, bias, dynamic=scheme.dynamic, paired=paired)
    return weight, packed, x, bias


def oracle(x: Tensor, weight: QuantizedWeight, bias: Tensor, dynamic: bool) -> Tensor:
    rows = x.double()
    if dynamic:
        codes, scales = quantize_rows(x)
        rows = codes.double() * scales.double()[:, None]
    return rows @ weight.dequantize().double().t() + bias.double()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_equals_the_reference(kernels: LinearKernels, name: str, outputs: int, inputs: int) -> None:
    weight, packed, x, bias = case(kernels, name, outputs, inputs, 19)
    for rows in (1, 2, 7, 13, 19):
        got = kernels.run(x[:rows], packed, dtype=torch.float32)
        assert error(got, oracle(x[:rows], weight, bias, "dynamic" in name)) < 1e-5, rows


@pytest.mark.parametrize("name", ["int4_weight_only_g32", "int4_dynamic_g32", "int4_dynamic"])
def test_zero_points(kernels: LinearKernels, name: str) -> None:
    for outputs, inputs in ((33, 40), (64, 1030)):
        weight, packed, x, bias = case(kernels, name, outputs, inputs, 9, zeros=True)
        for rows in (1, 5, 9):
            got = kernels.run(x[:rows], packed, dtype=torch.float32)
            assert error(got, oracle(x[:rows], weight, bias, "dynamic" in name)) < 1e-5


@pytest.mark.parametrize(
    ("isa", "name", "zeros"),
    [  # every format on every instruction set, with zero points or without; --all: both
        pytest.param(
            isa, name, zeros, id=f"{isa.name.lower()}-{name}-{zeros}",
            marks=[] if "int4" not in name or (i + j) % 2 == zeros else pytest.mark.slow,
        )
        for i, isa in enumerate(Isa)
        for j, name in enumerate(NAMES)
        for zeros in ((False, True) if "int4" in name else (False,))
    ],
    indirect=["isa"],
)  # fmt: skip
def test_same_bits_for_any_number_of_rows_and_threads(kernels: LinearKernels, name: str, zeros: bool) -> None:
    _, packed, x, _ = case(kernels, name, 65, 2100, 512, zeros=zeros)
    single = torch.cat([kernels.run(x[i : i + 1], packed) for i in range(80)])
    for rows in range(2, 65):
        assert torch.equal(kernels.run(x[:rows], packed), single[:rows]), rows
    assert torch.equal(kernels.run(x, packed)[:80], single)
    for threads in (1, 3):
        other = LinearKernels(native_or_skip(), ThreadPool(native_or_skip(), threads))
        for rows in (1, 8, 37):
            assert torch.equal(other.run(x[:rows], packed), single[:rows])


@pytest.mark.parametrize("name", NAMES)
def test_epilogues(kernels: LinearKernels, name: str) -> None:
    weight, packed, x, bias = case(kernels, name, 90, 70, 5, paired=True)
    both = kernels.run(x, packed)
    scheme = parse_scheme(name)
    assert torch.equal(both, kernels.run(x, kernels.pack_quantized(weight, bias, dynamic=scheme.dynamic)))
    residual = torch.ones(5, 90, dtype=torch.bfloat16)
    want = residual + both
    assert torch.equal(kernels.run(x, packed, residual, Epilogue.ADD), want)
    got = kernels.run(x, packed, epilogue=Epilogue.SILU_MUL)
    gate, up = both.double().chunk(2, dim=1)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["int8_dynamic", "int4_dynamic"])
def test_float32_rows(kernels: LinearKernels, name: str) -> None:
    weight, _, _, bias = case(kernels, name, 40, 100, 1)
    packed = kernels.pack_quantized(weight, bias, dynamic=True, dtype=torch.float32)
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(1)) * 1e3
    assert error(kernels.run(x, packed), oracle(x, weight, bias, True)) < 1e-5


@pytest.mark.parametrize("name", ["int8_dynamic", "int4_dynamic"])
def test_rows_of_zeros_and_rows_that_are_not_finite(kernels: LinearKernels, name: str) -> None:
    _, packed, x, bias = case(kernels, name, 40, 100, 6)
    clean = kernels.run(x, packed)
    x[1] = 0
    x[2, 7] = float("nan")
    x[3, 99] = float("inf")
    x[4] *= 1e-38
    got = kernels.run(x, packed)
    assert torch.equal(got[1], bias.to(torch.bfloat16))
    assert bool(got[2].isnan().all()) and bool(got[3].isnan().all())
    assert bool(got[4].isfinite().all())
    assert torch.equal(got[[0, 5]], clean[[0, 5]])


@pytest.mark.parametrize("name", ["int8", "int4_g32"])
def test_rounding_leaves_the_weights_alone_and_is_near(name: str) -> None:
    weight = torch.randn(70, 50, generator=torch.Generator().manual_seed(5)) * 0.02
    before = weight.clone()
    rounded = quantize(weight, parse_scheme(name))
    assert torch.equal(weight, before)
    step = 2**-7 if name == "int8" else 2**-3
    assert float((rounded.dequantize() - weight).abs().max()) <= step * float(weight.abs().max())
    assert torch.equal(quantize(rounded.dequantize(), parse_scheme(name)).codes, rounded.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_with_more_inputs_than_integers_sum_stay_floats(
    kernels: LinearKernels, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    linear_module._say_wide.cache_clear()
    inputs = MOST_SUMMED + 8
    generator = torch.Generator().manual_seed(3)
    weight = quantize(torch.randn(3, inputs, generator=generator) * 0.02, parse_scheme("int8_dynamic"))
    packed = kernels.pack_quantized(weight, dynamic=True, dtype=dtype)
    x = torch.randn(2, inputs, generator=generator).to(dtype)
    got = kernels.run(x, packed, dtype=torch.float32)
    assert error(got, x.double() @ weight.dequantize(dtype).double().t()) < 1e-5
    assert [f"{inputs} inputs stay floats" in record.message for record in caplog.records] == [True]

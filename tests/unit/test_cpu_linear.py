"""Native linear layers: against plain torch, and bit for bit against themselves in every shape of call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.linear import Epilogue, LinearKernels
from draftwise.kernels.cpu.pool import ThreadPool

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [
    (1, 1),
    (5, 3),
    (31, 17),
    (32, 64),
    (33, 2),
    (48, 255),
    (100, 1030),
    (257, 96),
    (64, 4100),
]  # out, in


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


@pytest.fixture
def kernels() -> LinearKernels:
    return LinearKernels(native_or_skip(), ThreadPool(native_or_skip(), 2))


def with_threads(threads: int) -> LinearKernels:
    return LinearKernels(native_or_skip(), ThreadPool(native_or_skip(), threads))


def tensors(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(outputs * 7919 + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    return weight, x, torch.randn(outputs, generator=generator)


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    exact = x.double() @ weight.double().t()
    return exact if bias is None else exact + bias.double()


def error(got: Tensor, want: Tensor) -> float:
    """Relative to the length of the rows' products, so that sums that cancel do not count more."""
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_equals_the_reference(kernels: LinearKernels, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, x, bias = tensors(outputs, inputs, 19, dtype)
    packed = kernels.pack(weight, bias)
    for rows in (1, 2, 7, 8, 13, 19):
        got = kernels.run(x[:rows], packed, dtype=torch.float32)
        assert error(got, oracle(x[:rows], weight, bias)) < 1e-5, rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs", "counts"),
    [
        (33, 255, range(2, 65)),
        (160, 4100, (2, 3, 5, 8, 15, 16, 17, 31, 33, 64)),  # cut into blocks of k
        pytest.param(160, 4100, range(2, 65), marks=pytest.mark.slow),
    ],
    ids=["33-255", "160-4100", "160-4100-all"],
)
def test_same_bits_for_any_number_of_rows_and_threads(
    kernels: LinearKernels, dtype: torch.dtype, outputs: int, inputs: int, counts: Sequence[int]
) -> None:
    weight, x, bias = tensors(outputs, inputs, 512, dtype)
    packed = kernels.pack(weight, bias)
    others = [with_threads(1), with_threads(3)]
    single = torch.cat([kernels.run(x[i : i + 1], packed) for i in range(512)])
    for rows in [*counts, 512]:
        assert torch.equal(kernels.run(x[:rows], packed), single[:rows]), rows
        assert torch.equal(kernels.run(x[512 - rows :], packed), single[512 - rows :]), rows
    for other in others:
        for rows in (1, 8, 37, 512):
            assert torch.equal(other.run(x[:rows], packed), single[:rows]), rows


def test_strided_rows_and_misaligned_buffers(kernels: LinearKernels) -> None:
    weight, x, _ = tensors(40, 64, 6, torch.bfloat16)
    packed = kernels.pack(weight)
    want = kernels.run(x, packed)
    wide = torch.full((6, 101), 7.0, dtype=torch.bfloat16)
    wide[:, 33:97] = x  # rows that start at odd multiples of two bytes
    out = torch.full((6, 61), -3.0, dtype=torch.bfloat16)
    kernels.run(wide[:, 33:97], packed, out[:, 5:45])
    assert torch.equal(out[:, 5:45], want)
    assert bool((out[:, :5] == -3).all()) and bool((out[:, 45:] == -3).all())
    assert torch.equal(kernels.run(wide[2:3, 33:97], packed), want[2:3])


def test_weight_rows_with_a_stride(kernels: LinearKernels) -> None:
    weight, x, _ = tensors(40, 64, 3, torch.float32)
    padded = torch.zeros(40, 70)
    padded[:, :64] = weight
    assert torch.equal(kernels.run(x, kernels.pack(padded[:, :64])), kernels.run(x, kernels.pack(weight)))
    assert torch.equal(
        kernels.run(x, kernels.pack(weight.t().contiguous().t())), kernels.run(x, kernels.pack(weight))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_is_the_sum_with_the_rounded_product(kernels: LinearKernels, dtype: torch.dtype) -> None:
    weight, x, bias = tensors(90, 70, 5, dtype)
    packed = kernels.pack(weight, bias)
    residual = torch.randn(5, 90, generator=torch.Generator().manual_seed(3)).to(dtype)
    want = residual + kernels.run(x, packed)
    kernels.run(x, packed, residual, Epilogue.ADD)
    assert torch.equal(residual, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 16, 45])
def test_silu_mul(kernels: LinearKernels, dtype: torch.dtype, inner: int) -> None:
    weight, x, bias = tensors(2 * inner, 70, 9, dtype)
    packed = kernels.pack(weight, bias, paired=True)
    both = kernels.run(x, packed)
    assert torch.equal(both, kernels.run(x, kernels.pack(weight, bias)))  # the pairing is invisible
    got = kernels.run(x, packed, epilogue=Epilogue.SILU_MUL)
    gate, up = both.double().chunk(2, dim=1)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance)
    for row in range(9):
        assert torch.equal(kernels.run(x[row : row + 1], packed, epilogue=Epilogue.SILU_MUL)[0], got[row])


def test_silu_at_the_ends(kernels: LinearKernels) -> None:
    gates = torch.tensor(
        [[-1e4], [-104.0], [-88.0], [-1.0], [-0.0], [0.0], [1.0], [88.0], [1e4], [float("inf")]]
    )
    packed = kernels.pack(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), paired=True)
    x = torch.cat([gates, torch.ones_like(gates)], dim=1)
    got = kernels.run(x[:-1], packed, epilogue=Epilogue.SILU_MUL)
    want = torch.nn.functional.silu(gates[:-1].double())
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-36)


def test_special_values_stay_in_their_row(kernels: LinearKernels) -> None:
    weight, x, _ = tensors(33, 40, 4, torch.bfloat16)
    packed = kernels.pack(weight)
    clean = kernels.run(x, packed)
    x[1, 3] = float("nan")
    x[2, 0] = float("inf")
    got = kernels.run(x, packed)
    assert bool(got[1].isnan().all())
    assert not bool(got[2].isfinite().any())
    assert torch.equal(got[[0, 3]], clean[[0, 3]])


def test_no_rows(kernels: LinearKernels) -> None:
    weight, x, _ = tensors(33, 40, 0, torch.bfloat16)
    assert kernels.run(x, kernels.pack(weight)).shape == (0, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_long_prompt_is_computed_some_rows_at_a_time(kernels: LinearKernels, dtype: torch.dtype) -> None:
    """8.4 MB of packed rows are more than what is kept in a cache; the bits are those of each row alone."""
    rows, inputs = 520, 8192
    weight, x, _ = tensors(40, inputs, rows, dtype)
    layer = kernels.pack(weight)
    found = kernels.run(x, layer)
    for row in (0, 255, 256, 511, 519):
        assert torch.equal(found[row], kernels.run(x[row : row + 1], layer)[0]), row
    assert error(found, oracle(x, weight)) < (1e-5 if dtype is torch.float32 else 1e-2)

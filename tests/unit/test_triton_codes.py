"""Products of codes, int8 and fp8, and what chooses them, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise.errors import ConfigError
from draftwise.kernels.handles import Linear
from draftwise.kernels.select import default_ops
from draftwise.kernels.triton import linear as products
from draftwise.kernels.triton.availability import equal_bits_shown, interpreted
from draftwise.kernels.triton.linear import LinearTiling, TritonLinear, linear, pack_quantized
from draftwise.kernels.triton.ops import TritonOps
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import FP8, QuantizedWeight, quantize, quantize_rows

DEVICE = torch.device("cpu" if interpreted() else "cuda")
CPU = torch.device("cpu")
TILING = LinearTiling(16, 16, 32)
KINDS = {"int8_dynamic": torch.int8, "fp8": FP8}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_rows_become_the_codes_of_the_reference(kind: torch.dtype) -> None:
    x = random(6, 70) * torch.tensor([1e-3, 1.0, 40.0, 1.0, 0.0, 1.0])[:, None]
    x[3, :4] = torch.tensor([1.5, -1e-7, 0.015, 1e-4])
    codes, scales = products.quantize_rows(x.to(DEVICE), kind)
    expected, expected_scales = quantize_rows(x, kind)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
    assert torch.equal(codes.cpu().float(), expected.float())
    assert products.quantize_rows(x[:0].to(DEVICE), kind)[0].shape == (0, 70)


def test_every_number_of_fp8_is_found_and_ties_go_to_even() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = every[every.isfinite()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, between])[None]
    assert float(x.max()) == 448  # so that the scale is 1
    codes, scales = products.quantize_rows(x.to(DEVICE), FP8)
    assert scales.tolist() == [1.0]
    assert torch.equal(codes.cpu().float(), x.to(FP8).float())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (21, 70)])
def test_products_of_codes(name: str, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = quantize(random(outputs, inputs, seed=1), parse_scheme(name))
    bias = random(outputs, seed=2).to(dtype)
    x = random(5, inputs).to(dtype)
    layer = pack_quantized(weight, bias.to(DEVICE), TILING, DEVICE, dynamic=True)
    codes, scales = quantize_rows(x, KINDS[name])
    expected = (codes.float() @ weight.codes.float().T) * scales[:, None] * weight.scales + bias.float()
    actual = linear(x.to(DEVICE), layer).cpu()
    assert actual.dtype is dtype
    limit = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(actual.float(), expected, atol=limit * float(expected.abs().max()), rtol=0)
    # rounding alone stands between that and the product of floats
    exact = x.float() @ random(outputs, inputs, seed=1).T + bias.float()
    assert float((expected - exact).abs().max()) < 0.05 * float(exact.abs().max())
    assert linear(x[:0].to(DEVICE), layer).shape == (0, outputs)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str) -> None:
    layer = pack_quantized(
        quantize(random(21, 70, seed=1), parse_scheme(name)), None, TILING, DEVICE, dynamic=True
    )
    x = random(37, 70).to(DEVICE)
    whole = linear(x, layer)
    for count in (1, 2, 16, 17):
        assert torch.equal(linear(x[5 : 5 + count], layer), whole[5 : 5 + count])


@pytest.mark.parametrize("name", KINDS)
def test_parts_of_k_have_the_same_bits_in_one_program_and_in_several(name: str) -> None:
    tiling = LinearTiling(16, 16, 32, programs=6)
    bias = random(21, seed=2).to(DEVICE)
    layer = pack_quantized(
        quantize(random(21, 550, seed=1), parse_scheme(name)), bias, tiling, DEVICE, dynamic=True
    )
    assert layer.part_inputs == 288
    x = random(17, 550).to(DEVICE)
    whole = linear(x, layer)
    codes, scales = products.quantize_rows(x, KINDS[name])
    assert layer.scales is not None
    expected = (codes.float() @ layer.weight.float().T) * scales[:, None] * layer.scales + bias
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-5)
    for count in (1, 16):
        assert torch.equal(linear(x[1 : 1 + count], layer), whole[1 : 1 + count])


def test_fp8_weights_meet_rows_as_they_are() -> None:
    weight = quantize(random(9, 40, seed=1), parse_scheme("fp8"))
    layer = pack_quantized(weight, None, TILING, DEVICE)
    x = random(3, 40)
    torch.testing.assert_close(
        linear(x.to(DEVICE), layer).cpu(), x @ weight.dequantize().T, atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_device_that_does_not_read_fp8_gets_the_same_bits(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = pack_quantized(
        quantize(random(21, 70, seed=1), parse_scheme("fp8")), None, TILING, DEVICE, dynamic=dynamic
    )
    x = random(5, 70).half().to(DEVICE)
    expected = linear(x, layer)
    seen = []

    def reads_nothing(device: torch.device) -> bool:
        seen.append(device)
        return False

    monkeypatch.setattr(products, "reads_fp8", reads_nothing)
    assert torch.equal(linear(x, layer), expected)
    assert len(seen) == 1 + dynamic


def parts(layer: Linear) -> TritonLinear:
    assert isinstance(layer, TritonLinear)
    return layer


@pytest.mark.parametrize("name", ["int8_weight_only", "int8_dynamic", "int4_weight_only", "fp8"])
def test_layers_are_rounded_as_they_are_packed(name: str) -> None:
    scheme = parse_scheme(name)
    assert scheme.name == name
    ops = TritonOps(torch.float32, DEVICE, tiling=TILING, scheme=scheme)
    weight = random(18, 64, seed=3)
    layer, head = parts(ops.pack_linear(weight.to(DEVICE))), parts(ops.pack_tied_head(weight.to(DEVICE)))
    assert layer.bits == scheme.bits and head.bits == 8 and layer.dynamic == scheme.dynamic
    x = random(2, 64)
    expected = x @ quantize(weight, scheme).dequantize().T
    limit = 0.03 if scheme.dynamic else 1e-4
    actual = ops.linear(x.to(DEVICE), layer).cpu()
    assert float((actual - expected).abs().max()) < limit * float(expected.abs().max())
    assert ops.logits(x.to(DEVICE), head).dtype is torch.float32


def test_without_the_promise_products_of_floats_are_torchs() -> None:
    x, weight, bias = random(3, 40).to(DEVICE), random(9, 40, seed=1).to(DEVICE), random(9, seed=2).to(DEVICE)
    for invariant in (True, False):
        ops = TritonOps(torch.float32, DEVICE, tiling=TILING, batch_invariant=invariant)
        assert ops.same_bits is (invariant and equal_bits_shown(DEVICE))
        layer = ops.pack_linear(weight, bias)
        expected = torch.nn.functional.linear(x, weight, bias)
        assert torch.equal(ops.linear(x, layer), expected) or invariant
        out = torch.empty_like(expected)
        assert ops.linear(x, layer, out=out) is out
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_what_a_scaled_product_of_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has one on CPUs, too: it stands for that of a device. Its results are those of the kernel."""
    weight = quantize(random(32, 48, seed=1), parse_scheme("fp8"))
    x = random(5, 48).bfloat16().to(DEVICE)
    layer = pack_quantized(weight, None, TILING, DEVICE, dynamic=True, invariant=False)
    assert products.scaled_product_serves(x.float(), layer) is False
    expected = linear(x.float(), layer)
    monkeypatch.setattr(products, "scaled_product_serves", lambda x, layer: True)
    actual = linear(x, layer)
    torch.testing.assert_close(actual.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)


@pytest.mark.skipif(not interpreted(), reason="asks for the interpreter on a CPU")
def test_what_is_chosen_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "triton")
    assert default_ops(torch.float16, CPU, batch_invariant=True).same_bits
    assert not default_ops(torch.float16, CPU).same_bits
    assert isinstance(default_ops(torch.float32, CPU, parse_scheme("fp8")), TritonOps)
    with pytest.raises(ConfigError, match="int4_dynamic is for CPUs"):
        default_ops(torch.float32, CPU, parse_scheme("int4_dynamic"))
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    with pytest.raises(ConfigError, match="batch_invariant: plain torch's products round differently"):
        default_ops(torch.float32, CPU, batch_invariant=True)
    with pytest.raises(ConfigError, match="fp8 needs Triton's kernels"):
        default_ops(torch.float32, CPU, parse_scheme("fp8"))
    monkeypatch.setenv("DRAFTWISE_KERNELS", "auto")
    with pytest.raises(ConfigError, match="batch_invariant needs Triton's kernels: TRITON_INTERPRET is set"):
        default_ops(torch.float16, torch.device("cuda"), batch_invariant=True)


def test_codes_that_are_fp8_are_taken_as_they_are() -> None:
    weight = QuantizedWeight(8, random(4, 6).to(FP8), torch.ones(4))
    assert weight.is_fp8 and torch.equal(weight.dequantize(), weight.codes.float())

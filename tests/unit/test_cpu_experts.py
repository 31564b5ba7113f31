"""Experts on the native library: like plain torch in value, and a row's bits the same in every batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.native import forced_isa, native_or_skip
from tests.unit.test_experts_routing import ROUTINGS, scores_of
from torch import Tensor

from draftwise.kernels.cpu.experts import ExpertsKernels, NativeExperts
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.quantized import QuantizedOps
from draftwise.kernels.mixture import gated, route
from draftwise.kernels.routing import Activation, Routing
from draftwise.kernels.torch_ops import TorchOps
from draftwise.quantization.scheme import parse_scheme

CPU = torch.device("cpu")
FORMATS = ["float32", "bfloat16", "int8_dynamic", "int8_weight_only", "int4_dynamic", "int4_weight_only"]
HIDDEN, INNER, WIDE = 72, 40, 100
ROUTING = Routing(6, 3, shared="gated")


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


def ops_of(form: str, threads: int = 2) -> NativeOps:
    library = native_or_skip()
    pool = ThreadPool(library, threads)
    if form == "float32":
        return NativeOps(library, pool, torch.float32)
    if form == "bfloat16":
        return NativeOps(library, pool, torch.bfloat16)
    return QuantizedOps(library, pool, torch.bfloat16, parse_scheme(form))


def weights_of(routing: Routing, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [INNER] * routing.num_experts + [WIDE] * (routing.shared != "none")
    return [
        (
            (torch.randn(2 * n, HIDDEN, generator=generator) * 0.2).to(dtype),
            (torch.randn(HIDDEN, n, generator=generator) * 0.2).to(dtype),
        )
        for n in sizes
    ]


def packed(ops: NativeOps | TorchOps, routing: Routing, correction: Tensor | None = None) -> NativeExperts:
    layers = [(ops.pack_gate_up(up), ops.pack_linear(down)) for up, down in weights_of(routing, ops.dtype)]
    return ops.pack_experts(layers, routing, correction)  # type: ignore[return-value]


def rows_of(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    return x, torch.randn(count, ROUTING.num_scores, generator=generator) * 2


def expected(x: Tensor, scores: Tensor, routing: Routing) -> Tensor:
    """In plain torch and float32, with the weights that `packed` rounds."""
    oracle = TorchOps(torch.float32, CPU)
    weights = [(up.float(), down.float()) for up, down in weights_of(routing, x.dtype)]
    layers = [(oracle.pack_gate_up(up), oracle.pack_linear(down)) for up, down in weights]
    return oracle.experts(x.float(), scores, oracle.pack_experts(layers, routing))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_that_of_plain_torch(name: str, corrected: bool) -> None:
    routing = ROUTINGS[name]
    correction = torch.linspace(-0.2, 0.3, routing.num_experts) if corrected else None
    experts = packed(ops_of("float32"), routing, correction)
    scores = scores_of(routing, 70)
    kernels = ExpertsKernels(native_or_skip(), ThreadPool(native_or_skip(), 2))
    chosen, weights = kernels.route(scores, experts)
    wanted, shares = route(scores, routing, correction)
    assert torch.equal(chosen.long(), wanted)
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-6)
    alone = [kernels.route(row[None], experts)[1] for row in scores]
    assert torch.equal(torch.cat(alone), weights)


@pytest.mark.parametrize("form", FORMATS)
def test_value_and_bits(form: str) -> None:
    """Near plain torch's float32; the bits of a row alone, at any number of rows, by any number of threads."""
    ops = ops_of(form)
    x, scores = rows_of(130, ops.dtype)
    experts = packed(ops, ROUTING)
    found = ops.experts(x, scores, experts)
    oracle = TorchOps(torch.float32, CPU)
    layers = [
        (oracle.pack_gate_up(u.float()), oracle.pack_linear(d.float()))
        for u, d in weights_of(ROUTING, ops.dtype)
    ]
    wanted = oracle.experts(x.float(), scores, oracle.pack_experts(layers, ROUTING))
    limit = {"float32": 1e-5, "bfloat16": 0.01, "int8": 0.03, "int4": 0.25}[form.split("_")[0]]
    assert float((found.float() - wanted).abs().mean()) < limit * float(wanted.std())
    other = ops_of(form, threads=5)
    again = packed(other, ROUTING)
    for count in (1, 2, 5, 8, 33):
        assert torch.equal(other.experts(x[:count], scores[:count], again), found[:count]), count
    backwards = torch.arange(129, -1, -1)
    assert torch.equal(ops.experts(x[backwards], scores[backwards], experts)[backwards], found)


def test_what_no_row_chose_is_not_read() -> None:
    """Experts of NaN leave no trace in rows that choose others."""
    ops = ops_of("float32")
    routing = Routing(4, 2)
    weights = weights_of(routing, torch.float32)
    clean = packed(ops, routing)
    for up, down in weights[1::2]:
        up.fill_(torch.nan)
        down.fill_(torch.nan)
    spoilt = ops.pack_experts(
        [(ops.pack_gate_up(up), ops.pack_linear(down)) for up, down in weights], routing
    )
    x, _ = rows_of(9, torch.float32)
    scores = torch.tensor([[3.0, 0.0, 2.0, -1.0]]).repeat(9, 1)
    assert torch.equal(ops.experts(x, scores, spoilt), ops.experts(x, scores, clean))
    assert bool(ops.experts(x, -scores, spoilt).isnan().all())


@pytest.mark.parametrize("kind", ["gelu_tanh", "clamped"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8_dynamic"])
def test_other_activations(form: str, kind: str) -> None:
    ops = ops_of(form)
    routing = Routing(6, 3, shared="gated", activation=Activation(kind, alpha=1.5, limit=0.4))  # type: ignore[arg-type]
    x, scores = rows_of(20, ops.dtype)
    experts = packed(ops, routing)
    found = ops.experts(x, scores, experts)
    oracle = TorchOps(torch.float32, CPU)
    layers = [
        (oracle.pack_gate_up(u.float()), oracle.pack_linear(d.float()))
        for u, d in weights_of(routing, ops.dtype)
    ]
    wanted = oracle.experts(x.float(), scores, oracle.pack_experts(layers, routing))
    limit = {"float32": 1e-5, "bfloat16": 0.01, "int8_dynamic": 0.03}[form]
    assert float((found.float() - wanted).abs().mean()) < limit * float(wanted.std())
    for i in range(3):
        assert torch.equal(ops.experts(x[i : i + 1], scores[i : i + 1], experts), found[i : i + 1])
    both = torch.randn(33, 2 * 51).to(ops.dtype)
    joined = ops.gated(both, routing.activation)
    torch.testing.assert_close(joined.float(), gated(both.float(), routing.activation), rtol=0.01, atol=0.01)
    assert torch.equal(ops.gated(both[7:8], routing.activation)[0], joined[7])


def test_many_rows_are_computed_in_pieces() -> None:
    """More results than are kept at a time (32 MiB of float32)."""
    ops = ops_of("bfloat16")
    routing = Routing(3, 3)
    up, down = torch.randn(64, 2048) * 0.1, torch.randn(2048, 32) * 0.1
    layers = [(ops.pack_gate_up(up.bfloat16()), ops.pack_linear(down.bfloat16())) for _ in range(3)]
    experts = ops.pack_experts(layers, routing)
    x = torch.randn(1500, 2048).bfloat16()
    scores = torch.randn(1500, 3)
    found = ops.experts(x, scores, experts)
    assert torch.equal(ops.experts(x[1400:], scores[1400:], experts), found[1400:])


def test_scores_that_are_no_numbers_choose_somebody() -> None:
    ops = ops_of("float32")
    experts = packed(ops, ROUTING)
    x, scores = rows_of(4, torch.float32)
    scores[1:3] = torch.nan
    found = ops.experts(x, scores, experts)
    assert torch.equal(found[0], ops.experts(x[:1], scores[:1], experts)[0]) and bool(found[1].isnan().all())


def test_bad_arguments_are_refused() -> None:
    ops = ops_of("float32")
    experts = packed(ops, ROUTING)
    x, scores = rows_of(3, torch.float32)
    chosen, weights = route(scores, ROUTING, None)
    with pytest.raises(ValueError):
        ops.mix_experts(x, chosen.int() - 7, weights, experts)
    for bad in (7, -1, 1 << 40):
        chosen[1, 2] = bad
        with pytest.raises(ValueError):
            ops.mix_experts(x, chosen, weights, experts)
    with pytest.raises(ValueError, match="width"):
        ops.experts(x[:, :8], scores, experts)
    with pytest.raises(ValueError, match="score"):
        ops.experts(x, scores[:, :6], experts)
    with pytest.raises(ValueError, match="score"):
        ops.experts(x, scores.bfloat16(), experts)
    layers = list(experts.layers)
    with pytest.raises(ValueError, match="each expert"):
        ops.pack_experts(layers[:6], ROUTING)
    with pytest.raises(ValueError, match="correction"):
        ops.pack_experts(layers, ROUTING, torch.zeros(7))
    with pytest.raises(ValueError):  # down of another inner size
        ops.pack_experts([*layers[:6], (layers[6][0], layers[0][1])], ROUTING)
    with pytest.raises(ValueError, match="gate and up"):
        ops.pack_experts([(down, up) for up, down in layers], ROUTING)

"""Experts of Transformers models: which forms are recognised, and that nothing else is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fakes.architectures import save, small
from torch import Tensor, nn

from draftwise.kernels.routing import Activation
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.general.experts import (
    ExpertsUse,
    PackedExperts,
    exchange_experts,
    recognised,
    stacks_of,
)
from draftwise.models.loader import load_model

CPU = torch.device("cpu")
E, H, INNER, K = 4, 24, 10, 2

Joined = Callable[[Tensor, Tensor], Tensor]
JOINS: dict[str, Joined] = {
    "silu": lambda g, u: nn.functional.silu(g) * u,
    "gelu_tanh": lambda g, u: nn.functional.gelu(g, approximate="tanh") * u,
    "clamped": lambda g, u: (
        g.clamp(max=5.0) * torch.sigmoid(1.3 * g.clamp(max=5.0)) * (u.clamp(-5.0, 5.0) + 1)
    ),
}


class Stacked(nn.Module):
    """A mixture as Transformers keeps it."""

    def __init__(self, join: Joined, *, in_turns: bool, turned: bool, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        up, down = torch.randn(E, 2 * INNER, H), torch.randn(E, H, INNER)
        self.gate_up_proj = nn.Parameter(up.transpose(1, 2).contiguous() if turned else up)
        self.down_proj = nn.Parameter(down.transpose(1, 2).contiguous() if turned else down)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * INNER))
            self.down_proj_bias = nn.Parameter(torch.randn(E, H))
        self.join, self.in_turns, self.turned, self.bias = join, in_turns, turned, bias
        self.alpha, self.limit = 1.3, 5.0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for r in range(len(hidden_states)):
            for e, share in zip(top_k_index[r], top_k_weights[r], strict=True):
                up = self.gate_up_proj[e].t() if self.turned else self.gate_up_proj[e]
                down = self.down_proj[e].t() if self.turned else self.down_proj[e]
                both = up @ hidden_states[r] + (self.gate_up_proj_bias[e] if self.bias else 0)
                gate, up = (both[0::2], both[1::2]) if self.in_turns else both.chunk(2)
                result = down @ self.join(gate, up) + (self.down_proj_bias[e] if self.bias else 0)
                out[r] += self.weigh(result, share)
        return out

    def weigh(self, result: Tensor, share: Tensor) -> Tensor:
        return result * share


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, by_name: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = x[:, :E].softmax(-1).topk(K, dim=-1)
        if self.by_name:
            found = self.experts(hidden_states=x, top_k_weights=shares, top_k_index=chosen)
        else:
            found = self.experts(x, chosen, shares)
        assert isinstance(found, Tensor)
        return found


def watched(layer: Layer) -> tuple[Tensor, Tensor, ExpertsUse]:
    x = torch.randn(7, H, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(), ExpertsUse(layer) as use:
        wanted = layer(x)
    return x, wanted, use


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("kind", JOINS)
def test_every_form_is_recognised_and_computed(kind: str, in_turns: bool, turned: bool, bias: bool) -> None:
    module = Stacked(JOINS[kind], in_turns=in_turns, turned=turned, bias=bias)
    layer = Layer(module, by_name=bias)
    x, wanted, use = watched(layer)
    with torch.inference_mode():
        form = recognised(module, use.calls[module])
        assert form is not None
        assert (form.activation.kind, form.in_turns, form.turned) == (kind, in_turns, turned)
        assert kind != "clamped" or form.activation == Activation("clamped", 1.3, 5.0)
        size = exchange_experts(layer, stacks_of(use.calls), TorchOps(torch.float32, CPU))
        assert isinstance(layer.experts, PackedExperts) and size > 0
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-3)
    assert all(parameter.numel() == 0 for parameter in module.parameters())


class Squared(Stacked):
    """Weights that act otherwise."""

    def weigh(self, result: Tensor, share: Tensor) -> Tensor:
        return result * share**2


class More(Stacked):
    """With a parameter that nobody knows."""

    def __init__(self, *args: Joined, **kwargs: bool) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(H))


class Told(Stacked):
    """Called with something that nobody knows."""

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, factor: float = 1.0
    ) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights) * factor


class TellingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = x[:, :E].softmax(-1).topk(K, dim=-1)
        found = self.experts(x, chosen, shares, 2.0)
        assert isinstance(found, Tensor)
        return found


class Wavering(Layer):
    """Rows take two experts in one call and three in the next."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for count in (2, 3):
            shares, chosen = x[:, :E].softmax(-1).topk(count, dim=-1)
            total += self.experts(x, chosen, shares)
        return total


PLAIN = {"in_turns": False, "turned": False, "bias": False}


@pytest.mark.parametrize(
    "layer",
    [
        Layer(Stacked(lambda g, u: torch.relu(g) * u, **PLAIN)),
        Layer(Stacked(lambda g, u: nn.functional.silu(u) * g, **PLAIN)),
        Layer(Squared(JOINS["silu"], **PLAIN)),
        Layer(More(JOINS["silu"], **PLAIN)),
        TellingLayer(Told(JOINS["silu"], **PLAIN)),
        Wavering(Stacked(JOINS["silu"], **PLAIN)),
    ],
    ids=["relu", "up first", "squared weights", "one more parameter", "one more argument", "another number"],
)
def test_what_is_not_understood_stays(layer: Layer) -> None:
    before = layer.experts
    x, wanted, use = watched(layer)
    with torch.inference_mode():
        assert exchange_experts(layer, stacks_of(use.calls), TorchOps(torch.float32, CPU)) == 0
        assert layer.experts is before
        torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow), "int4"])
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_a_model_in_the_general_way(tmp_path: Path, quantization: str | None) -> None:
    """Its router is none that we know, its experts are. The load's own check compares logits with Transformers'."""
    made = small("phimoe")
    save(made, tmp_path / "model")
    model = load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU, quantization=quantization)
    mixed = [m for m in model._model.modules() if isinstance(m, PackedExperts)]  # type: ignore[attr-defined]
    assert len(mixed) == 3
    if quantization is not None:
        plain = load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU)
        assert model.weight_bytes() < plain.weight_bytes()

"""Mixtures of experts in plain torch, the oracle of the kernels, against formulas written out row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from draftwise.kernels.mixture import gated, route
from draftwise.kernels.routing import Activation, Routing
from draftwise.kernels.torch_ops import TorchOps

ROUTINGS = {
    "softmax": Routing(6, 3, normalise=False),
    "normalised": Routing(6, 2, normalise=True, scale=2.5),
    "sigmoid": Routing(6, 2, "sigmoid", normalise=True),
    "groups": Routing(12, 4, "sigmoid", groups=4, top_groups=2, group_rank=2, scale=1.5),
    "best of a group": Routing(12, 3, normalise=False, groups=3, top_groups=1),
    "plain shared": Routing(5, 2, shared="plain"),
    "gated shared": Routing(5, 5, shared="gated", normalise=False),
    "one": Routing(1, 1),
}


def by_hand(
    scores: Sequence[float], routing: Routing, correction: Sequence[float]
) -> list[tuple[int, float]]:
    """Experts of a row with their weights, as `Routing` describes them."""
    count = routing.num_experts
    if routing.scoring == "softmax":
        total = sum(math.exp(x) for x in scores[:count])
        shares = [math.exp(x) / total for x in scores[:count]]
    else:
        shares = [1 / (1 + math.exp(-x)) for x in scores[:count]]
    judged = [share + more for share, more in zip(shares, correction, strict=True)]
    size = count // routing.groups
    of_groups = [
        sum(sorted(judged[g * size : (g + 1) * size])[-routing.group_rank :]) for g in range(routing.groups)
    ]
    best = sorted(range(routing.groups), key=lambda g: -of_groups[g])[: routing.top_groups]
    allowed = [i for i in range(count) if i // size in best]
    chosen = sorted(allowed, key=lambda i: (-judged[i], i))[: routing.top_k]
    weights = [shares[i] for i in chosen]
    if routing.normalise:
        weights = [w / sum(weights) for w in weights]
    found = [(i, w * routing.scale) for i, w in zip(chosen, weights, strict=True)]
    if routing.shared != "none":
        found.append((count, 1.0 if routing.shared == "plain" else 1 / (1 + math.exp(-scores[count]))))
    return found


def scores_of(routing: Routing, rows: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(routing.num_experts)
    scores = torch.randn(rows, routing.num_scores, generator=generator) * 2
    scores[::5] = scores[::5].round()  # equal ones
    return scores


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_what_it_says(name: str, corrected: bool) -> None:
    routing = ROUTINGS[name]
    scores = scores_of(routing)
    correction = torch.linspace(-0.2, 0.3, routing.num_experts) if corrected else None
    chosen, weights = route(scores, routing, correction)
    assert chosen.shape == weights.shape == (len(scores), routing.num_chosen)
    added = [0.0] * routing.num_experts if correction is None else correction.tolist()
    for row, found, share in zip(scores.tolist(), chosen.tolist(), weights.tolist(), strict=True):
        wanted = by_hand(row, routing, added)
        assert found == [i for i, _ in wanted]
        assert share == pytest.approx([w for _, w in wanted], rel=1e-5)


def test_the_example_of_the_docstring() -> None:
    chosen, weights = route(torch.tensor([[2.0, 0.0, 1.0, 0.0]]), Routing(4, 2, normalise=False), None)
    assert chosen.tolist() == [[0, 2]] and weights[0].tolist() == pytest.approx([0.61, 0.22], abs=5e-3)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped"])
def test_activations(kind: str) -> None:
    gate, up = 4 * torch.randn(3, 5), 9 * torch.randn(3, 5)
    found = gated(torch.cat((gate, up), 1), Activation(kind, alpha=1.5, limit=6.0))  # type: ignore[arg-type]
    for g, u, value in zip(
        gate.flatten().tolist(), up.flatten().tolist(), found.flatten().tolist(), strict=True
    ):
        if kind == "silu":
            wanted = g / (1 + math.exp(-g)) * u
        elif kind == "gelu_tanh":
            wanted = 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
        else:
            g, u = min(g, 6.0), max(-6.0, min(u, 6.0))
            wanted = g / (1 + math.exp(-1.5 * g)) * (u + 1)
        assert value == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rows_get_the_sum_of_their_experts(rows: int) -> None:
    """One expert at a time, one row at a time; the shared expert is of another size."""
    ops = TorchOps(torch.float32, torch.device("cpu"))
    routing = Routing(4, 2, shared="gated", normalise=False)
    torch.manual_seed(3)
    sizes = [8, 8, 8, 8, 20]
    weights = [(torch.randn(2 * n, 12), torch.randn(12, n)) for n in sizes]
    experts = ops.pack_experts(
        [(ops.pack_gate_up(up.clone()), ops.pack_linear(down.clone())) for up, down in weights], routing
    )
    assert experts.num_bytes >= sum(up.numel() + down.numel() for up, down in weights) * 4
    x, scores = torch.randn(rows, 12), torch.randn(rows, 5)
    found = ops.experts(x, scores, experts)
    out = torch.full((rows, 12), 9.0)
    assert ops.experts(x, scores, experts, out) is out
    torch.testing.assert_close(out, found, rtol=0, atol=0)
    wanted = torch.zeros(rows, 12)
    for r in range(rows):
        for expert, share in by_hand(scores[r].tolist(), routing, [0.0] * 4):
            up, down = weights[expert]
            wanted[r] += share * (down @ gated(up @ x[r], Activation()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    chosen, share = route(scores, routing, None)
    torch.testing.assert_close(ops.mix_experts(x, chosen, share, experts), found, rtol=0, atol=0)

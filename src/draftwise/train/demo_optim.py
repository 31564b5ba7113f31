"""Optimiser of the demo recipe: Muon for matrices, Adam for embeddings and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(stack: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix of `stack` (n, rows, columns) near 1 (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        poly = b * gram + c * torch.bmm(gram, gram)
        x = a * x + torch.bmm(poly, x)
    return (x.transpose(1, 2) if tall else x).to(stack.dtype)


class MuonAdam:
    """Muon on the layers' matrices (batched by shape), Adam on everything else. Plain state, easily saved.

    Args:
        adam: matrices whose name contains one of these go to Adam too.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float,
        adam_lr: float,
        decay: float = 0.0,
        adam: tuple[str, ...] = ("embed",),
    ) -> None:
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        self._rest: list[nn.Parameter] = []
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not any(part in name for part in adam):
                self._groups.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                self._rest.append(parameter)
        self._momentum = {s: torch.zeros(len(g), *s, device=g[0].device) for s, g in self._groups.items()}
        self._first = [torch.zeros_like(p) for p in self._rest]
        self._second = [torch.zeros_like(p) for p in self._rest]
        self._count = 0

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients with both learning rates times `factor`, then clear them."""
        self._count += 1
        warm = min(1.0, self._count / 300)
        beta = 0.85 + 0.10 * warm
        for shape, group in self._groups.items():
            grad = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self._momentum[shape]
            momentum.lerp_(grad, 1 - beta)
            update = orthogonalize(grad.lerp(momentum, beta))
            scale = self.muon_lr * factor * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, delta in zip(group, update, strict=True):
                parameter.mul_(1 - self.muon_lr * factor * self.decay).sub_(delta, alpha=scale)
                parameter.grad = None
        b1, b2 = 0.9, 0.98
        for parameter, first, second in zip(self._rest, self._first, self._second, strict=True):
            assert parameter.grad is not None
            first.lerp_(parameter.grad, 1 - b1)
            second.lerp_(parameter.grad.square(), 1 - b2)
            direction = (first / (1 - b1**self._count)) / ((second / (1 - b2**self._count)).sqrt() + 1e-8)
            parameter.sub_(direction, alpha=self.adam_lr * factor)
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and counters, in the model's parameter order."""
        return {
            "momentum": list(self._momentum.values()),
            "first": self._first,
            "second": self._second,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an optimiser over a model of the same shape."""
        for mine, saved in zip(self._momentum.values(), state["momentum"], strict=True):
            mine.copy_(saved)
        for mine, saved in zip(self._first + self._second, state["first"] + state["second"], strict=True):
            mine.copy_(saved)
        self._count = state["count"]

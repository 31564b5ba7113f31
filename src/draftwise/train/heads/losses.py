"""The loss of one prediction: how far the head's distribution is from the target's.

Vocabularies are wide and heads are small, so most of a step would be passes over logits. The gradient has a closed
form and is computed along with the loss, row by row, in one compiled function; nothing else of a head needs compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def _loss_and_gradient(
    logits: Tensor, probs: Tensor, weights: Tensor, variation: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (cross-entropy [], acceptance [..], gradient of cross-entropy - variation * acceptance, as `logits`), the
    first and the last added up over rows by their weights.

    With q = softmax(logits), P = sum p and s = sum of q where q < p:
    d(-sum p log q) / dz = q P - p;  d(sum min(p, q)) / dz = q ([q < p] - s).
    """
    wide, p = logits.float(), probs.float()
    shifted = wide - wide.amax(-1, keepdim=True)
    exps = shifted.exp()
    total = exps.sum(-1, keepdim=True)
    q = exps / total
    entropy = p.sum(-1) * total[..., 0].log() - (p * shifted).sum(-1)
    below = (q < p).float()
    overlap = torch.minimum(p, q).sum(-1)
    gradient = q * p.sum(-1, keepdim=True) - p - variation * q * (below - (q * below).sum(-1, keepdim=True))
    return (entropy * weights).sum(), overlap, (gradient * weights[..., None]).to(logits.dtype)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probs: Tensor, weights: Tensor, variation: float, kernel: _Kernel
    ) -> tuple[Tensor, Tensor, Tensor]:
        entropy, overlap, gradient = kernel(logits.detach(), probs, weights, variation)
        ctx.save_for_backward(gradient)
        accepted = (overlap * weights).sum()
        seen = torch.stack([entropy, accepted]) / weights.sum().clamp_min(1.0)
        ctx.mark_non_differentiable(seen, overlap)
        return entropy - variation * accepted, seen, overlap

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None


class Distilled(NamedTuple):
    """The results of `Distillation` for some rows."""

    loss: Tensor  # [], added up over rows by their weights
    seen: Tensor  # [2] float32, means over rows: cross-entropy, chance of acceptance
    overlap: Tensor  # [..] float32, each row's chance of acceptance


class Distillation:
    """Soft cross-entropy and total variation distance against the target's distribution.

    The loss is -sum p log q over the draft vocabulary, p not renormalised: a row of which the vocabulary holds little
    counts little. The total variation distance is added `variation` times: one minus it is the chance that a
    draft is accepted at temperature 1 (where the vocabulary is a part, up to a constant).

    Args:
        compile: compile the kernel; several times as fast, after half a minute for each new shape.
    """

    def __init__(self, compile: bool = False) -> None:
        self._kernel: _Kernel = (
            torch.compile(_loss_and_gradient, dynamic=False) if compile else _loss_and_gradient
        )

    def __call__(self, logits: Tensor, probs: Tensor, weights: Tensor, variation: float) -> Distilled:
        """Compare rows.

        The loss is a sum, not a mean: what several batches, or several processes, say together is divided by the weight
        of all their rows.

        Args:
            logits: [.., Vd] of the head.
            probs: [.., Vd] of the target, over the same tokens.
            weights: [..] float32, 0 where the row does not count.
        """
        return Distilled(*_Distillation.apply(logits, probs, weights, variation, self._kernel))  # type: ignore[no-untyped-call]


class Lesson(NamedTuple):
    """The targets that a head learns from a batch."""

    loss: Tensor  # [], added up over rows and unrolls by their weights
    weight: Tensor  # [], of all those rows
    seen: Tensor  # [unrolls, 2]: cross-entropy and chance of acceptance of each


class Lessons:
    """Adds up what the unrolls of a head say; unroll i weighs decay^i."""

    def __init__(self, distil: Distillation, decay: float, variation: float) -> None:
        self._distil, self._decay, self._variation = distil, decay, variation
        self._loss: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._seen: list[Tensor] = []

    def add(self, logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
        """Take in the next unroll, as `Distillation` does; returns each row's chance of acceptance."""
        share = self._decay ** len(self._seen)
        loss, seen, overlap = self._distil(logits, probs, weights, self._variation)
        self._loss = self._loss + share * loss
        self._weight = self._weight + share * weights.sum()
        self._seen.append(seen)
        return overlap

    def also(self, loss: Tensor) -> None:
        """Something else to learn from the last unroll: [], added up over its rows."""
        self._loss = self._loss + self._decay ** (len(self._seen) - 1) * loss

    def done(self) -> Lesson:
        """All unrolls together."""
        assert isinstance(self._loss, Tensor) and isinstance(self._weight, Tensor)
        return Lesson(self._loss, self._weight, torch.stack(self._seen))

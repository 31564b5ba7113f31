"""The loss of one prediction: how far the head's distribution is from the target's.

Vocabularies are wide and heads are small, so most of a step would be passes over logits. The gradient has a closed
form and is computed along with the loss, row by row, in one compiled function; nothing else of a head needs compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def _loss_and_gradient(
    logits: Tensor, probs: Tensor, weights: Tensor, variation: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (cross-entropy [], acceptance [], gradient of cross-entropy - variation * acceptance, as `logits`).

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
    scale = (weights / weights.sum().clamp_min(1.0))[..., None]
    gradient = q * p.sum(-1, keepdim=True) - p - variation * q * (below - (q * below).sum(-1, keepdim=True))
    return (
        (entropy[..., None] * scale).sum(),
        (overlap[..., None] * scale).sum(),
        (gradient * scale).to(logits.dtype),
    )


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, probs: Tensor, weights: Tensor, variation: float, kernel: _Kernel
    ) -> tuple[Tensor, Tensor]:
        entropy, overlap, gradient = kernel(logits.detach(), probs, weights, variation)
        ctx.save_for_backward(gradient)
        seen = torch.stack([entropy, overlap])
        ctx.mark_non_differentiable(seen)
        return entropy - variation * overlap, seen

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None


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

    def __call__(
        self, logits: Tensor, probs: Tensor, weights: Tensor, variation: float
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss over counted rows and [2] float32: cross-entropy, chance of acceptance.

        Args:
            logits: [B, M, Vd] of the head.
            probs: [B, M, Vd] of the target, over the same tokens.
            weights: [B, M] float32, 1 where the row counts.
        """
        loss, seen = _Distillation.apply(logits, probs, weights, variation, self._kernel)  # type: ignore[no-untyped-call]
        return loss, seen

"""Medusa heads (arXiv:2401.10774): each predicts a token further on from the target's hidden state alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import HeadBatch, row_weights
from .losses import Distillation, Lesson, Lessons


class MedusaBlock(nn.Module):
    """h + SiLU(W h + b), W and b zero at first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] -> [.., H]."""
        mixed = F.linear(x, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype))
        return x + F.silu(mixed)


class MedusaHeads(nn.Module):
    """`num_heads` heads of `num_layers` blocks each and an output matrix of their own.

    Parameter names are the published checkpoint's: `{head}.{layer}.linear.weight|bias`, `{head}.{num_layers}.weight`.

    Args:
        lm_head: the target's output matrix [V, H], where every head's own one starts.
    """

    def __init__(self, num_heads: int, num_layers: int, lm_head: Tensor) -> None:
        super().__init__()
        self.draft_ids: Tensor | None = None
        vocab, hidden = lm_head.shape
        self.num_heads, self.num_layers = num_heads, num_layers
        for i in range(num_heads):
            out = nn.Linear(hidden, vocab, bias=False)
            with torch.no_grad():
                out.weight.copy_(lm_head)
            self.add_module(str(i), nn.ModuleList([*(MedusaBlock(hidden) for _ in range(num_layers)), out]))

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """Return the logits [.., V] of one head from the target's hidden state [.., H]."""
        parts = list(self.get_submodule(str(head)).children())
        x = hidden
        for block in parts[:-1]:
            x = block(x)
        weight = parts[-1].weight
        assert isinstance(weight, Tensor)
        return F.linear(x, weight.to(x.dtype))

    def predictions(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> list[Tensor]:
        """Return the logits [B, M, V] of the first `unrolls` heads."""
        return [self.logits(i, batch.hidden[:, rows]) for i in range(unrolls)]

    def loss(
        self,
        batch: HeadBatch,
        rows: Tensor,
        unrolls: int,
        decay: float,
        variation: float,
        distil: Distillation,
    ) -> Lesson:
        """Return what the heads say, head i weighing decay^i.

        `unrolls` is the number of heads. Row r gives head i hidden r, which predicts token r+2+i.
        """
        lessons = Lessons(distil, decay, variation)
        hidden = batch.hidden[:, rows]
        for i in range(unrolls):
            lessons.add(self.logits(i, hidden), batch.probs[:, rows + 1 + i], row_weights(batch, rows, i))
        return lessons.done()

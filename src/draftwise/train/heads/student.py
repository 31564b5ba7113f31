"""A small draft model as a student: a Llama with tied embeddings that learns the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwise.train.demo_model import DemoLlama
from draftwise.train.demo_recipe import LlamaShape

from .batch import HeadBatch
from .losses import Distillation, Lesson, Lessons


class DraftStudent(nn.Module):
    """Trained like a head, but from token ids alone.

    Args:
        shape: its sizes; the vocabulary is the target's.
        dtype: to compute in.
    """

    draft_ids: Tensor | None = None

    def __init__(self, shape: LlamaShape, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.llama = DemoLlama(shape, seed)
        self.dtype = dtype

    def predictions(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> list[Tensor]:
        """Return the logits [B, M, V] of drafts 0..unrolls-1 after each row, along the text."""
        logits = self.llama(batch.ids, self.dtype)
        return [logits[:, rows + 1 + i] for i in range(unrolls)]

    def loss(
        self,
        batch: HeadBatch,
        rows: Tensor,
        unrolls: int,
        decay: float,
        variation: float,
        distil: Distillation,
    ) -> Lesson:
        """Return what all tokens say; rows, unrolls and decay are for heads."""
        lessons = Lessons(distil, 1.0, variation)
        weights = ((batch.segments >= 0) & batch.counted).float()
        lessons.add(self.llama(batch.ids, self.dtype), batch.probs, weights)
        return lessons.done()

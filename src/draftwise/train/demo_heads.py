"""The recipe of the heads that ship for the embedded target: EAGLE-3, Medusa and an MTP layer.

Run it with `draftwise train demo-heads`. One pass of the frozen target serves all three. The text is the demo
recipe's, and the target's own continuations of pieces of it: acceptance is about what the target says, not about
what it was taught. See `docs/demo-models.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from draftwise.models.rope import RopeConfig

from .demo_data import Corpus
from .demo_recipe import TARGET
from .demo_teacher import FEATURE_LAYERS, DemoTeacher
from .heads.batch import HeadBatch, block_mask, causal_mask
from .heads.layers import HeadShape
from .heads.medusa import MedusaHeads
from .heads.sequential import Eagle3Head, MtpHead
from .heads.trainer import HeadPlan, HeadRecipe

WINDOW = 512
"""Tokens of a training window."""
BATCH = 4
"""Windows per step."""
OWN_LENGTH = 256
"""Tokens of a prompt with the target's continuation: a window holds two."""
OWN_EVERY = 2
"""One batch of so many is of the target's own text."""
LONG_SHARE = 0.0
"""Last part of the run, with windows of the whole context."""
DRAFT_VOCABULARY = 3072
MEDUSA_HEADS = 3

PLANS = {
    "eagle3": HeadPlan(unrolls=5),
    "mtp": HeadPlan(unrolls=4),
    "medusa": HeadPlan(unrolls=MEDUSA_HEADS),
}


def head_shape() -> HeadShape:
    """Return the sizes of the heads' decoder layer: the target's."""
    return HeadShape(
        hidden_size=TARGET.hidden_size,
        num_heads=TARGET.num_heads,
        num_kv_heads=TARGET.num_kv_heads,
        head_dim=TARGET.head_dim,
        intermediate_size=TARGET.intermediate_size,
        norm_eps=TARGET.norm_eps,
        rope=RopeConfig(kind="default", theta=TARGET.rope_theta, head_dim=TARGET.head_dim),
    )


def build_heads(teacher: DemoTeacher, draft_ids: Tensor, seed: int) -> dict[str, nn.Module]:
    """Return the three heads with their initial weights."""
    shape, matrix = head_shape(), teacher.embedding

    def generator(i: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed * 10 + i)

    return {
        "eagle3": Eagle3Head(
            shape, matrix, matrix, generator(0), num_features=len(FEATURE_LAYERS), draft_ids=draft_ids
        ),
        "mtp": MtpHead(shape, matrix, matrix, generator(1)),
        "medusa": MedusaHeads(MEDUSA_HEADS, 1, matrix),
    }


def draft_vocabulary(corpus: Corpus, own: npt.NDArray[np.uint16], size: int) -> Tensor:
    """Return the most frequent tokens of what is trained on, ascending: int64 [size]."""
    vocab = TARGET.vocab_size
    counts = np.bincount(np.concatenate(corpus.library), minlength=vocab).astype(np.float64)
    counts += 0.5 * np.bincount(np.concatenate(corpus.test), minlength=vocab)
    counts /= counts.sum()
    said = np.bincount(own.ravel(), minlength=vocab).astype(np.float64)
    counts += said / max(1.0, said.sum())
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size])).long()


@dataclass(slots=True)
class DemoHeadData:
    """Batches of library text and of the target's own text.

    Args:
        own: int [n, OWN_LENGTH]: prompts with the target's continuations.
        own_heldout: the same from held-out files, greedy.
    """

    corpus: Corpus
    own: npt.NDArray[np.uint16]
    own_heldout: npt.NDArray[np.uint16]
    teacher: DemoTeacher
    _windows: Iterator[npt.NDArray[np.uint16]] | None = None
    _next: int = -1
    _cache: dict[str, Sequence[HeadBatch]] | None = None

    def batch(self, step: int, recipe: HeadRecipe) -> HeadBatch:
        """Return the batch of 0-based `step`: the last ones have windows as long as the context."""
        steps = recipe.schedule.steps
        if step % OWN_EVERY == OWN_EVERY - 1:
            rng = np.random.Generator(np.random.PCG64([recipe.seed, 1, step]))
            rows = self.own[rng.integers(0, len(self.own), 2 * BATCH)].astype(np.int64)
            return self._batch(torch.from_numpy(rows).view(BATCH, WINDOW), 2, self.teacher)
        text = torch.from_numpy(self._text(step, recipe.seed).astype(np.int64))
        long = LONG_SHARE > 0 and steps > 0 and step >= steps * (1 - LONG_SHARE)
        return self._batch(text.view(-1, 2 * WINDOW if long else WINDOW), 1, self.teacher)

    def _text(self, step: int, seed: int) -> npt.NDArray[np.uint16]:
        """Return windows [BATCH / 2, 2 * WINDOW] for this step, whatever steps were asked for before."""
        if self._windows is None or step < self._next:
            self._windows, self._next = self._all_text(seed), 0
        while True:
            rows = next(self._windows)
            self._next += 1
            if self._next == step + 1:
                return rows

    def _all_text(self, seed: int) -> Iterator[npt.NDArray[np.uint16]]:
        # another seed than the demo recipe's, so that windows are cut elsewhere
        for epoch in self.corpus.window_epochs(2 * WINDOW, seed + 100, 2):
            for start in range(0, len(epoch) - BATCH // 2 + 1, BATCH // 2):
                yield epoch[start : start + BATCH // 2, :-1]

    def _batch(self, ids: Tensor, parts: int, teacher: DemoTeacher) -> HeadBatch:
        tokens = ids.shape[1]
        positions = torch.arange(tokens) % (tokens // parts)
        mask = causal_mask(tokens) if parts == 1 else block_mask(tokens, parts)
        segments = (torch.arange(tokens) // (tokens // parts)).expand(len(ids), -1)
        hidden, features, probs = teacher(ids, positions, mask)
        counted = torch.ones_like(ids, dtype=torch.bool)
        return HeadBatch(ids, positions, mask, segments, counted, hidden, features, probs)

    def heldout(self) -> dict[str, Sequence[HeadBatch]]:
        """Return `own`: greedy continuations after held-out prompts (their prompts not counted), and `text`."""
        if self._cache is None:
            own = torch.from_numpy(self.own_heldout.astype(np.int64))
            said = self._batch(own, 1, self.teacher)
            said.counted[:, : own.shape[1] // 3 - 1] = False
            stream = np.concatenate(self.corpus.heldout)
            starts = np.linspace(0, len(stream) - WINDOW, 12).astype(int)
            rows = np.stack([stream[s : s + WINDOW] for s in starts]).astype(np.int64)
            self._cache = {
                "own": [said],
                "text": [self._batch(torch.from_numpy(rows), 1, self.teacher)],
            }
        return self._cache

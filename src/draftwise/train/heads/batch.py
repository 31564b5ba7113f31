"""The data of a training step, and the relation of a head's rows to tokens and hidden states.

Row r of a head takes (token r+1, hidden r) and predicts token r+2; it rotates by position r. In unroll i the
row has advanced by i tokens: it takes (token r+1+i, its own output of unroll i-1), rotates by position r+i, and is
held against the target's distribution after token r+1+i. Worked example, tokens a b c d e at positions 0..4::

    unroll 0:  row 0 = (b, hidden of a) -> predicts c     row 1 = (c, hidden of b) -> predicts d
    unroll 1:  row 0 = (c, own output)  -> predicts d     row 1 = (d, own output)  -> predicts e

In unroll i, row r sees the keys of unroll 0 up to row r, and of the unrolls 1..i those of its own row only: exactly
what drafting sees, where keys of committed tokens come from the target's hidden states and keys of drafts from the
head's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Tokens with what the target computed from them."""

    ids: Tensor  # [B, S] int64
    positions: Tensor  # [S] int64
    mask: Tensor  # [S, S] float32: 0 where row sees column, else -inf
    segments: Tensor  # [B, S] int64: the document of a token; -1: padding
    counted: Tensor  # [B, S] bool: what is predicted after this token counts
    hidden: Tensor  # [B, S, H] after the target's final norm
    features: Tensor  # [B, S, F] captured layers side by side; F = 0 where no head eats them
    probs: Tensor  # [B, S, V] the target's distribution after each token


def causal_mask(tokens: int) -> Tensor:
    """Return the mask of one document: float32 [tokens, tokens]."""
    return torch.full((tokens, tokens), float("-inf")).triu(1)


def block_mask(tokens: int, parts: int) -> Tensor:
    """Return the mask of `parts` documents of equal length in a row: float32 [tokens, tokens]."""
    part = torch.arange(tokens) // (tokens // parts)
    return torch.where(part[:, None] == part[None, :], causal_mask(tokens), float("-inf"))


def at(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [B, S, ..]: the same ones of every text, `rows` [M], or each text's own, [B, M]; -> [B, M, ..]."""
    if rows.ndim == 1:
        return x[:, rows]
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


def row_weights(batch: HeadBatch, rows: Tensor, step: int) -> Tensor:
    """Return 1 where the prediction of unroll `step` counts, else 0: float32 [B, M] for row numbers `rows` (`at`).

    The row's hidden state and the token it predicts must be of one document. The last token that is predicted may
    be past the end of the window: the target's distribution is known there, the token is not needed.
    """
    first, last = at(batch.segments, rows), at(batch.segments, rows + 1 + step)
    whole = (first == last) & (first >= 0) & at(batch.counted, rows + 1 + step)
    return whole.float()


def chosen_rows(tokens: int, unrolls: int, stride: int, offset: int) -> Tensor:
    """Return the rows that are trained in a window of `tokens`: every `stride`-th one, int64 [M].

    M does not depend on the offset (in 0..stride-1), so that compiled code sees one shape. Neighbouring rows
    teach much the same; the tokens between them still give keys and values.
    """
    count = (tokens - unrolls) // stride
    return torch.arange(count) * stride + offset


def random_rows(
    batch: HeadBatch, unrolls: int, count: int, seed: Sequence[int], part: int = 0, parts: int = 1
) -> Tensor:
    """Return `count` rows of each text, chosen at random among those whose first prediction counts, ascending:
    int64 [B, M], M at most the rows that there are. Where too few count, others fill the places; they weigh nothing.

    Args:
        seed: of the choice; a text's own choice depends on it and on the text's number alone.
        part, parts: the batch is text number `part`, `part + parts`, .. of what the step learns from.
    """
    rows = torch.arange(batch.ids.shape[1] - unrolls)
    counts = row_weights(batch, rows.to(batch.ids.device), 0).cpu()
    chosen = []
    for i, own in enumerate(counts):
        rng = np.random.Generator(np.random.PCG64([*seed, part + i * parts]))
        order = torch.from_numpy(rng.random(len(rows))) + (own == 0)
        chosen.append(order.argsort()[:count].sort().values)
    return torch.stack(chosen).to(batch.ids.device)

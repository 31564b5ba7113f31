"""The work between two passes of a drafter, without the host: rows of the next pass, and the tokens that it reads.

Shapes are those of the largest case, so that a loop over them can be captured: what is too much is padding, whose K/V
goes to a slot that nobody reads, as that of rows past the model's length does.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from draftwise.kernels.triton import device
from draftwise.kernels.triton.availability import LAUNCH
from draftwise.kernels.triton.rows import power_of_two

_PART = 4096

EXCLUDED: Final = -1e4
"""Added to the logits of tokens that a request excludes: nothing in float32, unless a drafter knows no others."""


class DraftSlots(NamedTuple):
    """Where R requests' tokens stand. ``tables`` [R, pages] int32 block ids; a page past them belongs to nobody."""

    tables: Tensor
    block_size: int
    spare_slot: int
    max_position: int  # no row at a later position is stored
    position_offset: int = 0  # from a key to its position; -1 for heads


class NextRows(NamedTuple):
    """One row per request. ``context`` [R] int32: keys before it."""

    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64
    context: Tensor


def next_rows(start: Tensor, length: Tensor, step: int, where: DraftSlots) -> NextRows:
    """The rows that feed draft ``step`` (from 0) of every request: at key ``start + step``.

    Args:
        start: [R] int64, the key of each request's first draft.
        length: [R] int64, drafts that each makes; what is fed behind the last but one is not stored, for it is never
            read.
        step: which draft.
        where: the requests' slots.
    """
    requests, block, tables = start.shape[0], 64, where.tables
    positions, slots = torch.empty((2, requests), dtype=torch.int64, device=start.device)
    rows = NextRows(positions, slots, torch.empty(requests, dtype=torch.int32, device=start.device))
    limits = (tables.stride(0), tables.shape[1], where.position_offset, where.max_position, where.spare_slot)
    device.inputs.next_rows[(-(-requests // block),)](
        start, length, tables, *rows, requests, step, *limits, PAGE=where.block_size, BLOCK=block, **LAUNCH
    )
    return rows


class BestTokens(NamedTuple):
    """The K best of each row, best first; of equals the lowest token first."""

    values: Tensor  # [R, K] float32; -inf: no such token
    tokens: Tensor  # [R, K] int64
    log_totals: Tensor | None  # [R] float32, logarithms of the sums of exp(score)


def best_tokens(
    logits: Tensor,
    count: int = 1,
    *,
    scales: Tensor | None = None,
    keys: Tensor | None = None,
    ids: Tensor | None = None,
    totals: bool = False,
) -> BestTokens:
    """The best tokens of a drafter's rows: draws of chains (``count`` 1), children and candidates of a tree's level.

    Args:
        logits: [R, V] float32; scores are ``scale * logit``, plus noise.
        count: K, 1 to V.
        scales: [R] float32; None: 1.
        keys: [R] int64 (may be strided), `sampling.noise.row_key` as signed words: the Gumbel noise of each token is
            added.
        ids: [V] int64, the target's id of each token, by which noise is keyed and tokens are told; ascending. None: the
            same.
        totals: whether the sums are wanted.
    """
    rows, vocab = logits.shape
    assert 1 <= count <= vocab
    values = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    sums_of_rows = torch.empty(rows, dtype=torch.float32, device=logits.device) if totals else None
    if rows:
        if scales is None:
            scales = torch.ones(rows, dtype=torch.float32, device=logits.device)
        scores, found, sums = _best_of_parts(logits, scales, count, keys, ids, totals)
        parts, padded = scores.shape[1:]
        device.inputs.best_of_all[(rows,)](
            scores,
            found,
            sums,
            tokens if ids is None else ids,
            values,
            tokens,
            sums if sums_of_rows is None else sums_of_rows,
            parts,
            MAPPED=ids is not None,
            SUMS=totals,
            K=count,
            K_PAD=padded,
            PARTS_PAD=power_of_two(parts),
            **LAUNCH,
        )
    return BestTokens(values, tokens, sums_of_rows)


def _best_of_parts(
    logits: Tensor, scales: Tensor, count: int, keys: Tensor | None, ids: Tensor | None, totals: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each part of a row the best scores [R, parts, >= K] and their tokens; if ``totals``, also its sum of
    exp(score - best) [R, parts]."""
    rows, vocab = logits.shape
    part = min(_PART, power_of_two(vocab))
    assert logits.stride(1) == 1 and count <= part, "a part finds all of them"
    sizes = (rows, -(-vocab // part), power_of_two(count))
    scores = torch.empty(sizes, dtype=torch.float32, device=logits.device)
    found = torch.empty_like(scores, dtype=torch.int32)
    sums = torch.empty(sizes[:2], dtype=torch.float32, device=logits.device)
    device.inputs.part_of_best[(rows, sizes[1])](
        logits,
        scales,
        scales if keys is None else keys,
        found if ids is None else ids,
        scores,
        found,
        sums,
        vocab,
        logits.stride(0),
        0 if keys is None else keys.stride(0),
        NOISY=keys is not None,
        MAPPED=ids is not None,
        SUMS=totals,
        K=count,
        K_PAD=sizes[2],
        PART=part,
        **LAUNCH,
    )
    return scores, found, sums


def add_biases(logits: Tensor, at: Tensor, ids: Tensor | None = None) -> Tensor:
    """Add to rows what stands somewhere else, if anything does, in place.

    Args:
        logits: [R * n, Vd] float32, n rows of each request.
        at: [R] int64, the address of a request's row [V] float32 over the target's tokens; 0: there is none.
        ids: [Vd] int64, the target's id of each token; None: the same.

    Returns:
        ``logits``. Minus infinity counts as `EXCLUDED`.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    part, sizes = min(_PART, power_of_two(vocab)), (vocab, logits.stride(0), rows // at.shape[0])
    flags = {"MAPPED": ids is not None, "LEAST": EXCLUDED, "PART": part}
    device.inputs.add_biases[(rows, -(-vocab // part))](
        logits, at, at if ids is None else ids, *sizes, **flags, **LAUNCH
    )
    return logits


def sample_tokens(
    logits: Tensor, q: Tensor, uniforms: Tensor, *, scales: Tensor, ids: Tensor | None = None
) -> Tensor:
    """Draw one token per row from softmax(scale * logits), and keep what it was drawn from.

    Args:
        logits: [R, V] float32.
        q: [R, V] float32, rows may be strided; becomes the distributions.
        uniforms: [R] float64 in [0, 1), may be strided.
        scales: [R] float32.
        ids: [V] int64, the target's id of each token; None: the same.

    Returns:
        Tokens, int64 [R]. A token of probability 0 is never drawn.
    """
    rows, vocab = logits.shape
    assert q.stride(1) == 1 and q.shape == logits.shape
    tops, _, sums = _best_of_parts(logits, scales, 1, None, None, True)
    masses = torch.empty(sums.shape, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    part, parts = min(_PART, power_of_two(vocab)), sums.shape[1]
    options = {"PART": part, "PARTS_PAD": power_of_two(parts), **LAUNCH}
    device.inputs.part_of_softmax[(rows, parts)](
        logits, scales, tops, sums, q, masses, vocab, logits.stride(0), q.stride(0), **options
    )
    strides, kept = (q.stride(0), uniforms.stride(0)), tokens if ids is None else ids
    device.inputs.draw_sampled[(rows,)](
        q, masses, uniforms, kept, tokens, vocab, *strides, parts, MAPPED=ids is not None, **options
    )
    return tokens

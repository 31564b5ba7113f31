"""Verification over [requests, nodes] without a round trip to the host, on chains and trees.

What the kernels know of the requests stands in one table on the device; uniforms are made there, from the keys of
`sampling.noise`. Results stay there too: lengths of accepted paths, the paths, and the tokens that are committed. The
rules, and why they are lossless, are in `verify`, whose plain-torch code is the oracle of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.triton.availability import LAUNCH
from draftwise.kernels.triton.rows import power_of_two
from draftwise.kernels.walk import Walk
from draftwise.names import TYPICAL_DELTA, TYPICAL_EPSILON

FIELDS: Final = 6
"""Fields of a request in `DraftBatch.table`, before its nodes."""

_BLOCK: Final = 2048
_PART: Final = 8192
"""Tokens of the vocabulary that one program looks through; the order of every sum follows from it alone."""
_SCRATCH_BYTES: Final = 64 << 20
"""For what is left of p and q while trees are rejected, at most (unless one request needs more)."""


class DraftBatch(NamedTuple):
    """R requests with up to N nodes each. ``table`` [R, 6 + 3 N] int64: see `draft_table`."""

    table: Tensor
    num_nodes: int


class DraftFields(NamedTuple):
    """One request on the host. ``first_row``: of its root in the logits; its nodes' rows follow.

    ``q_at``: per node the address of the row of q [V] float32, on the device, that it was drawn from; 0: a point mass.
    """

    first_row: int
    seed: int
    sample_index: int
    num_tokens: int  # committed when the step began
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()  # -1: the root
    q_at: Sequence[int] = ()  # empty: all are point masses
    without_replacement: bool = False


def draft_table(requests: Sequence[DraftFields], num_nodes: int | None = None) -> npt.NDArray[np.int64]:
    """The table of a `DraftBatch`, [R, 6 + 3 N] int64: first row, nodes, seed (as a signed word), sample index,
    committed tokens, whether siblings were drawn without replacement; then tokens, parents and addresses, N each.

    ``num_nodes``: N; default: as many as the largest request has.

    Example: one request with first row 4, seed 7 and 10 tokens, nodes (5, 9) below each other, N 2:
    4 2 7 0 10 0 | 5 9 | -1 0 | 0 0.
    """
    most = max((len(request.tokens) for request in requests), default=0)
    nodes = most if num_nodes is None else num_nodes
    assert nodes >= most
    table = np.zeros((len(requests), FIELDS + 3 * nodes), np.int64)
    for row, request in zip(table, requests, strict=True):
        count = len(request.tokens)
        seed = request.seed
        row[:FIELDS] = (
            request.first_row,
            count,
            seed - (1 << 64) if seed >> 63 else seed,
            request.sample_index,
            request.num_tokens,
            request.without_replacement,
        )
        if count:
            row[FIELDS : FIELDS + count] = request.tokens
            row[FIELDS + nodes : FIELDS + nodes + count] = request.parents
            if request.q_at:
                row[FIELDS + 2 * nodes : FIELDS + 2 * nodes + count] = request.q_at
    return table


def new_walk(batch: DraftBatch) -> Walk:
    """Room for the results of a batch."""
    requests, nodes = batch.table.shape[0], batch.num_nodes
    return Walk(
        torch.zeros((requests, 2 * nodes + 2), dtype=torch.int32, device=batch.table.device), batch.num_nodes
    )


def walk_trees(logits: Tensor, batch: DraftBatch, members: Tensor, walk: Walk, *, coupled: bool) -> None:
    """Rules ``greedy`` and ``coupled``: keep drafts while they are the token that the target wants.

    Args:
        logits: [M, V] float32, processed.
        batch: the requests.
        members: [n] int32, which of them are decided.
        walk: where their results go.
        coupled: the target wants argmax(logit + shared Gumbel noise), else argmax(logit); ties go to the lowest id.
    """
    from draftwise.kernels.triton.device import verify as device

    if not members.shape[0]:
        return
    wanted = _wanted(logits, batch, members, noisy=coupled)
    device.walk_trees[(members.shape[0],)](
        batch.table,
        members,
        *wanted,
        walk.packed,
        batch.table.stride(0),
        batch.num_nodes,
        wanted.best.shape[2],
        PARTS_PAD=power_of_two(wanted.best.shape[2]),
        **LAUNCH,
    )


class _Wanted(NamedTuple):
    """The best token behind every root and node, in parts of the vocabulary."""

    best: Tensor  # [R, N + 1, parts] float32
    token: Tensor  # [R, N + 1, parts] int32


def _wanted(
    logits: Tensor, batch: DraftBatch, members: Tensor, *, noisy: bool = False, none: bool = False
) -> _Wanted:
    """``noisy``: of logit + shared Gumbel noise. ``none``: nobody reads it."""
    from draftwise.kernels.triton.device import verify as device

    nodes, vocab = batch.num_nodes, logits.shape[1]
    assert logits.stride(1) == 1 and batch.table.is_contiguous()
    parts = -(-vocab // _PART)
    shape = (batch.table.shape[0], nodes + 1, parts)
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    found = _Wanted(best, torch.empty(shape, dtype=torch.int32, device=logits.device))
    if not none:
        device.wanted_parts[(members.shape[0], nodes + 1, parts)](
            logits,
            batch.table,
            members,
            *found,
            vocab,
            logits.stride(0),
            batch.table.stride(0),
            nodes,
            parts,
            NOISY=noisy,
            PART=_PART,
            BLOCK=_block(vocab),
            **LAUNCH,
        )
    return found


def reject_chains(p: Tensor, batch: DraftBatch, members: Tensor, walk: Walk, *, block: bool) -> None:
    """Rules ``rejection`` (Leviathan et al., arXiv:2211.17192) and ``block`` (Sun et al., arXiv:2403.10444) on chains,
    and plain sampling of requests without nodes.

    Args:
        p: [M, V] float32, dense, the target's distributions.
        batch: the requests; the rows of q that they name must stay until the device has done this.
        members: [n] int32, which of them are decided.
        walk: where their results go.
        block: rule ``block``.
    """
    from draftwise.kernels.triton.device import verify as device

    count, nodes, vocab = members.shape[0], batch.num_nodes, p.shape[1]
    if not count:
        return
    assert p.is_contiguous() and batch.table.is_contiguous()
    ends, numbers = _new_ends(count, p.device)
    stride = batch.table.stride(0)
    if not block:
        device.judge_chains[(count,)](
            p, batch.table, members, walk.packed, ends, numbers, vocab, stride, nodes, **LAUNCH
        )
    else:
        masses = torch.empty((count, max(1, nodes)), dtype=torch.float64, device=p.device)
        if nodes > 1:
            device.block_masses[(count, nodes - 1)](
                p, batch.table, members, masses, vocab, stride, nodes, BLOCK=_block(vocab), **LAUNCH
            )
        device.judge_blocks[(count,)](
            p, batch.table, members, masses, walk.packed, ends, numbers, vocab, stride, nodes, **LAUNCH
        )
    _draw(p, p, ends, numbers, members, walk)


def reject_trees(p: Tensor, batch: DraftBatch, members: Tensor, walk: Walk) -> None:
    """Rejection among siblings (SpecInfer, arXiv:2305.09781; without replacement: Sequoia, arXiv:2402.12374), for trees
    under rules ``rejection`` and ``block``; arguments as in `reject_chains`."""
    from draftwise.kernels.triton.device import verify as device

    nodes, vocab = batch.num_nodes, p.shape[1]
    assert p.is_contiguous() and batch.table.is_contiguous()
    together = max(1, _SCRATCH_BYTES // (12 * vocab))
    for some in torch.split(members, together) if members.shape[0] else ():
        count = some.shape[0]
        scratch = torch.empty((count, 3, vocab), dtype=torch.float32, device=p.device)
        ends, numbers = _new_ends(count, p.device)
        device.reject_trees[(count,)](
            p,
            batch.table,
            some,
            scratch,
            walk.packed,
            ends,
            numbers,
            vocab,
            batch.table.stride(0),
            nodes,
            BLOCK=_block(vocab),
            **LAUNCH,
        )
        _draw(p, scratch, ends, numbers, some, walk)


def keep_at_rates(
    logits: Tensor, batch: DraftBatch, members: Tensor, walk: Walk, rates: Tensor, p: Tensor | None
) -> None:
    """Rule ``synthetic``; arguments as in `walk_trees`.

    Args:
        rates: [n] float64, see `verify.rates`.
        p: [M, V] float32, that the last token is drawn from; None: it is the most likely one.
    """
    from draftwise.kernels.triton.device import rates as device

    count, nodes, sampled = members.shape[0], batch.num_nodes, p is not None
    wanted = _wanted(logits, batch, members, none=sampled)
    parts = wanted.best.shape[2]
    ends, numbers = _new_ends(count, logits.device)
    device.keep_at_rates[(count,)](
        batch.table,
        members,
        rates,
        *wanted,
        ends,
        numbers,
        walk.packed,
        rates.shape[0],
        batch.table.stride(0),
        nodes,
        parts,
        SAMPLED=sampled,
        PARTS_PAD=power_of_two(parts),
        **LAUNCH,
    )
    if p is not None:
        _draw(p, p, ends, numbers, members, walk)


def keep_typical(
    logits: Tensor, p: Tensor, batch: DraftBatch, members: Tensor, walk: Walk, *, sampled: bool
) -> None:
    """Rule ``typical`` (Medusa, arXiv:2401.10774); arguments as in `walk_trees` and `keep_at_rates`. ``sampled``: the
    last token is drawn from p."""
    from draftwise.kernels.triton.device import rates as device

    count, nodes, vocab = members.shape[0], batch.num_nodes, logits.shape[1]
    assert p.is_contiguous()
    wanted = _wanted(logits, batch, members, none=sampled)
    parts, stride = wanted.best.shape[2], batch.table.stride(0)
    entropies = torch.empty((count, nodes + 1), dtype=torch.float64, device=p.device)
    device.entropies[(count, nodes + 1)](
        logits,
        p,
        batch.table,
        members,
        entropies,
        vocab,
        logits.stride(0),
        stride,
        nodes,
        BLOCK=_block(vocab),
        **LAUNCH,
    )
    ends, numbers = _new_ends(count, p.device)
    device.keep_typical[(count,)](
        p,
        batch.table,
        members,
        entropies,
        *wanted,
        ends,
        numbers,
        walk.packed,
        vocab,
        stride,
        nodes,
        parts,
        EPSILON=TYPICAL_EPSILON,
        DELTA=TYPICAL_DELTA,
        SAMPLED=sampled,
        PARTS_PAD=power_of_two(parts),
        BLOCK=power_of_two(nodes + 1),
        **LAUNCH,
    )
    if sampled:
        _draw(p, p, ends, numbers, members, walk)


def _block(vocab: int) -> int:
    return min(_BLOCK, power_of_two(vocab))


def _new_ends(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The source of each last token: row of p, or of the scratch (-1, -2, ...), address of the row of q that is
    taken away (0: none), token that is left out (-1: none); and float64: the uniform, a factor of p."""
    return (
        torch.empty((count, 3), dtype=torch.int64, device=device),
        torch.empty((count, 2), dtype=torch.float64, device=device),
    )


def _draw(p: Tensor, scratch: Tensor, ends: Tensor, numbers: Tensor, members: Tensor, walk: Walk) -> None:
    """Draw the last tokens by inverse CDF: which part of the vocabulary, then which token in it."""
    from draftwise.kernels.triton.device import draws as device

    count, vocab = members.shape[0], p.shape[1]
    parts = -(-vocab // _PART)
    masses = torch.empty((count, parts, 2), dtype=torch.float64, device=p.device)
    device.residual_masses[(count, parts)](
        p, scratch, ends, numbers, masses, vocab, parts, PART=_PART, BLOCK=_block(vocab), **LAUNCH
    )
    device.draw_last[(count,)](
        p,
        scratch,
        ends,
        numbers,
        masses,
        members,
        walk.packed,
        vocab,
        walk.num_nodes,
        parts,
        PART=_PART,
        BLOCK=_block(vocab),
        **LAUNCH,
    )

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

from draftwise.kernels.triton import device
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
    """R requests with up to N nodes each, and where results go. ``table`` [R, 6 + 3 N] int64, dense: see
    `draft_table`."""

    table: Tensor
    walk: Walk

    @classmethod
    def of(cls, table: Tensor, num_nodes: int) -> DraftBatch:
        """With room for the results."""
        shape = table.shape[0], 2 * num_nodes + 2
        return cls(table, Walk(torch.zeros(shape, dtype=torch.int32, device=table.device), num_nodes))


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


def walk_trees(logits: Tensor, batch: DraftBatch, members: Tensor, *, coupled: bool) -> None:
    """Rules ``greedy`` and ``coupled``: keep drafts while they are the token that the target wants.

    Args:
        logits: [M, V] float32, processed.
        batch: the requests.
        members: [n] int32, which of them are decided.
        coupled: the target wants argmax(logit + shared Gumbel noise), else argmax(logit); ties go to the lowest id.
    """
    (table, walk), wanted = batch, _wanted(logits, batch, members, noisy=coupled)
    parts = wanted.best.shape[2]
    device.verify.walk_trees[(len(members),)](
        table, members, walk.packed, *wanted, walk.num_nodes, parts, PARTS_PAD=power_of_two(parts), **LAUNCH
    )


class _Wanted(NamedTuple):
    """The best token behind every root and node, in parts of the vocabulary."""

    best: Tensor  # [R, N + 1, parts] float32
    token: Tensor  # [R, N + 1, parts] int32


def _wanted(
    logits: Tensor, batch: DraftBatch, members: Tensor, *, noisy: bool = False, none: bool = False
) -> _Wanted:
    """``noisy``: of logit + shared Gumbel noise. ``none``: nobody reads it."""
    table, nodes, vocab = batch.table, batch.walk.num_nodes, logits.shape[1]
    assert logits.stride(1) == 1 and table.is_contiguous()
    parts = -(-vocab // _PART)
    shape = (table.shape[0], nodes + 1, parts)
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    found = _Wanted(best, torch.empty(shape, dtype=torch.int32, device=logits.device))
    if not none:
        strides, sizes = (vocab, logits.stride(0), nodes), {"PART": _PART, "BLOCK": _block(vocab)}
        device.verify.wanted_parts[(len(members), nodes + 1, parts)](
            logits, table, members, *found, *strides, NOISY=noisy, **sizes, **LAUNCH
        )
    return found


def reject_chains(p: Tensor, batch: DraftBatch, members: Tensor, *, block: bool) -> None:
    """Rules ``rejection`` (Leviathan et al., arXiv:2211.17192) and ``block`` (Sun et al., arXiv:2403.10444) on chains,
    and plain sampling of requests without nodes.

    Args:
        p: [M, V] float32, dense, the target's distributions.
        batch: the requests; the rows of q that they name must stay until the device has done this.
        members: [n] int32, which of them are decided.
        block: rule ``block``.
    """
    (table, walk), count, vocab = batch, len(members), p.shape[1]
    nodes, ends = walk.num_nodes, _new_ends(members)
    given = (p, table, members, walk.packed, *ends)
    assert p.is_contiguous() and table.is_contiguous()
    if not block:
        device.verify.judge_chains[(count,)](*given, vocab, nodes, **LAUNCH)
    else:
        masses = torch.empty((count, max(1, nodes)), dtype=torch.float64, device=p.device)
        if nodes > 1:
            device.verify.block_masses[(count, nodes - 1)](
                p, table, members, masses, vocab, nodes, BLOCK=_block(vocab), **LAUNCH
            )
        device.verify.judge_blocks[(count,)](*given, masses, vocab, nodes, **LAUNCH)
    _draw(p, p, *ends, members, walk)


def reject_trees(p: Tensor, batch: DraftBatch, members: Tensor) -> None:
    """Rejection among siblings (SpecInfer, arXiv:2305.09781; without replacement: Sequoia, arXiv:2402.12374), for trees
    under rules ``rejection`` and ``block``; arguments as in `reject_chains`."""
    (table, walk), vocab = batch, p.shape[1]
    assert p.is_contiguous() and table.is_contiguous()
    for some in torch.split(members, max(1, _SCRATCH_BYTES // (12 * vocab))):
        scratch = torch.empty((len(some), 3, vocab), dtype=torch.float32, device=p.device)
        ends, sizes = _new_ends(some), (vocab, walk.num_nodes)
        device.verify.reject_trees[(len(some),)](
            p, table, some, walk.packed, *ends, scratch, *sizes, BLOCK=_block(vocab), **LAUNCH
        )
        _draw(p, scratch, *ends, some, walk)


def keep_at_rates(
    logits: Tensor, batch: DraftBatch, members: Tensor, rates: Tensor, p: Tensor | None
) -> None:
    """Rule ``synthetic``; arguments as in `walk_trees`.

    Args:
        rates: [n] float64, see `verify.rates`.
        p: [M, V] float32, that the last token is drawn from; None: it is the most likely one.
    """
    (table, walk), sampled = batch, p is not None
    wanted, ends = _wanted(logits, batch, members, none=sampled), _new_ends(members)
    parts = wanted.best.shape[2]
    sizes, flags = (len(rates), walk.num_nodes, parts), {"SAMPLED": sampled, "PARTS_PAD": power_of_two(parts)}
    device.rates.keep_at_rates[(len(members),)](
        table, members, walk.packed, *ends, rates, *wanted, *sizes, **flags, **LAUNCH
    )
    if p is not None:
        _draw(p, p, *ends, members, walk)


def keep_typical(logits: Tensor, p: Tensor, batch: DraftBatch, members: Tensor, *, sampled: bool) -> None:
    """Rule ``typical`` (Medusa, arXiv:2401.10774); arguments as in `walk_trees` and `keep_at_rates`. ``sampled``: the
    last token is drawn from p."""
    (table, walk), count, vocab = batch, len(members), logits.shape[1]
    assert p.is_contiguous()
    nodes, ends = walk.num_nodes, _new_ends(members)
    wanted = _wanted(logits, batch, members, none=sampled)
    parts, stride = wanted.best.shape[2], logits.stride(0)
    entropies = torch.empty((count, nodes + 1), dtype=torch.float64, device=p.device)
    device.rates.entropies[(count, nodes + 1)](
        logits, p, table, members, entropies, vocab, stride, nodes, BLOCK=_block(vocab), **LAUNCH
    )
    device.rates.keep_typical[(count,)](
        p,
        table,
        members,
        walk.packed,
        *ends,
        entropies,
        *wanted,
        vocab,
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
        _draw(p, p, *ends, members, walk)


def _block(vocab: int) -> int:
    return min(_BLOCK, power_of_two(vocab))


def _new_ends(members: Tensor) -> tuple[Tensor, Tensor]:
    """The source of each last token: row of p, or of the scratch (-1, -2, ...), address of the row of q that is
    taken away (0: none), token that is left out (-1: none); and float64: the uniform, a factor of p."""
    return (
        torch.empty((len(members), 3), dtype=torch.int64, device=members.device),
        torch.empty((len(members), 2), dtype=torch.float64, device=members.device),
    )


def _draw(p: Tensor, scratch: Tensor, ends: Tensor, numbers: Tensor, members: Tensor, walk: Walk) -> None:
    """Draw the last tokens by inverse CDF: which part of the vocabulary, then which token in it."""
    count, vocab = len(members), p.shape[1]
    parts, given = -(-vocab // _PART), (p, scratch, ends, numbers)
    options = {"PART": _PART, "BLOCK": _block(vocab), **LAUNCH}
    masses = torch.empty((count, parts, 2), dtype=torch.float64, device=p.device)
    device.draws.residual_masses[(count, parts)](*given, masses, vocab, **options)
    device.draws.draw_last[(count,)](
        *given, masses, members, walk.packed, vocab, walk.num_nodes, parts, **options
    )

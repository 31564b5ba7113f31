"""Whether what a proposer answered is a proposal. One from outside may err: that is its failure, not the engine's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import index

import torch

from draftwise.propose.base import DraftRow, Proposer
from draftwise.propose.delegating import DelegatingProposer
from draftwise.types import Proposal, chain_parents, tree_depth

_DRAWS = frozenset({"independent", "without_replacement", "fixed"})
_TOLERANCE = 1e-3
"""How far a row of q may be from a sum of 1: rounding is a hundred times less."""


def are_sound(proposals: Sequence[Proposal], rows: Sequence[DraftRow], vocab_size: int) -> bool:
    """Whether all of these may be proposed as they are: what `checked` says of each, in one look at their tokens. False
    says nothing. For the package's own drafters. Raises ValueError as `checked` does."""
    tokens: list[int] = []
    for proposal, row in zip(proposals, rows, strict=True):
        if proposal.__class__ is not Proposal:
            return False
        own, parents = proposal.tokens, proposal.parents
        n = len(own)
        if not n and not parents:
            continue
        depth = n if parents is chain_parents(n) else _depth(parents)
        if n > row.budget or depth > row.max_depth or len(parents) != n:
            return False
        tokens += own
        if proposal.q is not None:
            _check_q(proposal, proposal.q, vocab_size)
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size)


@functools.lru_cache(maxsize=1024)
def _depth(parents: tuple[int, ...]) -> int:
    """The depth of the deepest node, cached because requests mostly share shapes. Raises ValueError for no tree."""
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"node {i} has parent {parent}, which does not precede it")
    return tree_depth(parents)


def checked(
    proposal: Proposal, row: DraftRow, vocab_size: int, device: torch.device, *, foreign: bool
) -> Proposal:
    """The proposal, its tokens and parents as tuples of int.

    Args:
        proposal: of anybody.
        row: what it was asked for.
        vocab_size: of the target.
        device: where q has to be.
        foreign: of a drafter that is not the package's own: look at types and at the values of q, too. That takes some
            microseconds, and reading q makes a GPU wait.

    Raises:
        TypeError, ValueError, AttributeError: it is none, or not one for this row.
    """
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{type(proposal).__name__} is no Proposal")
    tokens, parents = proposal.tokens, proposal.parents
    n = len(tokens)
    if not n and not parents:
        return proposal
    if n > row.budget or len(parents) != n:
        raise ValueError(f"{n} tokens, {len(parents)} parents, budget {row.budget}")
    if foreign and not (_is_plain(tokens) and _is_plain(parents)):
        tokens, parents = tuple(map(index, tokens)), tuple(map(index, parents))
        proposal = Proposal(tokens, parents, proposal.method, proposal.draw, proposal.q, proposal.q_rows)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"tokens {tokens}, some of them outside of the vocabulary")
    depth = n
    if parents is not chain_parents(n):
        depth = _depth(parents)
    if depth > row.max_depth:
        raise ValueError(f"a node has depth {depth}, allowed are {row.max_depth}")
    if proposal.q is not None:
        _check_q(proposal, proposal.q, vocab_size)
    if foreign:
        _check_foreign(proposal, device)
    return proposal


def _is_plain(numbers: Sequence[object]) -> bool:
    return type(numbers) is tuple and set(map(type, numbers)) == {int}


def _check_q(proposal: Proposal, q: torch.Tensor, vocab_size: int) -> None:
    if len(proposal.q_rows) != len(proposal.tokens):
        raise ValueError(f"{len(proposal.q_rows)} q_rows for {len(proposal.tokens)} tokens")
    rows, width = q.shape
    if min(proposal.q_rows) < 0 or max(proposal.q_rows) >= rows or width != vocab_size:
        raise ValueError(f"q_rows {proposal.q_rows} of a q of {rows} rows of {width} tokens")


def _check_foreign(proposal: Proposal, device: torch.device) -> None:
    if type(proposal.method) is not str or proposal.draw not in _DRAWS:
        raise ValueError(f"method {proposal.method!r}, draw {proposal.draw!r}")
    q = proposal.q
    if q is None:
        return
    if (
        q.dtype != torch.float32
        or q.layout != torch.strided
        or q.device.type != device.type
        or q.requires_grad
    ):
        raise ValueError(
            f"q is {q.dtype} on {q.device} ({q.layout}, requires_grad {q.requires_grad}); expected plain float32 on "
            f"{device.type}"
        )
    if not _is_plain(proposal.q_rows):
        raise TypeError(f"q_rows is not a tuple of whole numbers: {proposal.q_rows}")
    used = q[sorted(set(proposal.q_rows))]
    least, sums = float(used.min()), used.sum(dim=-1)
    # not (a <= b) instead of a > b: it is true of nan, too
    if not (least >= 0.0 and float((sums - 1.0).abs().max()) <= _TOLERANCE):
        raise ValueError(
            f"q is not a distribution: its least value is {least}, rows add up to {sums.tolist()}"
        )


def is_foreign(proposer: Proposer) -> bool:
    """Whether types and the values of q are looked at. The package's own drafters draw from what a softmax gave: where
    that is not finite, nothing can be drawn, and the token says so."""
    while isinstance(proposer, DelegatingProposer):
        if not type(proposer).__module__.startswith("draftwise."):
            return True
        proposer = proposer.inner
    return not type(proposer).__module__.startswith("draftwise.")

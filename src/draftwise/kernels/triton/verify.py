"""Verification over [requests, nodes] without a round trip to the host: rules greedy, coupled and rejection (chains).

Requests are padded to N nodes. Results stay on the device: lengths of accepted paths, and the tokens that are
committed. The rules, and why they are lossless, are in `verify`; noise is that of `sampling.noise`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.kernels.triton.availability import LAUNCH

_BLOCK = 1024


class Walk(NamedTuple):
    """What requests commit. Entries behind a path's length, or behind the last token, mean nothing."""

    accepted: Tensor  # [R] int32, lengths of the accepted paths
    paths: Tensor  # [R, N] int32, their nodes
    tokens: Tensor  # [R, N + 1] int64, their tokens, then the one that follows


def argmax_rows(logits: Tensor, noise_keys: Tensor | None = None) -> Tensor:
    """``logits`` [M, V] float32 -> the most likely token of each row, int64 [M]; ties go to the lowest id.

    ``noise_keys`` [M] int64: `sampling.noise.row_key` of each row as a signed word; the Gumbel noise of each token is
    added to its logit first (rule ``coupled``, with keys of the SHARED stream).
    """
    from draftwise.kernels.triton.device import verify as device

    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        assert logits.stride(1) == 1
        keys = out if noise_keys is None else noise_keys
        device.argmax_rows[(rows,)](
            logits, keys, out, vocab, logits.stride(0), NOISY=noise_keys is not None, BLOCK=_BLOCK, **LAUNCH
        )
    return out


def walk_trees(tokens: Tensor, parents: Tensor, counts: Tensor, wanted: Tensor) -> Walk:
    """Rules ``greedy`` and ``coupled``: keep drafts while they are the token that the target wants.

    Args:
        tokens: [R, N] int64, draft tokens.
        parents: [R, N] int32, node indices, -1 for children of the root.
        counts: [R] int32, nodes of each request.
        wanted: [R, N + 1] int64, the target's token after the root and after each node (`argmax_rows`).
    """
    from draftwise.kernels.triton.device import verify as device

    requests, nodes = tokens.shape
    walk = _empty(tokens)
    if requests:
        device.walk_trees[(requests,)](
            tokens, parents, counts, wanted, walk.paths, walk.accepted, walk.tokens, nodes, **LAUNCH
        )
    return walk


def reject_chains(
    p: Tensor,
    q: Tensor | None,
    first_rows: Tensor,
    q_rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    accept: Tensor,
    recover: Tensor,
) -> Walk:
    """Rule ``rejection`` on chains (Leviathan et al., arXiv:2211.17192).

    Args:
        p: [M, V] float32, the target's distributions; request r's root has row ``first_rows[r]``, nodes follow.
        q: [Q, V] float32, the drafter's; node i of request r was drawn from row ``q_rows[r] + i``.
        first_rows: [R] int64.
        q_rows: [R] int64; -1: the drafts of this request are point masses.
        tokens: [R, N] int64, draft tokens.
        counts: [R] int32, drafts of each request.
        accept: [R, N] float64, the uniform in [0, 1) that judges each draft.
        recover: [R, N + 1] float64, the uniform that draws the last token if so many drafts were kept.

    Returns:
        Chains: ``paths`` are 0, 1, 2, ... A last token of -1: the target's distribution has no weight.
    """
    from draftwise.kernels.triton.device import verify as device

    requests, nodes = tokens.shape
    walk = _empty(tokens)
    walk.paths.copy_(torch.arange(nodes, dtype=torch.int32, device=tokens.device).expand(requests, nodes))
    if requests:
        vocab = p.shape[1]
        assert p.is_contiguous() and (q is None or (q.is_contiguous() and q.shape[1] == vocab))
        device.reject_chains[(requests,)](
            p,
            p if q is None else q,
            first_rows,
            q_rows,
            tokens,
            counts,
            accept,
            recover,
            walk.accepted,
            walk.tokens,
            vocab,
            nodes,
            BLOCK=_BLOCK,
            **LAUNCH,
        )
    return walk


def _empty(tokens: Tensor) -> Walk:
    requests, nodes = tokens.shape
    return Walk(
        torch.zeros(requests, dtype=torch.int32, device=tokens.device),
        torch.zeros((requests, nodes), dtype=torch.int32, device=tokens.device),
        torch.zeros((requests, nodes + 1), dtype=torch.int64, device=tokens.device),
    )

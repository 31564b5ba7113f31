"""Drawing tokens: inverse-CDF draws from a distribution, and the draws that drafters make.

A drafter's token must come from the very distribution its proposal reports, so both are made here, from one
float32 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from draftwise.sampling.logits import LogitsRow, process
from draftwise.sampling.noise import DRAFT, SHARED, NoiseKey, gumbel, uniform
from draftwise.sampling.state import SamplingState
from draftwise.types import DrawKind

DraftSampleMethod = Literal["probabilistic", "greedy"]

_POINT_MASS_RULES = frozenset({"greedy", "typical", "synthetic"})
"""Rules that never look at q: their best proposal is the drafter's most likely token."""

_BELOW_ONE = 1.0 - 2.0**-52
"""Largest uniform used: total * u then stays below total after rounding, for every float64 total."""


def draws_from_q(state: SamplingState, rule: str, method: DraftSampleMethod = "probabilistic") -> bool:
    """Whether a drafter samples this request's tokens from q, and so has to report q in its proposal.

    Otherwise they are point masses (``Proposal.q is None``): argmax, or the coupled draw, which is a function
    of the shared noise.
    """
    return (
        method == "probabilistic"
        and not state.is_greedy
        and rule != "coupled"
        and rule not in _POINT_MASS_RULES
    )


def pick(weights: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Inverse CDF: one index per row of ``weights`` [R, V] float32 >= 0, with probability weight / row sum.

    Sums run in float64, so that a token of probability 1e-12 among 150k keeps its share. A token of weight 0
    is never picked; a row without weight gives -1.

    Example: weights (.5, 0, .5), u = .5: sums (.5, .5, 1), the first sum above .5 * 1 is at index 2.
    """
    if weights.device.type == "cpu":
        out = []
        for row, u in zip(weights.numpy(), uniforms, strict=True):
            sums = row.cumsum(dtype=np.float64)
            total = sums[-1]
            out.append(
                int(sums.searchsorted(min(u, _BELOW_ONE) * total, side="right")) if total > 0.0 else -1
            )
        return out
    sums_t = weights.cumsum(dim=-1, dtype=torch.float64)
    at = torch.tensor([min(u, _BELOW_ONE) for u in uniforms], dtype=torch.float64, device=weights.device)
    total_t = sums_t[:, -1]
    found = torch.searchsorted(sums_t, (at * total_t)[:, None], right=True).squeeze(1)
    picked: list[int] = torch.where(total_t > 0, found, -1).tolist()
    return picked


def draft_tokens(
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    *,
    rules: Sequence[str],
    positions: Sequence[int],
    nodes: Sequence[int],
    bases: Sequence[int],
    method: DraftSampleMethod = "probabilistic",
    vocab_map: torch.Tensor | None = None,
) -> tuple[list[int], torch.Tensor | None]:
    """One draft token per row, and the distributions they were drawn from.

    ``logits`` [R, V] float (raw; consumed) or, with ``vocab_map`` (int64 [V'], the target's id of each draft
    token), [R, V']. Per row: the request's rule, the token's position in the sequence (a node of depth d
    stands at num_tokens - 1 + d), its node index in the proposal, and the committed tokens at the step's start.

    Returns target token ids, and q float32 [R, V] over the target's vocabulary, or None if no row was sampled.
    Row i of q counts only where `draws_from_q` says so; the other rows are point masses.
    """
    kinds = [_kind(row.state, rule, method) for row, rule in zip(rows, rules, strict=True)]
    greedy_only = all(kind == "argmax" for kind in kinds)
    if greedy_only and not any(row.state.needs_processing or row.mask is not None for row in rows):
        best = logits.argmax(dim=-1)
        plain: list[int] = (best if vocab_map is None else vocab_map[best]).tolist()
        return plain, None
    processed = _processed(logits, rows, vocab_map)
    if greedy_only:
        processed_best: list[int] = processed.argmax(dim=-1).tolist()
        return processed_best, None

    tokens = [-1] * len(rows)
    q = None
    for kind in ("argmax", "coupled", "sampled"):
        members = [i for i, k in enumerate(kinds) if k == kind]
        if not members:
            continue
        part = processed if len(members) == len(rows) else processed[members]
        if kind == "argmax":
            drawn = part.argmax(dim=-1).tolist()
        elif kind == "coupled":
            keys = [_shared_key(rows[i].state, positions[i]) for i in members]
            drawn = _with_noise(part, keys, vocab_map, 1)[0].squeeze(1).tolist()
        else:
            q_part = part.softmax(dim=-1)
            drawn = pick(
                q_part,
                [
                    uniform(
                        rows[i].state.seed,
                        rows[i].state.sample_index,
                        DRAFT,
                        positions[i],
                        nodes[i],
                        bases[i],
                    )
                    for i in members
                ],
            )
            if len(members) == len(rows):
                q = q_part
            else:
                q = torch.zeros_like(processed)
                q[members] = q_part
        for i, token in zip(members, drawn, strict=True):
            tokens[i] = token
    return tokens, q


@dataclass(frozen=True, slots=True)
class Children:
    """Siblings drawn below several parents; entry i belongs to row i of the call."""

    tokens: list[list[int]]  # target ids in drawing order
    draws: list[DrawKind]  # "without_replacement": report the row of q; "fixed": a point mass
    q: torch.Tensor | None  # [R, V] float32 over the target's vocabulary; None if no row was sampled


def draft_children(
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    *,
    rules: Sequence[str],
    positions: Sequence[int],
    parents: Sequence[int],
    bases: Sequence[int],
    counts: Sequence[int],
    method: DraftSampleMethod = "probabilistic",
    vocab_map: torch.Tensor | None = None,
) -> Children:
    """``counts[i]`` distinct children below each parent node, for trees; arguments as in `draft_tokens`.

    The m largest of log q + Gumbel noise are a sample of m without replacement, in drawing order (Kool, van
    Hoof, Welling, arXiv:1903.06059); with the shared noise they are the children that match the coupled
    rule's token most often; without noise the m most likely tokens. ``positions`` are the children's,
    ``parents`` the parent's node index (-1: the root). Fewer children come back where fewer tokens have
    probability; that depends on q alone, so dropping the rest is lossless.
    """
    kinds = [_kind(row.state, rule, method) for row, rule in zip(rows, rules, strict=True)]
    processed = _processed(logits, rows, vocab_map)
    width = min(max(counts), processed.shape[1] if vocab_map is None else vocab_map.shape[0])
    tokens: list[list[int]] = [[] for _ in rows]
    for kind in ("argmax", "coupled", "sampled"):
        members = [i for i, k in enumerate(kinds) if k == kind]
        if not members:
            continue
        part = processed if len(members) == len(rows) else processed[members]
        keys: list[NoiseKey] | None = None
        if kind == "coupled":
            keys = [_shared_key(rows[i].state, positions[i]) for i in members]
        elif kind == "sampled":
            keys = [
                NoiseKey(
                    rows[i].state.seed, rows[i].state.sample_index, DRAFT, positions[i], parents[i], bases[i]
                )
                for i in members
            ]
        ids, scores = _with_noise(part, keys, vocab_map, width)
        for i, row_ids, row_scores in zip(members, ids.tolist(), scores.tolist(), strict=True):
            tokens[i] = [t for t, s in zip(row_ids, row_scores, strict=True) if s > float("-inf")][
                : counts[i]
            ]
    sampled = any(kind == "sampled" for kind in kinds)
    return Children(
        tokens,
        ["without_replacement" if kind == "sampled" else "fixed" for kind in kinds],
        processed.softmax(dim=-1) if sampled else None,
    )


def _kind(
    state: SamplingState, rule: str, method: DraftSampleMethod
) -> Literal["argmax", "coupled", "sampled"]:
    if state.is_greedy or method == "greedy" or rule in _POINT_MASS_RULES:
        return "argmax"
    return "coupled" if rule == "coupled" else "sampled"


def _shared_key(state: SamplingState, position: int) -> NoiseKey:
    return NoiseKey(state.seed, state.sample_index, SHARED, position)


def _processed(
    logits: torch.Tensor, rows: Sequence[LogitsRow], vocab_map: torch.Tensor | None
) -> torch.Tensor:
    """Processed logits [R, V] float32 over the target's vocabulary.

    A draft never fails a request: where its logits processor raises, the row stays without it, and where
    nothing is left to draw (a reduced vocabulary without one allowed token), every token is equally likely.
    Both are honest distributions, and the target decides.
    """
    logits = logits.float()
    if vocab_map is not None:
        full = logits.new_full((logits.shape[0], rows[0].state.vocab_size), float("-inf"))
        full[:, vocab_map] = logits
        logits = full
    processed = process(logits, rows, errors={})
    if any(row.mask is not None or row.state.can_exclude for row in rows):
        dead = processed.amax(dim=-1, keepdim=True) == float("-inf")
        processed.masked_fill_(dead, 0.0)
    return processed


def _with_noise(
    processed: torch.Tensor, keys: Sequence[NoiseKey] | None, vocab_map: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids and scores [R, width] of the largest (log q + noise); noise is made only for tokens that
    the drafter has."""
    scores = processed if vocab_map is None else processed[:, vocab_map]
    if keys is not None:
        scores = scores + gumbel(keys, processed.shape[1], processed.device, vocab_map)
    if width == 1:
        values, index = scores.max(dim=-1, keepdim=True)
    else:
        values, index = scores.topk(width, dim=-1)
    return (index if vocab_map is None else vocab_map[index]), values

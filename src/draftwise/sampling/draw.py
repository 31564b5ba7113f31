"""Drawing tokens: inverse-CDF draws from a distribution, and the draws that drafters make.

A drafter's token must come from the very distribution its proposal reports, so both are made here, from one
float32 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from draftwise.names import DRAFT, SHARED
from draftwise.sampling.logits import LogitsRow, process
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.sampling.rows import argmax_rows, top_rows
from draftwise.sampling.state import SamplingState
from draftwise.transfer import to_device
from draftwise.types import DrawKind

DraftSampleMethod = Literal["probabilistic", "greedy"]

POINT_MASS_RULES = frozenset({"greedy", "typical", "synthetic"})
"""Rules that never look at q: their best proposal is the drafter's most likely token."""

_BELOW_ONE = 1.0 - 2.0**-52
"""Largest uniform used: total * u then stays below total after rounding, for every float64 total."""


_LEAST_LOG_RATIO = -70.0
"""See `raise_tail`. Shared by a million tokens it is still far above float32's least normal number, exp(-87.3)."""

_BLOCK = 64
_PICK_TOGETHER = 6
"""Rows from which on array operations over all of them take less time than a loop."""
_HOST_LIMIT = 1 << 16
"""Weights that are copied to the host whole; of larger ones only the blocks that are picked from."""


def draws_from_q(state: SamplingState, rule: str, method: DraftSampleMethod = "probabilistic") -> bool:
    """Whether a drafter samples this request's tokens from q, and so has to report q in its proposal.

    Otherwise they are point masses (``Proposal.q is None``): argmax, or the coupled draw, which is a function
    of the shared noise.
    """
    return (
        method == "probabilistic"
        and not state.is_greedy
        and rule != "coupled"
        and rule not in POINT_MASS_RULES
    )


def pick(weights: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """Inverse CDF: one index per row of ``weights`` [R, V] float32 >= 0, with probability weight / row sum.

    Sums over blocks run in float64, so that a token of probability 1e-12 among 150k keeps its share. A token of
    weight 0 is never picked; a row without weight gives -1.

    Example: weights (.5, 0, .5), u = .5: sums (.5, .5, 1), the first sum above .5 * 1 is at index 2.

    Two levels, for a running sum cannot be vectorised: which block of 64 tokens, then which token in it.
    """
    rows, vocab = weights.shape
    full = vocab - vocab % _BLOCK
    blocks = weights[:, :full].reshape(rows, full // _BLOCK, _BLOCK).sum(dim=-1)
    if full < vocab:
        blocks = torch.cat([blocks, weights[:, full:].sum(dim=-1, keepdim=True)], dim=1)
    block_sums = blocks.cumsum(dim=-1, dtype=torch.float64).cpu().numpy()
    if rows >= _PICK_TOGETHER and weights.device.type == "cpu":
        return _pick_together(weights.numpy(), block_sums, uniforms)
    values = weights.cpu().numpy() if rows * vocab <= _HOST_LIMIT or weights.device.type == "cpu" else None
    out = []
    for r, u in enumerate(uniforms):
        sums = block_sums[r]
        total = sums[-1]
        if not total > 0.0:
            out.append(-1)
            continue
        u = min(u, _BELOW_ONE)
        block = int(sums.searchsorted(u * total, side="right"))
        start = block * _BLOCK
        inner_weights = (
            values[r, start : start + _BLOCK]
            if values is not None
            else weights[r, start : start + _BLOCK].cpu().numpy()
        )
        inner = inner_weights.cumsum(dtype=np.float64)
        before = sums[block - 1] if block else 0.0
        # the block's sum differs in its last bits from the running one: stay inside
        target = min(u * total - before, inner[-1] * _BELOW_ONE)
        out.append(start + int(inner.searchsorted(target, side="right")))
    return out


def _pick_together(
    weights: npt.NDArray[np.float32], sums: npt.NDArray[np.float64], uniforms: Sequence[float]
) -> list[int]:
    """`pick`'s two levels for all rows at once, with the same numbers in the same order. ``sums`` [R, B]: running
    sums over blocks.

    In a rising array, the elements that are not above x are as many as ``searchsorted(x, side="right")`` says.
    """
    rows, vocab = weights.shape
    every = np.arange(rows)
    totals = sums[:, -1]
    u = np.minimum(uniforms, _BELOW_ONE)
    blocks = np.minimum((sums <= (u * totals)[:, None]).sum(axis=1), sums.shape[1] - 1)
    if vocab % _BLOCK == 0 and weights.flags.c_contiguous:
        inner_weights = weights.reshape(rows, -1, _BLOCK)[every, blocks]
    else:
        # columns of each row's block, [R, 64]; of a last block that is shorter, those past the end weigh nothing
        columns = blocks[:, None] * _BLOCK + np.arange(_BLOCK)
        inner_weights = weights[every[:, None], np.minimum(columns, vocab - 1)]
        inner_weights[columns >= vocab] = 0.0
    inner = inner_weights.cumsum(axis=1, dtype=np.float64)
    before = np.where(blocks > 0, sums[every, blocks - 1], 0.0)
    targets = np.minimum(u * totals - before, inner[:, -1] * _BELOW_ONE)
    picked = blocks * _BLOCK + (inner <= targets[:, None]).sum(axis=1)
    picked[~(totals > 0.0)] = -1
    out: list[int] = picked.tolist()
    return out


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
        return _target_ids(argmax_rows(logits), vocab_map), None
    processed = _processed(logits, rows, vocab_map)
    if greedy_only:
        return argmax_rows(processed), None

    tokens = [-1] * len(rows)
    q = None
    for kind in ("argmax", "coupled", "sampled"):
        members = [i for i, k in enumerate(kinds) if k == kind]
        if not members:
            continue
        part = processed if len(members) == len(rows) else processed[members]
        if kind == "argmax":
            drawn = argmax_rows(part)
        elif kind == "coupled":
            keys = [_shared_key(rows[i].state, positions[i]) for i in members]
            drawn = _target_ids(argmax_rows(_scores(part, keys, vocab_map)), vocab_map)
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
    q: torch.Tensor | None = None
    for kind in ("argmax", "coupled", "sampled"):
        members = [i for i, k in enumerate(kinds) if k == kind]
        if not members:
            continue
        part = processed if len(members) == len(rows) else processed[members]
        keys: list[NoiseKey] | None = None
        if kind == "coupled":
            keys = [_shared_key(rows[i].state, positions[i]) for i in members]
        elif kind == "sampled":
            part = raise_tail(part)
            q_part = part.softmax(dim=-1)
            if len(members) == len(rows):
                q = q_part
            else:
                q = torch.zeros_like(processed)
                q[members] = q_part
            keys = [
                NoiseKey(
                    rows[i].state.seed, rows[i].state.sample_index, DRAFT, positions[i], parents[i], bases[i]
                )
                for i in members
            ]
        top = top_rows(_scores(part, keys, vocab_map), width)
        for i, ids, scores in zip(members, top.indices.tolist(), top.values.tolist(), strict=True):
            possible = [token for token, score in zip(ids, scores, strict=True) if score > float("-inf")]
            tokens[i] = _target_ids(possible[: counts[i]], vocab_map)
    return Children(tokens, ["without_replacement" if kind == "sampled" else "fixed" for kind in kinds], q)


def raise_tail(scores: torch.Tensor) -> torch.Tensor:
    """``scores`` [R, V], log q up to a constant, for children drawn without replacement: less each row's largest, and
    no possible token far below it.

    Behind the first child such tokens are all that is left of q. Where float32 has no probabilities for them, a rule
    could not tell how they were drawn: at temperature 0.01 a gap of 1.04 between two logits is enough.
    """
    scores = scores - scores.amax(dim=-1, keepdim=True)
    return scores.clamp(min=_LEAST_LOG_RATIO).masked_fill_(scores == float("-inf"), float("-inf"))


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest children below several nodes; row i belongs to row i of the call."""

    tokens_np: npt.NDArray[np.int64]  # [R, W] target ids, the best first
    logprobs_np: npt.NDArray[np.float32]  # [R, W] <= 0; -inf: no such child, the token is excluded


def draft_candidates(
    logits: torch.Tensor,
    rows: Sequence[LogitsRow],
    *,
    rules: Sequence[str],
    positions: Sequence[int],
    width: int,
    method: DraftSampleMethod = "probabilistic",
    vocab_map: torch.Tensor | None = None,
) -> Candidates:
    """The ``width`` best children below each node, and how likely the drafter thinks that the target takes each:
    this shapes dynamic trees. They are fixed children (point masses), so any choice among them is lossless.
    Arguments as in `draft_tokens`.

    At temperature 0 and for rules that keep a draft with probability p(x), these are the tokens of largest q and
    log q. Under rule ``coupled`` at temperature T the target takes the argmax of log p + g, with the noise g known:
    the tokens of largest log q + g, and log softmax(T * (log q + g)). What is uncertain there is not g but how p's
    logits differ from q's, as at temperature 0, whose formula this becomes for T -> 0 (T log q are the raw logits).
    """
    kinds = [_kind(row.state, rule, method) for row, rule in zip(rows, rules, strict=True)]
    if "coupled" not in kinds and not any(r.state.needs_processing or r.mask is not None for r in rows):
        temperatures = [row.state.temperature for row in rows]
        scores = logits.float()
        if any(t != 1.0 for t in temperatures):
            scores = scores / torch.tensor(temperatures, dtype=torch.float32, device=scores.device)[:, None]
    else:
        scores = _processed(logits, rows, vocab_map)
        if vocab_map is not None:
            scores = scores[:, vocab_map]
        members = [i for i, kind in enumerate(kinds) if kind == "coupled"]
        if members:
            keys = [_shared_key(rows[i].state, positions[i]) for i in members]
            part = scores if len(members) == len(rows) else scores[members]
            temperatures = [rows[i].state.temperature for i in members]
            part = part + gumbel(keys, rows[0].state.vocab_size, scores.device, vocab_map)
            part *= torch.tensor(temperatures, dtype=torch.float32, device=part.device)[:, None]
            if len(members) == len(rows):
                scores = part
            else:
                scores = scores.index_copy(0, torch.tensor(members, device=scores.device), part)
    top = top_rows(scores, min(width, scores.shape[1]), totals=True)
    assert top.log_totals is not None
    # float32 may round a sum of exponentials below its largest term
    logprobs = (top.values - top.log_totals[:, None]).clamp_(max=0.0)
    tokens = top.indices if vocab_map is None else vocab_map[top.indices]
    return Candidates(tokens.cpu().numpy(), logprobs.cpu().numpy())


def _kind(
    state: SamplingState, rule: str, method: DraftSampleMethod
) -> Literal["argmax", "coupled", "sampled"]:
    if state.is_greedy or method == "greedy" or rule in POINT_MASS_RULES:
        return "argmax"
    return "coupled" if rule == "coupled" else "sampled"


def _shared_key(state: SamplingState, position: int) -> NoiseKey:
    return NoiseKey(state.seed, state.sample_index, SHARED, position)


def _processed(
    logits: torch.Tensor, rows: Sequence[LogitsRow], vocab_map: torch.Tensor | None
) -> torch.Tensor:
    """Processed logits [R, V] float32 over the target's vocabulary.

    A draft never fails a request: where its logits processor raises, the row stays without it, and where
    nothing is left to draw (a reduced vocabulary without one allowed token), every token of the drafter is
    equally likely. Both are honest distributions, and the target decides.
    """
    logits = logits.float()
    if vocab_map is not None:
        full = logits.new_full((logits.shape[0], rows[0].state.vocab_size), float("-inf"))
        full[:, vocab_map] = logits
        logits = full
    processed = process(logits, rows, errors={})
    if any(row.mask is not None or row.state.can_exclude for row in rows):
        dead = processed.amax(dim=-1, keepdim=True) == float("-inf")
        if vocab_map is None:
            processed.masked_fill_(dead, 0.0)
        else:
            processed[:, vocab_map] = processed[:, vocab_map].masked_fill_(dead, 0.0)
    return processed


def _scores(
    processed: torch.Tensor, keys: Sequence[NoiseKey] | None, vocab_map: torch.Tensor | None
) -> torch.Tensor:
    """log q + noise, up to a constant, [R, V'] over the drafter's own tokens: others need no noise."""
    scores = processed if vocab_map is None else processed[:, vocab_map]
    if keys is None:
        return scores
    return scores + gumbel(keys, processed.shape[1], processed.device, vocab_map)


def _target_ids(tokens: list[int], vocab_map: torch.Tensor | None) -> list[int]:
    if vocab_map is None or not tokens:
        return tokens
    ids: list[int] = vocab_map.index_select(0, to_device(tokens, vocab_map.device)).tolist()
    return ids

"""Logits -> the logits that are sampled from. One code path for drafter and target, every tree position.

Row-wise by construction: what happens to a row depends on that row alone, not on which rows share the call,
so that a request's distribution is the same in every batch. Reductions here are ones torch runs within a row
(softmax, sort, topk, cumsum, amax over the last dimension).
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch

from draftwise.errors import RequestError
from draftwise.sampling.state import SamplingState
from draftwise.types import IntArray

TOP_P_FIRST_TRY = 256
"""Most likely tokens looked at before a row with top_p is sorted whole."""


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """One position: the committed tokens, then ``path``, precede the token that is drawn here."""

    state: SamplingState
    path: tuple[int, ...]  # draft tokens between the last committed token and this position
    token_ids_np: IntArray  # [num_tokens] committed tokens; a view
    mask: torch.Tensor | None = None  # [V] bool, True: allowed here


def process(
    logits: torch.Tensor, rows: Sequence[LogitsRow], errors: MutableMapping[int, Exception] | None = None
) -> torch.Tensor:
    """Apply each row's sampling parameters to ``logits`` [M, V] float32; softmax of the result is p.

    Works in place where it can; use the returned tensor. Excluded tokens get -inf. Greedy rows skip
    temperature, min_p, top_k and top_p, which do not move the argmax.

    A custom logits processor that raises, or returns something else than float logits [V], is recorded in
    ``errors`` under its row's index (the row keeps its other processing); without ``errors`` it is raised.
    """
    assert logits.shape[0] == len(rows)
    history: list[int] = []
    masked: list[int] = []
    static: list[int] = []
    custom: list[int] = []
    scaled: list[int] = []
    min_p: list[int] = []
    top_k: list[int] = []
    top_p: list[int] = []
    for i, row in enumerate(rows):
        state = row.state
        if row.mask is not None:
            masked.append(i)
        if state.needs_processing:
            params = state.params
            if state.needs_history:
                history.append(i)
                if params.logits_processors:
                    custom.append(i)
            if state.has_static:
                static.append(i)
            if not state.is_greedy:
                if params.min_p > 0.0:
                    min_p.append(i)
                if state.top_k:
                    top_k.append(i)
                if params.top_p < 1.0:
                    top_p.append(i)
        if state.temperature != 1.0:
            scaled.append(i)

    if history:
        _apply_history(logits, rows, history)
    if masked:
        masks = torch.stack([_mask_of(rows[i]) for i in masked])
        _put(logits, masked, _take(logits, masked).masked_fill_(~masks, -math.inf))
    if static:
        _put(logits, static, _take(logits, static).add_(torch.stack([_bias_of(rows[i]) for i in static])))
    for i in custom:
        _apply_processors(logits, i, rows[i], errors)
    if scaled:
        temperatures = [row.state.temperature for row in rows]
        if len(scaled) == len(rows) and len(set(temperatures)) == 1:
            logits.div_(torch.full((1, 1), temperatures[0], device=logits.device))
        else:
            logits.div_(torch.tensor(temperatures, device=logits.device)[:, None])
    if min_p:
        _apply_min_p(logits, rows, min_p)
    if top_k:
        _apply_top_k(logits, rows, top_k)
    if top_p:
        _apply_top_p(logits, rows, top_p)
    return logits


def _take(logits: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    """The members' rows: ``logits`` itself when that is all of them, else a copy."""
    return logits if len(members) == logits.shape[0] else logits[members]


def _put(logits: torch.Tensor, members: Sequence[int], part: torch.Tensor) -> None:
    """Write back what was made of `_take`'s rows."""
    if part is not logits:
        logits[members] = part


def _mask_of(row: LogitsRow) -> torch.Tensor:
    assert row.mask is not None
    return row.mask


def _bias_of(row: LogitsRow) -> torch.Tensor:
    assert row.state.static_bias is not None
    return row.state.static_bias


def _apply_history(logits: torch.Tensor, rows: Sequence[LogitsRow], members: Sequence[int]) -> None:
    """Penalties, bad words of several tokens, min_tokens: what depends on the tokens before the position."""
    repetition = [i for i in members if rows[i].state.has_repetition]
    if repetition:
        seen = torch.stack([rows[i].state.seen for i in repetition])
        at = [(j, token) for j, i in enumerate(repetition) for token in rows[i].path]
        if at:
            seen[[j for j, _ in at], [token for _, token in at]] = True
        factor = [rows[i].state.params.repetition_penalty for i in repetition]
        factors = torch.tensor(factor, device=logits.device)[:, None]
        part = _take(logits, repetition)
        _put(
            logits, repetition, torch.where(seen, torch.where(part > 0, part / factors, part * factors), part)
        )
    penalised = [i for i in members if rows[i].state.has_penalty]
    if penalised:
        penalty = torch.stack([rows[i].state.penalty for i in penalised])
        # the path's tokens count as output too: path (5, 9, 5) after 5 was committed once -> 5: 3x, 9: 1x
        at_rows: list[int] = []
        at_tokens: list[int] = []
        values: list[float] = []
        for j, i in enumerate(penalised):
            state, path = rows[i].state, rows[i].path
            for token in set(path):
                at_rows.append(j)
                at_tokens.append(token)
                values.append(state.penalty_of(state.count_of(token) + path.count(token)))
        if values:
            penalty[at_rows, at_tokens] = torch.tensor(values, device=logits.device)
        _put(logits, penalised, _take(logits, penalised).sub_(penalty))
    at_rows, at_tokens = [], []
    for i in members:
        row = rows[i]
        state = row.state
        excluded = _completed_bad_words(row) if state.bad_words else []
        if state.num_output + len(row.path) < state.min_tokens:
            excluded.extend(state.stop_ids)
        at_rows.extend([i] * len(excluded))
        at_tokens.extend(excluded)
    if at_rows:
        logits[at_rows, at_tokens] = -math.inf


def _completed_bad_words(row: LogitsRow) -> list[int]:
    """Tokens that would complete a bad word of several tokens here."""
    need = row.state.max_bad_word - 1
    tail = (*row.token_ids_np[-need:].tolist(), *row.path)
    start = row.state.num_prompt - (len(row.token_ids_np) - min(need, len(row.token_ids_np)))
    tail = tail[max(start, 0) :]  # only generated tokens count: a prompt may end in half a bad word
    return [
        seq[-1]
        for seq in row.state.bad_words
        if len(tail) >= len(seq) - 1 and tail[1 - len(seq) :] == seq[:-1]
    ]


def _apply_processors(
    logits: torch.Tensor, i: int, row: LogitsRow, errors: MutableMapping[int, Exception] | None
) -> None:
    token_ids = [*row.token_ids_np.tolist(), *row.path]
    try:
        result = logits[i].clone()  # a processor that fails halfway leaves nothing behind
        for fn in row.state.params.logits_processors:
            result = fn(token_ids, result)
            if not isinstance(result, torch.Tensor) or result.shape != logits[i].shape:
                raise RequestError(
                    f"logits processor {getattr(fn, '__name__', fn)!r} must return logits of shape"
                    f" [{logits.shape[1]}], got {tuple(getattr(result, 'shape', ())) or type(result).__name__}"
                )
        logits[i] = result
    except Exception as error:
        if errors is None:
            raise
        errors[i] = error


def _apply_min_p(logits: torch.Tensor, rows: Sequence[LogitsRow], members: list[int]) -> None:
    """p < min_p * max p is, in logits, l < max l + log min_p: no softmax needed."""
    part = _take(logits, members)
    offset = torch.tensor([math.log(rows[i].state.params.min_p) for i in members], device=logits.device)
    floor = part.amax(dim=-1, keepdim=True) + offset[:, None]
    _put(logits, members, part.masked_fill_(part < floor, -math.inf))


def _apply_top_k(logits: torch.Tensor, rows: Sequence[LogitsRow], members: list[int]) -> None:
    """Keep the k largest; what ties with the k-th stays, so that the result depends on no sorting order."""
    part = _take(logits, members)
    ks = [rows[i].state.top_k for i in members]
    largest = part.topk(max(ks), dim=-1).values
    index = torch.tensor([k - 1 for k in ks], device=logits.device)[:, None]
    floor = largest.gather(1, index)
    _put(logits, members, part.masked_fill_(part < floor, -math.inf))


def _apply_top_p(logits: torch.Tensor, rows: Sequence[LogitsRow], members: list[int]) -> None:
    """Keep the most likely tokens until their sum reaches top_p; ties with the last one stay.

    Most rows reach top_p within a few tokens, so a partial sort is tried first. Whether it sufficed is
    decided row by row and both ways add the same numbers in the same order: same result.
    """
    part = _take(logits, members)
    probs = part.softmax(dim=-1)
    limit = torch.tensor(
        [rows[i].state.params.top_p for i in members], dtype=torch.float64, device=logits.device
    )
    vocab = part.shape[1]
    width = min(TOP_P_FIRST_TRY, vocab)
    floor, reached = _top_p_floor(probs.topk(width, dim=-1).values, limit)
    if width < vocab and not bool(reached.all()):
        rest = (~reached).nonzero().squeeze(1)
        floor[rest] = _top_p_floor(probs[rest].sort(dim=-1, descending=True).values, limit[rest])[0]
    _put(logits, members, part.masked_fill_(probs < floor[:, None], -math.inf))


def _top_p_floor(largest: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``largest`` [R, W] falling probabilities, ``limit`` [R] float64 -> smallest kept probability [R] float32,
    and whether the W largest reach the limit [R] bool.

    Example: (.5, .3, .2) and .7: sums (.5, .8, 1); a token is kept if the sum before it is below .7: 2 kept.
    """
    sums = largest.cumsum(dim=-1, dtype=torch.float64)
    kept = (sums < limit[:, None]).sum(dim=-1).clamp_(max=largest.shape[1] - 1)
    return largest.gather(1, kept[:, None]).squeeze(1), sums[:, -1] >= limit

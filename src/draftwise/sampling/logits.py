"""Logits -> the logits that are sampled from. One code path for drafter and target, every tree position.

Row-wise by construction: what happens to a row depends on that row alone, not on which rows share the call,
so that a request's distribution is the same in every batch. Reductions here are ones that run within a row
(softmax, sort, cumsum, amax over the last dimension).
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch

from draftwise.errors import RequestError
from draftwise.sampling.rows import SortedRows
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
    adjust(logits, rows, errors)
    return shape(logits, rows)


def adjust(
    logits: torch.Tensor, rows: Sequence[LogitsRow], errors: MutableMapping[int, Exception] | None = None
) -> None:
    """The first part of `process`, in place: everything before the temperature."""
    assert logits.shape[0] == len(rows)
    history: list[int] = []
    masked: list[int] = []
    static: list[int] = []
    custom: list[int] = []
    for i, row in enumerate(rows):
        state = row.state
        if row.mask is not None:
            masked.append(i)
        if state.adjusts:
            if state.needs_history:
                history.append(i)
                if state.params.logits_processors:
                    custom.append(i)
            if state.has_static:
                static.append(i)

    if history:
        _apply_history(logits, rows, history)
    if masked:
        masks = torch.stack([_mask_of(rows[i]) for i in masked])
        _put(logits, masked, _take(logits, masked).masked_fill_(~masks, -math.inf))
    if static:
        _put(logits, static, _take(logits, static).add_(torch.stack([_bias_of(rows[i]) for i in static])))
    for i in custom:
        _apply_processors(logits, i, rows[i], errors)


def shape(logits: torch.Tensor, rows: Sequence[LogitsRow]) -> torch.Tensor:
    """The second part of `process`: temperature, min_p, top_k, top_p. Native kernels do this themselves."""
    scaled: list[int] = []
    min_p: list[int] = []
    truncated: list[int] = []
    for i, row in enumerate(rows):
        state = row.state
        if state.needs_processing and not state.is_greedy:
            if state.params.min_p > 0.0:
                min_p.append(i)
            if state.top_k or state.params.top_p < 1.0:
                truncated.append(i)
        if state.temperature != 1.0:
            scaled.append(i)
    if scaled:
        temperatures = [row.state.temperature for row in rows]
        if len(scaled) == len(rows) and len(set(temperatures)) == 1:
            logits.div_(logits.new_full((1, 1), temperatures[0]))
        else:
            logits.div_(torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None])
    if min_p:
        _apply_min_p(logits, rows, min_p)
    if truncated:
        _apply_truncation(logits, rows, truncated)
    return logits


def _take(logits: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    """The members' rows: ``logits`` itself when that is all of them, else a copy."""
    return logits if len(members) == logits.shape[0] else logits[members]


def _put(logits: torch.Tensor, members: Sequence[int], part: torch.Tensor) -> None:
    """Write processed rows of `_take` back."""
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
        factors = torch.tensor(factor, dtype=torch.float32, device=logits.device)[:, None]
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
            penalty[at_rows, at_tokens] = torch.tensor(values, dtype=torch.float32, device=penalty.device)
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
    found: list[int] = []
    for length, endings in row.state.bad_words.items():
        if length <= len(tail):
            found += endings.get(tail[len(tail) - length :], ())
    return found


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
            if not result.is_floating_point():  # a mask, say, which would be taken for logits of 0 and 1
                raise RequestError(
                    f"logits processor {getattr(fn, '__name__', fn)!r} must return float logits, got"
                    f" {str(result.dtype).removeprefix('torch.')}"
                )
        logits[i] = result
    except Exception as error:
        if errors is None:
            raise
        errors[i] = error


def _apply_min_p(logits: torch.Tensor, rows: Sequence[LogitsRow], members: list[int]) -> None:
    """p < min_p * max p is, in logits, l < max l + log min_p: no softmax needed."""
    part = _take(logits, members)
    offset = torch.tensor(
        [math.log(rows[i].state.params.min_p) for i in members], dtype=torch.float32, device=logits.device
    )
    floor = part.amax(dim=-1, keepdim=True) + offset[:, None]
    _put(logits, members, part.masked_fill_(part < floor, -math.inf))


def _apply_truncation(logits: torch.Tensor, rows: Sequence[LogitsRow], members: list[int]) -> None:
    """top_k: keep the k largest. top_p: of those, keep the most likely until their share reaches top_p. Tokens that
    tie with the last one kept stay, so that the result does not depend on the sorting order.

    Rows with top_p alone mostly reach it within a few tokens, so only the head of the sorted row is looked at
    first. Whether that sufficed is decided row by row, and all ways add the same numbers in the same order.
    """
    part = _take(logits, members)
    vocab = part.shape[1]
    states = [rows[i].state for i in members]
    tried = max(
        max(state.top_k for state in states), TOP_P_FIRST_TRY if any(_top_p_only(s) for s in states) else 1
    )
    ordered = SortedRows(part)
    floor, reached = _floor(part, states, ordered.head(min(tried, vocab)))
    if not all(reached):
        rest = [j for j, enough in enumerate(reached) if not enough]
        floor[rest] = _floor(part[rest], [states[j] for j in rest], ordered.whole(rest))[0]
    _put(logits, members, part.masked_fill_(part < floor, -math.inf))


def _top_p_only(state: SamplingState) -> bool:
    return not state.top_k and state.params.top_p < 1.0


def _floor(
    part: torch.Tensor, states: Sequence[SamplingState], top: torch.Tensor
) -> tuple[torch.Tensor, Sequence[bool]]:
    """``part`` [R, V] logits, ``top`` [R, W] their largest, falling -> the smallest logit kept [R, 1], and
    whether W tokens were enough to tell.

    Example: probabilities (.5, .3, .2), top_p .7: a token stays if the sum before it is below .7, so 2 stay.
    """
    width = top.shape[1]
    device = part.device
    last = torch.tensor([(state.top_k or width) - 1 for state in states], device=device)[:, None]
    if all(state.params.top_p >= 1.0 for state in states):
        return top.gather(1, last), [True]
    weights = (top - top[:, :1]).exp_()
    if any(state.top_k for state in states):
        weights.masked_fill_(torch.arange(width, device=device) > last, 0.0)
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    totals = sums[:, -1:]
    if any(_top_p_only(state) for state in states):
        # the whole row's mass in units of its most likely token; softmax never splits a row's sum over threads
        whole = part.softmax(dim=-1).amax(dim=-1, keepdim=True).double().reciprocal_()
        only = torch.tensor([_top_p_only(state) for state in states], device=device)[:, None]
        totals = torch.where(only, whole, totals)
    # top_p 1 keeps all: its limit must not be met early by a sum that no longer grows
    shares = [state.params.top_p if state.params.top_p < 1.0 else math.inf for state in states]
    limits = totals * torch.tensor(shares, dtype=torch.float64, device=device)[:, None]
    kept = torch.minimum((sums < limits).sum(dim=-1, keepdim=True), last)
    if width == part.shape[1]:
        return top.gather(1, kept), [True]
    enough: list[bool] = (sums[:, -1:] >= limits).squeeze(1).tolist()
    reached = [
        state.top_k > 0 or state.params.top_p >= 1.0 or e for state, e in zip(states, enough, strict=True)
    ]
    return top.gather(1, kept), reached

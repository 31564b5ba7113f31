"""Features of requests in seats besides the rule, without a value read on the host: penalties, biases, min_p, top_k
and
top_p before verification, log-probabilities behind it.

The arithmetic, and its order, are those of `sampling.logits` and `sampling.logprobs`; what nobody in a step wants is
not computed. Grammars, processors of the user's, excluded words of several tokens and min_tokens are not known here.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftwise.graphs.loop import DraftLoop
from draftwise.graphs.seats import memory as at
from draftwise.graphs.seats.memory import SeatMemory
from draftwise.graphs.seats.rules import Deciding
from draftwise.kernels.select import on_triton
from draftwise.kernels.triton.inputs import EXCLUDED
from draftwise.sampling.state import SamplingState

TEMPERED: Final = "tempered"
TRUNCATED: Final = "truncated"
PENALISED: Final = "penalised"
BIASED: Final = "biased"
LOGPROBS: Final = "logprobs"

MOST_LOGPROBS: Final = 20
"""Alternatives of a token that a step reports; requests that want more run in the ordinary way."""


def wants(state: SamplingState) -> frozenset[str] | None:
    """A request's features; None: it wants one that is not supported here."""
    params = state.params
    short = state.min_tokens > state.num_output
    if state.bad_words or params.logits_processors or short:
        return None
    found = set()
    if state.has_penalty or state.has_repetition:
        found.add(PENALISED)
    if state.has_static:
        if params.allowed_token_ids is not None and params.bad_words:
            return None  # it might leave no token at all
        found.add(BIASED)
    if not state.is_greedy and (state.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
        found.add(TRUNCATED)
    if state.temperature != 1.0:
        found.add(TEMPERED)
    if params.logprobs is not None:
        if not 0 <= params.logprobs <= MOST_LOGPROBS:
            return None
        found.add(LOGPROBS)
    return frozenset(found)


def numbers_of(state: SamplingState) -> tuple[int, int, int, int, int, int]:
    """A request's columns from `TOP_K` on."""
    params, drawn = state.params, not state.is_greedy
    _, top_p, _, log_min_p, top_k, _ = state.draw_fields
    values = np.array(
        [
            top_p if drawn else 1.0,
            log_min_p if drawn else -math.inf,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ]
    )
    top_p_bits, min_p_bits, presence, frequency, repetition = values.view(np.int64).tolist()
    return (top_k if drawn else 0, top_p_bits, min_p_bits, presence, frequency, repetition)


class Shaping:
    """Shaping for the seats of one memory. Tensors with a row of the vocabulary per seat are made when first
    needed."""

    def __init__(self, memory: SeatMemory) -> None:
        self._memory = memory
        self._alternatives = min(MOST_LOGPROBS, memory.limits.vocab_size)
        self._bias: Tensor | None = None  # [S, V] float32
        # [S, V] int32, committed output tokens; since the entry, without penalties
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None  # [S, V] uint8: tokens of the prompt, and of the output at the entry
        self._report: Tensor | None = None
        self._steering: set[int] = set()
        self._steered = torch.zeros(memory.seats, dtype=torch.int64, device=memory.device)  # see `LoopSeats`
        if not on_triton(memory.device):
            self._bias = self._table(torch.float32)  # what is captured reads it from the beginning

    @property
    def report(self) -> Tensor:
        """[S, K + 1, 2 + 2 T] float32, written by `tell`: of every committed token its log-probability and its rank,
        then the T most likely tokens, and theirs. Ids and ranks are exact up to 2^24."""
        if self._report is None:
            limits = self._memory.limits
            shape = (limits.seats, limits.drafts + 1, 2 + 2 * self._alternatives)
            self._report = torch.zeros(shape, dtype=torch.float32, device=self._memory.device)
        return self._report

    def persistent(self) -> list[Tensor]:
        """Results of a step for the next one."""
        return [] if self._counts is None else [self._counts]

    def enter(self, seat: int, state: SamplingState) -> None:
        """A request takes a seat. One with penalties waits here, for what it has said so far."""
        if state.has_static:
            if self._bias is None:
                self._bias = self._table(torch.float32)
            assert state.static_bias is not None
            self._bias[seat].copy_(state.static_bias)
        elif self._bias is not None:
            self._bias[seat].zero_()
        self._steer(seat, state.steers)
        if state.has_penalty or state.has_repetition:
            if self._counts is None or self._seen is None:
                self._counts, self._seen = self._table(torch.int32), self._table(torch.uint8)
            self._seen[seat].zero_()
            if state.has_repetition:
                self._seen[seat].copy_(state.seen)
            self._counts[seat].zero_()
            counts = state.counts
            if counts:
                ids = torch.tensor(list(counts), device=self._memory.device)
                times = torch.tensor(list(counts.values()), dtype=torch.int32, device=self._memory.device)
                self._counts[seat].index_copy_(0, ids, times)

    def move(self, old: int, new: int) -> None:
        """A request takes another seat."""
        for table in (self._bias, self._counts, self._seen):
            if table is not None:
                table[new].copy_(table[old])
        self._steer(new, old in self._steering)

    def _steer(self, seat: int, steers: bool) -> None:
        """Whether the bias of a seat is its drafter's, too: it may decide what is likely (`SamplingState.steers`)."""
        if not steers and seat not in self._steering:
            return
        (self._steering.add if steers else self._steering.discard)(seat)
        address = 0
        if steers:
            assert self._bias is not None
            address = self._bias[seat].data_ptr()
        self._steered[seat].fill_(address)

    def _table(self, dtype: torch.dtype) -> Tensor:
        limits = self._memory.limits
        return torch.zeros((limits.seats, limits.vocab_size), dtype=dtype, device=self._memory.device)

    # ----------------------------------------------------------------------------------- what is captured

    def steer(self, loop: DraftLoop) -> None:
        """Tell a loop what steers its drafts."""
        seats, count, ids = loop.seats, loop.shape.requests, loop.drafter.target_ids
        seats.steered.copy_(self._steered[:count])
        if seats.bias is not None:
            assert self._bias is not None
            bias = self._bias[:count].clamp(min=EXCLUDED)
            seats.bias.copy_(bias if ids is None else bias.index_select(1, ids))

    def process(self, logits: Tensor, step: Deciding, wanted: frozenset[str]) -> None:
        """As `sampling.logits.process`, in place. ``logits`` [R * N, V] float32."""
        rows = logits.view(step.requests, step.rows, -1)
        if PENALISED in wanted:
            self._penalise(rows, step)
        if BIASED in wanted:
            assert self._bias is not None
            rows.add_(self._bias[: step.requests, None])
        if TEMPERED in wanted:
            rows.div_(self._number(at.TEMPERATURE, step).float())
        if TRUNCATED in wanted:
            floor = rows.amax(-1, keepdim=True) + self._number(at.LOG_MIN_P, step).float()
            rows.masked_fill_(rows < floor, -math.inf)
            rows.masked_fill_(rows < self._floor(rows, step), -math.inf)

    def _number(self, column: int, step: Deciding) -> Tensor:
        """[R, 1, 1] float64"""
        return self._memory.number(column)[: step.requests, None, None]

    def _penalise(self, rows: Tensor, step: Deciding) -> None:
        """The drafts that a row stands behind count as output there."""
        memory, (count, width, vocab) = self._memory, rows.shape
        assert self._counts is not None and self._seen is not None
        counts = self._counts[:count, None].expand(count, width, vocab).clone()
        form = memory.forms_of(count)[..., :width]
        is_tree, place = form[:, 3, :1] > 0, torch.arange(width, device=rows.device)
        for i in range(width - 1):
            token = memory.waiting_drafts[:count, i, None, None].expand(count, width, 1)
            # a chain may be longer than there are bits
            below = torch.where(is_tree, (form[:, 1] >> min(i + 1, 63)) & 1, (place > i).long())
            counts.scatter_add_(2, token, below.to(torch.int32)[..., None])
        factor = self._number(at.REPETITION, step).float()
        seen = (self._seen[:count, None] > 0) | (counts > 0)
        rows.copy_(torch.where(seen, torch.where(rows > 0, rows / factor, rows * factor), rows))
        penalty = self._number(at.PRESENCE, step) + self._number(at.FREQUENCY, step) * counts
        rows.sub_(torch.where(counts > 0, penalty, 0.0).float())

    def _floor(self, rows: Tensor, step: Deciding) -> Tensor:
        """[R, N, 1]: the smallest logit that top_k and top_p keep, see `sampling.logits`."""
        vocab = rows.shape[-1]
        top = rows.sort(dim=-1, descending=True).values
        top_k = self._memory.state[: step.requests, at.TOP_K, None, None]
        last = torch.where(top_k > 0, top_k, vocab) - 1
        place = torch.arange(vocab, device=rows.device)
        weights = (top - top[..., :1]).exp_().masked_fill_(place > last, 0.0)
        sums = weights.cumsum(dim=-1, dtype=torch.float64)
        # the row's mass in units of its most likely token, as in `sampling.logits`, unless top_k cuts it
        whole = rows.softmax(dim=-1).amax(dim=-1, keepdim=True).double().reciprocal_()
        totals = torch.where(top_k > 0, sums[..., -1:], whole)
        share = self._number(at.TOP_P, step)
        limits = totals * torch.where(share < 1.0, share, math.inf)
        kept = torch.minimum((sums < limits).sum(dim=-1, keepdim=True), last)
        return top.gather(-1, kept)

    def commit(self, step: Deciding, wanted: frozenset[str]) -> None:
        """Count what was committed (``memory.walk``)."""
        if PENALISED not in wanted:
            return
        assert self._counts is not None
        tokens, mine = self._committed(step)
        self._counts[: step.requests].scatter_add_(1, tokens, mine.to(torch.int32))

    def tell(self, raw: Tensor, step: Deciding) -> None:
        """Log-probabilities of what was committed: `report`. ``raw`` [R * N, V] float32: the model's logits."""
        tokens, _ = self._committed(step)
        rows = self._memory.committed_rows(step.requests, step.rows)
        logprobs = raw.log_softmax(dim=-1).view(step.requests, step.rows, -1)
        logprobs = logprobs.gather(1, rows[..., None].expand(-1, -1, logprobs.shape[2]))
        own = logprobs.gather(2, tokens[..., None])
        ranks = (logprobs > own).sum(dim=-1, keepdim=True) + 1
        top = logprobs.topk(self._alternatives, dim=-1)
        parts = (own, ranks.float(), top.indices.float(), top.values)
        self.report[: step.requests, : step.rows].copy_(torch.cat(parts, dim=-1))

    def _committed(self, step: Deciding) -> tuple[Tensor, Tensor]:
        """[R, N] int64 tokens, and which of them count."""
        memory, count = self._memory, step.requests
        tokens = memory.walk.tokens[:count, : step.rows].long().clamp(min=0)
        place = torch.arange(step.rows, device=tokens.device)
        live = memory.now[:count, :1] > 0
        return tokens, live & (place <= memory.walk.accepted[:count, None])

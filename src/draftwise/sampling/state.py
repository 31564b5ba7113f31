"""The sampling state of one request: flags decided once, and counts that advance with its output."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams
from draftwise.types import IntArray

DRAW = struct.Struct("=QdffiI")
"""``dw::VerifyDraw`` of ``csrc/verify.h``."""

_STEERING_BIAS = 3.0
"""A bias of this size makes a token twenty times as likely."""


class SamplingState:
    """One per request, owned by the executor; `commit` is its only writer.

    Per-token arrays over the vocabulary are made only for features the request uses, and kept on the host
    (on the CPU the device's tensor shares their memory, so that an update costs one numpy store).

    ``seed``: resolved by the caller; ``token_ids_np`` [num_tokens]: every known token (prompt, then output, for
    a request that resumes), counted once, not kept. ``stop_token_ids``: excluded while fewer than
    ``min_tokens`` tokens are out. ``bad_words_ids``: from `resolve_bad_words`.

    ``needs_processing``: anything besides temperature changes the logits. ``needs_history``: what came before
    a position matters. ``can_exclude``: processing might leave no token at all. ``adjusts``: something changes the
    logits before they are divided by the temperature. ``steers``: something may decide what is likely (allowed tokens,
    large biases, processors), where penalties and excluded words only shift it: drafts made without a look at it are
    mostly wrong.
    ``plain``: the request needs only the draw: neither ``adjusts`` nor log-probabilities.
    ``draw_fields``: further values for native kernels: seed (64 bits), top_p, one over the
    temperature, log min_p, top_k, sample index; ``draw_bytes``: the same as they read it.

    Raises `RequestError` if a parameter names a token id outside the vocabulary.
    """

    __slots__ = (
        "_counts",
        "_device",
        "_penalty_dev",
        "_penalty_np",
        "_seen_dev",
        "_seen_np",
        "adjusts",
        "bad_words",
        "can_exclude",
        "draw_bytes",
        "draw_fields",
        "has_penalty",
        "has_repetition",
        "has_static",
        "is_greedy",
        "max_bad_word",
        "min_tokens",
        "needs_history",
        "needs_processing",
        "num_prompt",
        "num_tokens",
        "params",
        "plain",
        "sample_index",
        "seed",
        "static_bias",
        "steers",
        "stop_ids",
        "temperature",
        "top_k",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        token_ids_np: IntArray,
        num_prompt: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        stop_token_ids: frozenset[int] = frozenset(),
        bad_words_ids: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        params.validate_for_vocab(vocab_size)
        self.params = params
        self.seed = seed
        self.sample_index = sample_index
        self.num_prompt = num_prompt
        self.num_tokens = len(token_ids_np)
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self.is_greedy = params.is_greedy
        self.temperature = 1.0 if self.is_greedy else params.temperature
        # top_k over the whole vocabulary keeps everything
        self.top_k = params.top_k if 0 < params.top_k < vocab_size else 0

        self.draw_fields = (
            seed & ((1 << 64) - 1),
            params.top_p,
            1.0 / self.temperature,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            self.top_k,
            sample_index,
        )
        self.draw_bytes = DRAW.pack(*self.draw_fields)

        self.bad_words = _endings(bad_words_ids, vocab_size)
        self.max_bad_word = 1 + max(self.bad_words, default=-1)
        self.static_bias = self._make_static_bias({seq[0] for seq in bad_words_ids if len(seq) == 1})
        self.has_static = self.static_bias is not None
        self.stop_ids = tuple(sorted(t for t in stop_token_ids if t < vocab_size))
        self.min_tokens = params.min_tokens if self.stop_ids else 0

        self.has_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.has_repetition = params.repetition_penalty != 1.0
        self._counts: Counter[int] = Counter()
        self._penalty_np = np.zeros(vocab_size, dtype=np.float32) if self.has_penalty else None
        self._seen_np = np.zeros(vocab_size, dtype=np.bool_) if self.has_repetition else None
        self._penalty_dev: torch.Tensor | None = None
        self._seen_dev: torch.Tensor | None = None
        if self._seen_np is not None:
            self._seen_np[token_ids_np] = True
        if self._penalty_np is not None:
            self._count(token_ids_np[num_prompt:].tolist())

        bias = max((params.logit_bias or {}).values(), default=0.0)
        allowed = params.allowed_token_ids is not None
        self.steers = allowed or bias > _STEERING_BIAS or bool(params.logits_processors)
        self._set_flags()

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    def _set_flags(self) -> None:
        params = self.params
        short = self.num_output < self.min_tokens
        self.needs_history = (
            self.has_penalty
            or self.has_repetition
            or bool(self.bad_words)
            or bool(params.logits_processors)
            or short
        )
        truncates = not self.is_greedy and (self.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self.adjusts = self.needs_history or self.has_static
        self.plain = not self.adjusts and params.logprobs is None
        self.needs_processing = self.adjusts or truncates
        self.can_exclude = self.has_static or bool(self.bad_words) or bool(params.logits_processors) or short

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens that became part of the output."""
        self.num_tokens += len(token_ids)
        if self.has_penalty:
            self._count(token_ids)
        if self._seen_np is not None:
            self._seen_np[list(token_ids)] = True
            self._seen_dev = None
        if self.min_tokens and self.num_output >= self.min_tokens:
            self.min_tokens = 0  # reached: nothing to look at any more
            self._set_flags()

    def penalty_of(self, count: int) -> float:
        """The amount that presence and frequency penalties subtract from a token that occurred ``count`` times."""
        params = self.params
        return params.presence_penalty + params.frequency_penalty * count if count else 0.0

    def count_of(self, token: int) -> int:
        """Occurrences of a token in the committed output (kept only for requests with those penalties)."""
        return self._counts[token]

    @property
    def counts(self) -> Mapping[int, int]:
        """Occurrences in the committed output, kept as by `count_of`."""
        return self._counts

    @property
    def penalty(self) -> torch.Tensor:
        """[V] float32: what presence and frequency penalties subtract after the committed output."""
        assert self._penalty_np is not None
        if self._penalty_dev is None:
            self._penalty_dev = torch.from_numpy(self._penalty_np).to(self._device)
        return self._penalty_dev

    @property
    def seen(self) -> torch.Tensor:
        """[V] bool: tokens of the prompt and the committed output."""
        assert self._seen_np is not None
        if self._seen_dev is None:
            self._seen_dev = torch.from_numpy(self._seen_np).to(self._device)
        return self._seen_dev

    def _count(self, token_ids: Sequence[int]) -> None:
        assert self._penalty_np is not None
        self._counts.update(token_ids)
        for token in token_ids:
            self._penalty_np[token] = self.penalty_of(self._counts[token])
        self._penalty_dev = None

    def _make_static_bias(self, forbidden: set[int]) -> torch.Tensor | None:
        """[V] float32 to add: logit_bias, -inf for one-token bad words and outside allowed_token_ids."""
        params = self.params
        if not forbidden and params.allowed_token_ids is None and not params.logit_bias:
            return None
        bias = np.zeros(self.vocab_size, dtype=np.float32)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        if params.allowed_token_ids is not None:
            outside = np.ones(self.vocab_size, dtype=np.bool_)
            outside[list(params.allowed_token_ids)] = False
            bias[outside] = -math.inf
        bias[list(forbidden)] = -math.inf
        return torch.from_numpy(bias).to(self._device)


Endings = Mapping[int, Mapping[tuple[int, ...], tuple[int, ...]]]
"""By length the beginnings of bad words, and for each the tokens that would complete one. Example: (5, 6, 7),
(5, 6, 8), (9, 1) are {2: {(5, 6): (7, 8)}, 1: {(9,): (1,)}}: two look-ups for a position, however many words."""


@lru_cache(maxsize=32)
def _endings(bad_words_ids: tuple[tuple[int, ...], ...], vocab_size: int) -> Endings:
    """The table of bad words of several tokens, which the samples of a prompt share. Raises `RequestError` for a
    token that the model does not have."""
    found: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for seq in bad_words_ids:
        bad = next((token for token in seq if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"bad_words has token id {bad}; it must be below the vocabulary size {vocab_size}"
            )
        if len(seq) > 1:
            by_beginning = found.setdefault(len(seq) - 1, {})
            by_beginning[seq[:-1]] = (*by_beginning.get(seq[:-1], ()), seq[-1])
    return found

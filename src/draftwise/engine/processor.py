"""Turns user requests into requests that the scheduler can run: tokens, limits, seeds, speculation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from draftwise.config import RequestLimits, SpeculativeConfig
from draftwise.engine.adapters import Lease
from draftwise.engine.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer
from draftwise.engine.facts import Traits
from draftwise.engine.group import RequestGroup
from draftwise.engine.limits import check_params, check_portable, check_prompt
from draftwise.engine.speculating import SpeculationChoice
from draftwise.engine.stops import StopStrings
from draftwise.engine.tokenizing import Prompt, end_tokens, is_quick, prompt_text, tokenize_prompt
from draftwise.engine.workers import Lane
from draftwise.errors import RequestError, shown
from draftwise.models.base import ModelConfig
from draftwise.sampling.params import SamplingParams, resolve_bad_words
from draftwise.sched.request import Request
from draftwise.structured.compiling import SMALL
from draftwise.structured.grammars import Grammars
from draftwise.types import IntArray


class Numbers(NamedTuple):
    """``first``: the first number of a prompt's requests, one per sample; and their time of arrival."""

    first: int
    arrival_time: float


class Processor:
    """Validates and resolves requests of one engine. Raises RequestError; never touches other requests."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Any | None,
        drafters: Sequence[SpeculativeConfig],
        proposers: Mapping[str, Traits],
        *,
        default_method: str,
        max_model_len: int,
        seed: int | None,
        clock: Callable[[], float],
        keep_trace: bool = False,
        grammars: Grammars | None = None,
        limits: RequestLimits | None = None,
        most_drafts: int | None = None,
        elsewhere: bool = False,
    ) -> None:
        """``elsewhere``: steps are executed in other processes.
        ``most_drafts``: see `SpeculationChoice`."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.limits = limits or RequestLimits()
        self._model_config = model_config
        self._speculation = SpeculationChoice(drafters, proposers, default_method, most_drafts, elsewhere)
        self._seed = seed
        self._clock = clock
        self._keep_trace = keep_trace
        self._elsewhere = elsewhere
        self._next_rid = 0
        self._lock = Lock()
        eos = end_tokens(model_config, tokenizer)
        self._eos = frozenset(eos)
        self._grammars = grammars or Grammars(tokenizer, model_config.vocab_size, eos)

    # -------------------------------------------------------------------------------------------- requests

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check the sizes of a request, as far as that is quick. Raises `LimitError`."""
        check_params(self.limits, params, walk=False)
        if self._elsewhere:
            check_portable(params)
        text = prompt_text(prompt)
        if text is not None and not (isinstance(prompt, Mapping) and "prompt_token_ids" in prompt):
            check_prompt(self.limits, text, self.max_model_len)

    @property
    def vocab_size(self) -> int:
        """The number of token ids: those of prompts must be smaller."""
        return self._model_config.vocab_size

    def take_numbers(self, count: int) -> Numbers:
        """Numbers for requests that arrive now. They decide the order of requests and their seeds."""
        with self._lock:
            first = self._next_rid
            self._next_rid += count
        return Numbers(first, self._clock())

    def lane(self, prompt: Prompt, params: SamplingParams) -> Lane | None:
        """The lane of threads in which `group` should be called; None: call it directly, it takes a millisecond."""
        spec = params.structured_outputs
        if spec is not None and not self._grammars.is_ready(spec):
            return Lane.GRAMMAR if spec.size <= SMALL else Lane.LARGE_GRAMMAR
        return None if is_quick(prompt, params) else Lane.TEXT

    def group(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        keep_trace: bool | None = None,
        numbers: Numbers | None = None,
        lease: Lease | None = None,
    ) -> RequestGroup:
        """Make the n requests of one prompt. ``keep_trace``: whether they record their steps (None: the engine's
        choice); ``numbers``: their numbers, if already taken (None: the next ones); ``lease``: of their
        adapter, None: they have none. May be called by several threads at once. Raises RequestError; `LimitError`, one
        of these, before any work is done."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority is {shown(priority)}; it must be an integer")
        self.check(prompt, params)
        check_params(self.limits, params)
        numbers = numbers or self.take_numbers(params.n)
        text, prompt_np = self.tokenize(prompt)
        params.validate_for_vocab(self._model_config.vocab_size)
        speculation = self._speculation.resolve(params)
        total = self.max_model_len
        if params.max_tokens is not None:
            total = min(total, len(prompt_np) + params.max_tokens)
        if params.stop and not params.detokenize:
            raise RequestError("stop: stop strings need detokenize=True")
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise RequestError("stop and bad_words are strings, but the engine has no tokenizer")
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            assert self.tokenizer is not None
            bad_words = resolve_bad_words(self.tokenizer, params.bad_words)
        spec = params.structured_outputs
        grammar = None if spec is None else self._grammars.compile(spec)
        # Under a grammar ignore_eos puts the end off while anything else can follow, but then it has to come.
        ignores = params.ignore_eos and params.structured_outputs is None
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignores else self._eos)
        seed = params.seed if params.seed is not None else self._draw_seed(numbers.first)
        stops = StopStrings(params.stop) if params.stop else None  # one for all samples
        before = prompt_np[-CONTEXT_TOKENS:].tolist()
        requests: list[Request] = []
        detokenizers: list[IncrementalDetokenizer | None] = []
        for index in range(params.n):
            detokenizer = None
            if self.tokenizer is not None and params.detokenize:
                detokenizer = IncrementalDetokenizer(
                    self.tokenizer,
                    before,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=stops,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
            requests.append(
                Request(
                    rid=numbers.first + index,
                    prompt_np=prompt_np,
                    params=params,
                    speculation=speculation,
                    max_total=total,
                    seed=seed,
                    arrival_time=numbers.arrival_time,
                    sample_index=index,
                    priority=priority,
                    stop_token_ids=stop_ids,
                    bad_words_ids=bad_words,
                    sink=None if stops is None else detokenizer,
                    keep_trace=self._keep_trace if keep_trace is None else keep_trace,
                    adapter=0 if lease is None else lease.slot,
                )
            )
            detokenizers.append(detokenizer)
        name = request_id if request_id is not None else str(requests[0].rid)
        return RequestGroup(name, text, params, requests, detokenizers, self.tokenizer, grammar, lease)

    def _draw_seed(self, number: int) -> int:
        """A seed for a request without one: fresh entropy, or, with an engine seed, a function of it and of the
        request's number."""
        if self._seed is None:
            return int.from_bytes(os.urandom(8), "little")
        digest = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def tokenize(self, prompt: Prompt) -> tuple[str | None, IntArray]:
        """Text (None for token ids) and token ids [n] int32 of a prompt."""
        return tokenize_prompt(prompt, self.tokenizer, self._model_config.vocab_size, self.max_model_len)

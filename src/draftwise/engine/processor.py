"""Turns user requests into requests that the scheduler can run: tokens, limits, seeds, speculation."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from draftwise.config import RequestLimits, SpeculativeConfig
from draftwise.config.trees import DynamicTree, parse_dynamic_tree, parse_tree
from draftwise.encoding import encode_text
from draftwise.engine.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer
from draftwise.engine.facts import Traits
from draftwise.engine.group import RequestGroup
from draftwise.engine.limits import check_params, check_portable, check_prompt
from draftwise.engine.states import WHY_NO_TREES
from draftwise.engine.stops import StopStrings
from draftwise.engine.workers import Lane
from draftwise.errors import ConfigError, ContextLengthError, RequestError, shown, suggest
from draftwise.models.base import ModelConfig
from draftwise.names import DEFAULT_TREE_NODES, MAX_TREE_NODES, RULES
from draftwise.propose.grammar import GrammarProposer
from draftwise.sampling.params import SamplingParams, resolve_bad_words
from draftwise.sched.request import Request
from draftwise.structured.compiling import SMALL
from draftwise.structured.grammars import DEFAULT_DRAFTS, Grammars
from draftwise.types import IntArray, Speculation

Prompt = str | Mapping[str, Any]
"""A text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``."""

_SPECULATION_FIELDS = (
    "method",
    "num_speculative_tokens",
    "speculative_token_tree",
    "speculative_dynamic_tree",
    "rule",
)


_FEW_CHARS = 2000
_FEW_IDS = 16_384
_FEW_SAMPLES = 64
"""Requests up to this size are prepared in a millisecond or two."""


class Numbers(NamedTuple):
    """``first``: the first number of a prompt's requests, one per sample; and their time of arrival."""

    first: int
    arrival_time: float


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt, if it has one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def end_tokens(model_config: ModelConfig, tokenizer: Any | None) -> tuple[int, ...]:
    """The tokens that end a sequence: the checkpoint's, then the tokenizer's if it differs."""
    eos = list(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in eos:
        eos.append(tokenizer.eos_token_id)
    return tuple(eos)


def is_quick(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request, but for its grammar, is prepared in a millisecond or two."""
    text = prompt_text(prompt) or ""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    num_ids = len(ids) if isinstance(ids, Sized) else 0
    chars = (0 if num_ids else len(text)) + sum(map(len, params.stop)) + sum(map(len, params.bad_words))
    lists = (params.stop_token_ids, params.allowed_token_ids or (), params.logit_bias or ())
    num_ids += params.n * num_ids // 16 + sum(map(len, lists))
    return chars <= _FEW_CHARS and num_ids <= _FEW_IDS and params.n <= _FEW_SAMPLES


def tokenize_prompt(
    prompt: Prompt, tokenizer: Any | None, vocab_size: int, max_model_len: int
) -> tuple[str | None, IntArray]:
    """Text (None for token ids) and token ids [n] int32 of a prompt. Raises RequestError."""
    text: str | None = None
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        extra = set(prompt) - {"prompt", "prompt_token_ids"}
        if extra:
            name = sorted(map(str, extra))[0]
            raise RequestError(
                f"unknown prompt field {shown(name)}{suggest(name, ['prompt', 'prompt_token_ids'])}"
            )
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _checked_ids(prompt["prompt_token_ids"], vocab_size, max_model_len)
        if not isinstance(prompt.get("prompt"), str):
            raise RequestError("a prompt is a string, {'prompt': text} or {'prompt_token_ids': [...]}")
        text = prompt["prompt"]
    else:
        raise RequestError(
            f"a prompt is a string, {{'prompt': text}} or {{'prompt_token_ids': [...]}}, not {type(prompt).__name__}"
        )
    if tokenizer is None:
        raise RequestError("the engine has no tokenizer (skip_tokenizer_init): pass prompt_token_ids")
    ids = encode_text(tokenizer, text, "prompt")
    if not ids:
        raise RequestError("the prompt is empty: it has no tokens")
    return text, _checked_ids(ids, vocab_size, max_model_len)


def _checked_ids(ids: Any, vocab_size: int, max_model_len: int) -> IntArray:
    if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray):
        raise RequestError(f"prompt_token_ids must be a list of integers, not {type(ids).__name__}")
    if len(ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens")
    if len(ids) >= max_model_len:
        # The first words are OpenAI's: clients look for them, and fall back to a model with more room.
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens (max_model_len), for prompt and "
            f"output together, and the prompt has {len(ids)} tokens: no room for an output token"
        )
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        least, largest = int(ids.min()), int(ids.max())
    else:
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, ids))):
            raise RequestError("prompt_token_ids must be integers")
        least, largest = min(ids), max(ids)
    if least < 0 or largest >= vocab_size:
        bad = next(t for t in ids if not 0 <= t < vocab_size)
        raise RequestError(f"token id {bad} is out of range: the vocabulary has {vocab_size} tokens")
    return np.asarray(ids, np.int32)


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
        ``most_drafts``: the most drafts of a request in a step, for a model with recurrent state; None: no such
        limit."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.limits = limits or RequestLimits()
        self._model_config = model_config
        self._drafters = {d.method: d for d in drafters}
        self._proposers = proposers
        self._default_method = default_method
        self._seed = seed
        self._clock = clock
        self._keep_trace = keep_trace
        self._most_drafts = most_drafts
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
        adapter: int = 0,
    ) -> RequestGroup:
        """Make the n requests of one prompt. ``keep_trace``: whether they record their steps (None: the engine's
        choice); ``numbers``: their numbers, if already taken (None: the next ones); ``adapter``: see `Request`.
        May be called by several threads at once. Raises RequestError; `LimitError`, one of these, before any work is
        done."""
        self.check(prompt, params)
        check_params(self.limits, params)
        numbers = numbers or self.take_numbers(params.n)
        text, prompt_np = self.tokenize(prompt)
        params.validate_for_vocab(self._model_config.vocab_size)
        speculation = self.resolve_speculation(params)
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
                    adapter=adapter,
                )
            )
            detokenizers.append(detokenizer)
        name = request_id if request_id is not None else str(requests[0].rid)
        return RequestGroup(name, text, params, requests, detokenizers, self.tokenizer, grammar)

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

    # ----------------------------------------------------------------------------------------- speculation

    def resolve_speculation(self, params: SamplingParams) -> Speculation:
        """The engine's default speculation, overridden by the request's ``speculation``, and the acceptance rule.

        Rules: greedy at temperature 0; else what the request or the engine chose; else ``coupled`` for a request
        with a seed (its text must not depend on the draft length, which may follow timing), else ``rejection``.
        """
        given = dict(params.speculation or {})
        for name in given:
            if name not in _SPECULATION_FIELDS:
                raise RequestError(
                    f"speculation: unknown field {shown(name)}{suggest(str(name), _SPECULATION_FIELDS)}"
                )
        method = given.get("method")
        structured = params.structured_outputs is not None
        if method is None:
            method = self._default_method
            if method == "none" and structured:  # what a grammar forces costs nothing to draft
                method = GrammarProposer.name
        loaded = ["none", *self._drafters, *([GrammarProposer.name] if structured else [])]
        if method not in loaded:
            raise RequestError(
                f"speculation: method {shown(method)} is not loaded{suggest(str(method), loaded)}; "
                f"this engine has {', '.join(loaded)}"
            )
        config = self._drafters.get(method)
        rule = self._rule(params, given.get("rule"), config)
        if method == "none":
            return Speculation("none", 0, rule)
        if config is not None and self._proposers[method].prompt_only:
            if params.max_tokens != 1 or params.n != 1:
                raise RequestError(
                    f"method {method!r} reads prompts: max_tokens and n must be 1, got {params.max_tokens} and "
                    f"{params.n}"
                )
            return Speculation(method, 1, rule, whole_prompt=True)
        dynamic = self._dynamic_tree(given, method, config)
        k = given.get("num_speculative_tokens")
        if k is None and dynamic is not None and (config is None or config.speculative_dynamic_tree is None):
            k = DEFAULT_TREE_NODES
        most = self._most_chain(method)
        if k is None:
            k = min(config.num_speculative_tokens if config is not None else DEFAULT_DRAFTS, most)
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= MAX_TREE_NODES:
            raise RequestError(
                f"speculation: num_speculative_tokens must be an integer from 0 to {MAX_TREE_NODES}, got {shown(k)}"
            )
        if k > most:
            raise RequestError(
                f"speculation: num_speculative_tokens: this engine keeps recurrent state for {most} drafts of a "
                f"request, not for {k} (the speculative_config of the engine says how many)"
            )
        if k == 0:
            return Speculation("none", 0, rule)
        if dynamic is not None:
            return Speculation(method, k, rule, dynamic=dynamic)
        tree = given.get("speculative_token_tree", config.speculative_token_tree if config else None)
        if tree is None:
            return Speculation(method, k, rule)
        self._refuse_tree("speculative_token_tree")
        if config is None or not self._proposers[method].drafts_trees:
            raise RequestError(
                f"speculation: method {method!r} drafts chains only, so it cannot take speculative_token_tree"
            )
        try:
            parents, ranks = parse_tree(tree)
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from None
        return Speculation(method, len(parents), rule, parents, ranks)

    def _most_chain(self, method: str) -> int:
        """The number of drafts for which the target and the drafter keep recurrent states, if they have any."""
        own = self._proposers[method].most_drafts if method in self._proposers else None
        limits = [most for most in (own, self._most_drafts) if most is not None]
        return min([MAX_TREE_NODES, *limits])

    def _refuse_tree(self, name: str) -> None:
        if self._most_drafts is not None:
            raise RequestError(f"speculation: {name}: {WHY_NO_TREES}")

    def _dynamic_tree(
        self, given: Mapping[str, Any], method: str, config: SpeculativeConfig | None
    ) -> DynamicTree | None:
        """The request's own dynamic tree, or the drafter's unless the request asks for a static one."""
        name = "speculative_dynamic_tree"
        if given.get(name) is None:
            wants_other = given.get("speculative_token_tree") is not None
            return None if config is None or wants_other else config.speculative_dynamic_tree
        try:
            dynamic = parse_dynamic_tree(given[name])
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from None
        if dynamic is None:
            return None
        self._refuse_tree(name)
        if given.get("speculative_token_tree") is not None:
            raise RequestError(f"speculation: {name} contradicts speculative_token_tree")
        if config is None or not self._proposers[method].drafts_dynamic_trees:
            raise RequestError(f"speculation: method {method!r} drafts no trees for {name}")
        return dynamic

    def _rule(self, params: SamplingParams, asked: Any, config: SpeculativeConfig | None) -> str:
        if asked is not None:
            asked = "rejection" if asked == "standard" else asked
            if asked not in RULES and asked != "greedy":
                raise RequestError(f"speculation: unknown rule {shown(asked)}{suggest(str(asked), RULES)}")
        engine = next((d.rule for d in self._drafters.values() if d.rule is not None), None)
        chosen: str | None = asked or (config.rule if config is not None else None) or engine
        if chosen == "synthetic" and engine != "synthetic":
            raise RequestError(
                "speculation: rule 'synthetic' needs an engine with rejection_sample_method='synthetic' and "
                "synthetic_acceptance_length or synthetic_acceptance_rates"
            )
        if chosen == "greedy" and not params.is_greedy:
            raise RequestError("speculation: rule 'greedy' needs temperature 0")
        if params.is_greedy and chosen not in ("typical", "synthetic"):
            return "greedy"
        if chosen is not None:
            return chosen
        return "coupled" if params.seed is not None else "rejection"

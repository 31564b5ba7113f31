"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a derivative-based lexer,
walked along a trie of the vocabulary, so that a mask costs microseconds and no grammar needs preparing."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import import_module
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from draftwise.errors import ConfigError, ParametersError, RequestError, install
from draftwise.sampling.masks import Words
from draftwise.sampling.structured import GrammarKind, StructuredOutputs
from draftwise.structured.base import Grammar, GrammarBackend, Matcher
from draftwise.structured.compiling import Compiler
from draftwise.structured.sources import num_remainders, source_of

logger = logging.getLogger("draftwise")

_KEPT = 256
_KEPT_CHARS = 1 << 18
"""Compiled grammars kept that nobody uses: so many, of so many characters together. One takes 10 to 100 KB, but those
of strangers up to 300 bytes for each character."""
_CHARS_PER_REMAINDER = 4
"""A remainder of ``multipleOf`` takes as much memory as so many characters."""

_LIMITS = {
    "step_lexer_fuel": 50_000,  # new states of the lexer in one step: 50 ms at most (library: 200,000)
    "max_items_in_row": 20_000,  # alternatives open at one place: some milliseconds (library: 2,000)
    "verbose_errors": False,  # no dumps of its state
}
"""Others are the library's own: compilation and the first mask together 1,000,000 units of fuel, some two seconds;
50,000 items of the parser in one step, 20 ms; 500,000 symbols of a grammar; 250,000 states of the lexer."""

_LONGEST_ERROR = 300


class LlguidanceBackend(GrammarBackend):
    """Compiles for one fast tokenizer."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int], seconds: float = 10.0
    ) -> None:
        """``tokenizer``: a fast Transformers tokenizer; ``vocab_size``: the model's; ``eos_token_ids``: at least one;
        ``seconds``: how long a compilation may take.

        Raises:
            ConfigError: llguidance is not installed, or cannot use this tokenizer.
        """
        try:
            self._library: Any = import_module("llguidance")
        except ImportError:
            raise ConfigError(
                f"structured_outputs needs the package 'llguidance': {install('structured')}"
            ) from None
        # A model may have rows that its tokenizer does not know (padding), or, rarely, the other way round.
        self.num_tokens = max(vocab_size, len(tokenizer))
        self._num_named = len(tokenizer)
        text = json.loads(tokenizer.backend_tokenizer.to_str())
        text["padding"] = text["truncation"] = None
        try:
            self._tokenizer = self._library.LLTokenizer(
                json.dumps(text), n_vocab=self.num_tokens, eos_token=list(eos_token_ids)
            )
        except Exception as error:  # the library raises plain ValueError and RuntimeError
            raise ConfigError(
                f"structured_outputs: this tokenizer cannot be used: {_one_line(error)}"
            ) from error
        self._limits = self._library.LLParserLimits(**_LIMITS)
        self._compiler = Compiler(seconds)
        self._in_use: WeakValueDictionary[StructuredOutputs, LlguidanceGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[StructuredOutputs, LlguidanceGrammar] = OrderedDict()
        self._kept_chars = 0
        self._under_way: dict[StructuredOutputs, Future[LlguidanceGrammar]] = {}
        self._lock = Lock()

    def compile(self, spec: StructuredOutputs) -> Grammar:
        with self._lock:
            grammar = self._in_use.get(spec)
            if grammar is not None:
                if spec in self._kept:
                    self._kept.move_to_end(spec)
                return grammar
            others = self._under_way.get(spec)
            if others is None:
                own = self._under_way[spec] = Future[LlguidanceGrammar]()
        if others is not None:  # another request compiles the same
            return others.result()
        try:
            num_remainders(spec)
            source = self._source(spec)  # in Python, for the most part
            grammar = self._compiler.run(lambda: self._compile(source, spec.kind), spec.size)
        except BaseException as error:
            with self._lock:
                del self._under_way[spec]
            own.set_exception(error)
            raise
        with self._lock:
            self._in_use[spec] = grammar
            self._keep(spec, grammar)
            del self._under_way[spec]
        own.set_result(grammar)
        return grammar

    def token_bytes(self) -> Sequence[bytes]:
        return [
            self._tokenizer.decode_bytes([token]) if token < self._num_named else b""
            for token in range(self.num_tokens)
        ]

    def has(self, spec: StructuredOutputs) -> bool:
        with self._lock:
            return spec in self._in_use

    def _keep(self, spec: StructuredOutputs, grammar: LlguidanceGrammar) -> None:
        self._kept[spec] = grammar
        self._kept_chars += _weight(spec)
        while len(self._kept) > _KEPT or self._kept_chars > _KEPT_CHARS:
            dropped, _ = self._kept.popitem(last=False)
            self._kept_chars -= _weight(dropped)

    def _source(self, spec: StructuredOutputs) -> str:
        try:
            return source_of(spec, self._library)
        except (ValueError, RecursionError) as error:
            raise _refused(_invalid(spec.kind), error) from None
        except BaseException as error:
            raise _plain(error) from None

    def _compile(self, source: str, kind: GrammarKind) -> LlguidanceGrammar:
        """Compile, and make the first mask, which takes long where the compilation did not. Raises RequestError."""
        invalid = _invalid(kind)
        try:
            matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if not matcher.is_error():
                mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
                if "NoExtension" in matcher.get_error() or not (mask.any() or matcher.is_accepting()):
                    raise RequestError(f"structured_outputs: {invalid}: no text can follow it")
        except ValueError as error:
            raise (error if isinstance(error, RequestError) else _refused(invalid, error)) from None
        except BaseException as error:
            raise _plain(error) from None
        if matcher.is_error():
            raise _refused(invalid, matcher.get_error())
        return LlguidanceGrammar(matcher, -(-self.num_tokens // 32))


def _weight(spec: StructuredOutputs) -> int:
    """The memory of a compiled grammar, as characters of an ordinary one."""
    return spec.size + _CHARS_PER_REMAINDER * num_remainders(spec)


class LlguidanceGrammar(Grammar):
    """A matcher at the start; requests get copies (about 1 us)."""

    def __init__(self, matcher: Any, num_words: int) -> None:
        """``num_words``: of a mask; llguidance's own may be longer."""
        self._matcher = matcher
        self._num_words = num_words

    def matcher(self) -> Matcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._num_words)


class LlguidanceMatcher(Matcher):
    """One text. llguidance never raises for bad tokens or grammars; it enters an error state for ever.

    A run of forced tokens is asked for once and followed from then on: the library would go through all of it for each
    mask. Where a token is forced, its mask is that token alone.
    """

    __slots__ = ("_at", "_matcher", "_num_words", "_run")

    def __init__(self, matcher: Any, num_words: int) -> None:
        """``num_words``: of a mask; llguidance's own may be longer."""
        self._matcher = matcher
        self._num_words = num_words
        self._run: list[int] = []  # forced tokens, of which the first `_at` were taken in
        self._at = 0

    def mask(self) -> Words:
        try:
            if self._find_run():
                words: Words = np.zeros(self._num_words, np.int32)
                token = self._run[self._at]
                words.view(np.uint32)[token >> 5] = 1 << (token & 31)
                return words
            words = np.frombuffer(self._matcher.compute_bitmask(), np.int32, self._num_words)
            self._check()
            return words
        except BaseException as error:
            raise _plain(error) from None

    def advance(self, token: int) -> bool:
        try:
            if not self._matcher.try_consume_tokens([token]):
                self._check()
                return False
        except BaseException as error:
            raise _plain(error) from None
        if self._at < len(self._run) and self._run[self._at] == token:
            self._at += 1
        else:
            self._run, self._at = [], 0
        return True

    def rollback(self, count: int) -> None:
        if count <= self._at:
            self._at -= count
        else:
            self._run, self._at = [], 0
        try:
            if not self._matcher.rollback(count):
                raise _refused(_FOLLOWED, self._matcher.get_error())
        except BaseException as error:
            raise _plain(error) from None

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def forced(self, limit: int) -> Sequence[int]:
        try:
            return self._run[self._at : self._at + limit] if self._find_run() else ()
        except BaseException as error:
            raise _plain(error) from None

    def _find_run(self) -> bool:
        """Whether the next token is forced."""
        if self._at == len(self._run):
            self._run, self._at = self._matcher.compute_ff_tokens(), 0
            self._check()
        return bool(self._run)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(_FOLLOWED, self._matcher.get_error())


_FOLLOWED = "the grammar cannot be followed"


def _invalid(kind: GrammarKind) -> str:
    return f"invalid {'JSON schema' if kind == 'json' else kind}"


_FAILED = "too large or too involved for the grammar library, which failed on it"


def _plain(error: BaseException) -> BaseException:
    """The error itself; instead of a panic of the library, which is no Exception, one that fails the request alone."""
    if type(error).__name__ != "PanicException":
        return error
    logger.error("the grammar library failed: %s", error)
    return ParametersError(f"structured_outputs: {_FAILED}")


def _refused(what: str, error: object) -> ParametersError:
    """The library's message as one short line; its panics go to the log."""
    words = _one_line(str(error).replace("<non-verbose/>", ""))
    if words.startswith("panic"):
        logger.error("the grammar library failed: %s", words)
        words = _FAILED
    words = words if len(words) <= _LONGEST_ERROR else words[: _LONGEST_ERROR - 3] + "..."
    return ParametersError(f"structured_outputs: {what}: {words}")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())

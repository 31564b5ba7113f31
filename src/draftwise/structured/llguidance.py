"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): an Earley parser over a derivative-based lexer,
walked along a trie of the vocabulary, so that a mask costs microseconds and no grammar needs preparing."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from draftwise.errors import ConfigError, RequestError
from draftwise.sampling.masks import Words
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured.base import GrammarBackend, Matcher

_KEPT = 256
"""Compiled grammars kept; one takes 10 to 100 KB."""

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""A run of optional whitespace in JSON, unless the request says otherwise."""


class LlguidanceBackend(GrammarBackend):
    """Compiles for one fast tokenizer. A compiled grammar is a matcher nobody advances; requests get copies (about
    1 us)."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``tokenizer``: a fast Transformers tokenizer; ``vocab_size``: the model's; ``eos_token_ids``: at least one.

        Raises:
            ConfigError: llguidance is not installed, or cannot use this tokenizer.
        """
        try:
            self._library: Any = import_module("llguidance")
        except ImportError:
            raise ConfigError(
                "structured_outputs needs the package 'llguidance': pip install 'draftwise[structured]'"
            ) from None
        # A model may have rows that its tokenizer does not know (padding), or, rarely, the other way round.
        self.num_tokens = max(vocab_size, len(tokenizer))
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
        self._compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._lock = Lock()

    def matcher(self, spec: StructuredOutputs) -> Matcher:
        with self._lock:
            compiled = self._compiled.get(spec)
            if compiled is not None:
                self._compiled.move_to_end(spec)
        if compiled is None:
            compiled = self._compile(spec)
            with self._lock:
                self._compiled[spec] = compiled
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return LlguidanceMatcher(compiled.deep_copy(), -(-self.num_tokens // 32))

    def has(self, spec: StructuredOutputs) -> bool:
        with self._lock:
            return spec in self._compiled

    def _compile(self, spec: StructuredOutputs) -> Any:
        kind = "JSON schema" if spec.kind == "json" else spec.kind
        try:
            compiled = self._library.LLMatcher(self._tokenizer, self._source(spec), log_level=0)
        except ValueError as error:
            raise RequestError(f"structured_outputs: invalid {kind}: {_one_line(error)}") from None
        if compiled.is_error():
            raise RequestError(f"structured_outputs: invalid {kind}: {_one_line(compiled.get_error())}")
        return compiled

    def _source(self, spec: StructuredOutputs) -> str:
        """The grammar as llguidance reads it. Raises ValueError."""
        library = self._library
        source: str
        if spec.kind == "json":
            options: dict[str, Any] = {"whitespace_flexible": not spec.disable_any_whitespace}
            if not spec.disable_any_whitespace:
                options["whitespace_pattern"] = spec.whitespace_pattern or _WHITESPACE
            source = library.LLMatcher.grammar_from_json_schema(spec.schema, overrides=options)
        elif spec.kind == "regex":
            assert spec.regex is not None
            # \d means 0-9 to those who parse the answer, not every digit of Unicode
            regex = library.regex_to_lark(_without_anchors(spec.regex), "d")
            source = library.LLMatcher.grammar_from_lark(f"start: /{regex}/")
        elif spec.kind == "choice":
            assert spec.choice is not None
            alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in spec.choice)
            source = library.LLMatcher.grammar_from_lark(f"start: {alternatives}")
        else:
            assert spec.grammar is not None
            source = library.grammar_from("grammar", spec.grammar)
        return source


class LlguidanceMatcher(Matcher):
    """One text. llguidance never raises for bad tokens or grammars; it enters an error state for ever."""

    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: Any, num_words: int) -> None:
        """``num_words``: of a mask; llguidance's own may be longer."""
        self._matcher = matcher
        self._num_words = num_words

    def mask(self) -> Words:
        words: Words = np.frombuffer(self._matcher.compute_bitmask(), np.int32, self._num_words)
        if self._matcher.is_error():
            raise RequestError(
                f"structured_outputs: the grammar cannot be followed: {_one_line(self._matcher.get_error())}"
            )
        return words

    def advance(self, token: int) -> bool:
        taken: int = self._matcher.try_consume_tokens([token])
        return taken == 1

    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise RequestError(
                f"structured_outputs: the grammar cannot be followed: {_one_line(self._matcher.get_error())}"
            )

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def forced(self) -> Sequence[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens


def _without_anchors(regex: str) -> str:
    """A regex is matched against the whole text, so that ^ at its start and $ at its end say nothing new."""
    regex = regex.removeprefix("^")
    if regex.endswith("$"):
        before = regex[:-1]
        escaped = (len(before) - len(before.rstrip("\\"))) % 2 == 1
        regex = regex if escaped else before
    return regex


def _one_line(error: object) -> str:
    return " ".join(str(error).split())

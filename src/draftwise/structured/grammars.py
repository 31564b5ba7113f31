"""The grammars of one engine: checks them at admission, and gives the executor a cursor per request."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured.base import Grammar, GrammarBackend
from draftwise.structured.cursor import Cursor, Vocabulary

DEFAULT_DRAFTS = 8
"""Forced tokens proposed per step where no drafter is loaded."""


class Grammars:
    """Shared by the processor (any thread) and the executor. The backend is made at the first request that needs
    it: an index of a vocabulary of 150k tokens takes half a second."""

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seconds: float = 10.0,
    ) -> None:
        """``tokenizer``: a fast Transformers tokenizer or None; ``vocab_size``: the model's; ``seconds``: how long the
        compilation of a grammar may take."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._seconds = seconds
        self._made: tuple[GrammarBackend, Vocabulary] | None = None
        self._lock = Lock()

    def is_ready(self, spec: StructuredOutputs) -> bool:
        """Whether `compile` would take no time."""
        made = self._made  # without the lock, which is held for long while the backend is made
        return made is not None and made[0].has(spec)

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """Compile a grammar. Who holds it makes sure that `cursor` takes no time.

        Raises:
            RequestError: it is invalid, or this engine cannot serve it: no tokenizer, no end-of-sequence token.
            ConfigError: the library is not installed, or cannot use the tokenizer.
        """
        return self._made_once()[0].compile(spec)

    def cursor(self, params: SamplingParams, output_ids: Sequence[int] = ()) -> Cursor:
        """A cursor behind ``output_ids``, for a request whose ``structured_outputs`` was compiled."""
        assert params.structured_outputs is not None
        backend, vocabulary = self._made_once()
        return Cursor(
            backend.compile(params.structured_outputs).matcher(),
            vocabulary,
            ignore_eos=params.ignore_eos,
            output_ids=output_ids,
        )

    def _made_once(self) -> tuple[GrammarBackend, Vocabulary]:
        with self._lock:
            if self._made is None:
                if self._tokenizer is None:
                    raise RequestError("structured_outputs needs a tokenizer, but the engine has none")
                if not self._eos:
                    raise RequestError("structured_outputs needs a model with an end-of-sequence token")
                from draftwise.structured.llguidance import LlguidanceBackend  # late: a library of an extra

                backend = LlguidanceBackend(self._tokenizer, self._vocab_size, self._eos, self._seconds)
                self._made = backend, Vocabulary(self._vocab_size, self._eos, backend.num_tokens)
            return self._made

"""The grammars of one engine: checks them at admission, and gives the executor a cursor per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from draftwise.errors import RequestError
from draftwise.structured.base import GrammarBackend
from draftwise.structured.cursor import Cursor, Vocabulary

if TYPE_CHECKING:
    from draftwise.sampling.params import SamplingParams
    from draftwise.sampling.structured import StructuredOutputs

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
        make_backend: Callable[[Any, int, Sequence[int]], GrammarBackend] | None = None,
    ) -> None:
        """``tokenizer``: a fast Transformers tokenizer or None; ``vocab_size``: the model's; ``make_backend``:
        called with these and the end-of-sequence tokens (llguidance by default)."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._make_backend = make_backend
        self._made: tuple[GrammarBackend, Vocabulary] | None = None
        self._lock = Lock()

    def is_ready(self, spec: StructuredOutputs) -> bool:
        """Whether `check` would take no time: the grammar was compiled a moment ago."""
        with self._lock:
            made = self._made
        return made is not None and made[0].has(spec)

    def check(self, spec: StructuredOutputs) -> None:
        """Compile a grammar, to be used soon.

        Raises:
            RequestError: it is invalid, or this engine cannot serve it: no tokenizer, no end-of-sequence token.
            ConfigError: the library is not installed, or cannot use the tokenizer.
        """
        self._made_once()[0].matcher(spec)

    def cursor(self, params: SamplingParams, output_ids: Sequence[int] = ()) -> Cursor:
        """A cursor behind ``output_ids``, for a request whose ``structured_outputs`` was checked."""
        assert params.structured_outputs is not None
        backend, vocabulary = self._made_once()
        return Cursor(
            backend.matcher(params.structured_outputs),
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
                make = self._make_backend or _llguidance
                backend = make(self._tokenizer, self._vocab_size, self._eos)
                self._made = backend, Vocabulary(self._vocab_size, self._eos, backend.num_tokens)
            return self._made


def _llguidance(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarBackend:
    from draftwise.structured.llguidance import LlguidanceBackend

    return LlguidanceBackend(tokenizer, vocab_size, eos_token_ids)

"""The grammars of one engine: checks them at admission, and gives the executor a cursor per request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured.after import AfterGrammar, FreeGrammar, Marks, TokenBytes
from draftwise.structured.base import Grammar, GrammarBackend
from draftwise.structured.cursor import Cursor, Vocabulary

DEFAULT_DRAFTS = 8
"""Forced tokens proposed per step where no drafter is loaded."""
_KEPT_MARKS = 16
"""Sets of marks whose tokens are known: a stranger may invent any number."""


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
        self._token_bytes: TokenBytes | None = None
        self._marks: OrderedDict[tuple[tuple[str, ...], str | None], Marks] = OrderedDict()
        self._marks_lock = Lock()

    def is_ready(self, spec: StructuredOutputs) -> bool:
        """Whether `compile` would take no time."""
        made = self._made  # without the lock, which is held for long while the backend is made
        if made is None or not (spec.is_free or made[0].has(spec.inner)):
            return False
        return spec.after is None or (spec.after, spec.opened_by) in self._marks

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """Compile a grammar. While it is held, `cursor` takes no time.

        Raises:
            RequestError: it is invalid, or this engine cannot serve it: no tokenizer, no end-of-sequence token.
            ConfigError: the library is not installed, or cannot use the tokenizer.
        """
        backend = self._made_once()[0]
        inner = FreeGrammar(backend.num_tokens) if spec.is_free else backend.compile(spec.inner)
        return (
            inner if spec.after is None else AfterGrammar(inner, self._marks_of(spec, backend), spec.within)
        )

    def _marks_of(self, spec: StructuredOutputs, backend: GrammarBackend) -> Marks:
        assert spec.after is not None
        with self._marks_lock:
            key = (spec.after, spec.opened_by)
            marks = self._marks.get(key)
            if marks is None:
                if self._token_bytes is None:
                    self._token_bytes = TokenBytes(backend.token_bytes())
                marks = self._marks[key] = Marks(spec.after, spec.opened_by, self._token_bytes)
                while len(self._marks) > _KEPT_MARKS:
                    self._marks.popitem(last=False)
            else:
                self._marks.move_to_end(key)
            return marks

    def cursor(self, params: SamplingParams, output_ids: Sequence[int] = ()) -> Cursor:
        """A cursor behind ``output_ids``, for a request whose ``structured_outputs`` was compiled."""
        assert params.structured_outputs is not None
        return Cursor(
            self.compile(params.structured_outputs).matcher(),
            self._made_once()[1],
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

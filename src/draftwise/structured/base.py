"""The contract of a grammar engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from draftwise.sampling.masks import Words
from draftwise.sampling.structured import StructuredOutputs


class Matcher(ABC):
    """Where one text stands in its grammar. End-of-sequence tokens are not its business (`Cursor` adds them).

    What it answers is a function of the tokens taken in, whatever was rolled back on the way. All of it may raise
    `RequestError`: the grammar turned out too complex to go on.
    """

    @abstractmethod
    def mask(self) -> Words:
        """The tokens that may follow, [W] int32, not to be written to. The bits of end-of-sequence tokens, and of
        tokens past the vocabulary, may be anything."""

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Take in a token that `mask` allows here; False (and nothing taken in) if it cannot be."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens."""

    @abstractmethod
    def is_accepting(self) -> bool:
        """Whether the text so far is complete: it may end here."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""

    @abstractmethod
    def forced(self, limit: int) -> Sequence[int]:
        """The tokens that must come next, as far as there is no choice, at most ``limit``; may be empty though there
        is none."""


class Grammar(ABC):
    """A compiled grammar."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A matcher at the start of the text: quick."""


class GrammarBackend(ABC):
    """Compiles grammars for one tokenizer. Used by several threads."""

    num_tokens: int
    """Tokens covered by a mask: at least the model's vocabulary."""

    @abstractmethod
    def compile(self, spec: StructuredOutputs) -> Grammar:
        """Compile what is wanted. What was compiled is at hand for the next call for as long as somebody holds it, and
        mostly for some time after.

        Raises `RequestError`: the schema, regular expression or grammar is invalid, not supported, allows no text at
        all, or takes too long."""

    @abstractmethod
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes that each of the ``num_tokens`` tokens stands for; empty: none. Long work."""

    @abstractmethod
    def has(self, spec: StructuredOutputs) -> bool:
        """Whether `compile` has it at hand."""

"""A grammar that anybody can check: a finite set of words, each a sequence of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from draftwise.sampling.masks import Words, pack
from draftwise.structured.base import Matcher
from draftwise.structured.cursor import Cursor, Vocabulary

Word = tuple[int, ...]


def following(words: Iterable[Word], path: Sequence[int]) -> set[int]:
    """Tokens with which some word goes on after ``path``."""
    n = len(path)
    return {word[n] for word in words if len(word) > n and word[:n] == tuple(path)}


class WordMatcher(Matcher):
    """The text must be one of ``words``. Counts the masks it was asked for; bits past ``num_tokens`` are junk."""

    def __init__(self, words: Iterable[Word], num_tokens: int) -> None:
        self.words = frozenset(words)
        self.num_tokens = num_tokens
        self.path: list[int] = []
        self.masks = 0

    def mask(self) -> Words:
        self.masks += 1
        bits = np.zeros(-(-self.num_tokens // 32) * 32, np.bool_)
        bits[self.num_tokens :] = True
        bits[list(following(self.words, self.path))] = True
        return pack(bits)

    def advance(self, token: int) -> bool:
        if token not in following(self.words, self.path):
            return False
        self.path.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert count <= len(self.path)
        del self.path[len(self.path) - count :]

    def is_accepting(self) -> bool:
        return tuple(self.path) in self.words

    def is_finished(self) -> bool:
        return self.is_accepting() and not following(self.words, self.path)

    def forced(self, limit: int) -> Sequence[int]:
        path = list(self.path)
        while tuple(path) not in self.words and len(following(self.words, path)) == 1:
            path.extend(following(self.words, path))
        return path[len(self.path) :][:limit]


def cursor_over(words: Iterable[Word], vocab: int, eos: Sequence[int] = (0,), **options: Any) -> Cursor:
    return Cursor(WordMatcher(words, vocab + 1), Vocabulary(vocab, eos, vocab + 1), **options)

"""Prompt lookup: what followed the last time the text ended like this (docs/algorithms/ngram.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from draftwise.errors import ConfigError
from draftwise.graphs.seats.lookup import LookUp
from draftwise.kernels.cpu.library import native_library, why_not_native
from draftwise.kernels.cpu.rounds import RoundDrafts, RoundNgrams
from draftwise.names import method_number
from draftwise.propose.base import DraftRow, Proposer, ProposerContext
from draftwise.propose.columns import (
    ColumnDrafter,
    ColumnLookUp,
    DraftBlock,
    DraftColumns,
    RoundDrafter,
    says_itself,
)
from draftwise.propose.lookup.ngram_native import NativeNgrams
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, chain_parents

_ITEM = 4  # bytes of an int32 token


class _Index:
    """Where each n-gram of one request ended last. Keys are the tokens' own bytes: exact, and 4n + 33 bytes."""

    __slots__ = ("done", "last", "sizes")

    def __init__(self, sizes: range) -> None:
        self.sizes = sizes  # longest first
        self.last: list[dict[bytes, int]] = [{} for _ in sizes]
        self.done = 0  # n-grams that end before this token are in

    def extend(self, token_ids_np: IntArray, end: int) -> None:
        """Take in the n-grams whose last token is one of ``done .. end - 1``.

        Example (n = 2, tokens 7 8 9 7, done 1, end 4): (7, 8) ends at 1, (8, 9) at 2, (9, 7) at 3; the bytes of
        the first are those of tokens 0..1, of the next one token further.
        """
        low = max(self.done - self.sizes[0] + 1, 0)
        data = _bytes(token_ids_np[low:end])
        for n, last in zip(self.sizes, self.last, strict=True):
            stop = n * _ITEM
            for position in range(max(self.done, n - 1), end):
                start = (position - n + 1 - low) * _ITEM
                last[data[start : start + stop]] = position
        self.done = end

    def find(self, token_ids_np: IntArray) -> tuple[int, int] | None:
        """Where the longest indexed suffix of the tokens ended last, and its length; or None."""
        tail = _bytes(token_ids_np[-self.sizes[0] :])
        for n, last in zip(self.sizes, self.last, strict=True):
            # Shorter than n tokens: the slice is all of them, a key no n-gram has.
            end = last.get(tail[-n * _ITEM :])
            if end is not None:
                return end, n
        return None


def _bytes(token_ids_np: IntArray) -> bytes:
    return (token_ids_np if token_ids_np.dtype == np.int32 else token_ids_np.astype(np.int32)).tobytes()


class _PythonNgrams:
    """`NativeNgrams` without the native library, and its reference."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes

    def index(self) -> _Index:
        return _Index(self._sizes)

    def step(
        self,
        indexes: Sequence[_Index],
        tokens: Sequence[IntArray],
        known: Sequence[int],
        wanted: Sequence[int],
        tokens_at: Sequence[int],
    ) -> list[tuple[list[int], int]]:
        out: list[tuple[list[int], int]] = []
        for index, tokens_np, count, length in zip(indexes, tokens, known, wanted, strict=True):
            # N-grams that end in the last token stay out until another token follows: they are what is looked for.
            index.extend(tokens_np, count - 1)
            found = index.find(tokens_np) if length else None
            if found is None:
                out.append(([], 0))
            else:
                out.append((_continuation(tokens_np, found[0] + 1, length), found[1]))
        return out


class NgramProposer(Proposer, ColumnDrafter, ColumnLookUp, RoundDrafter):
    """Copies what followed the most recent occurrence of the longest suffix of ``prompt_lookup_max`` down to
    ``prompt_lookup_min`` tokens (prompt lookup decoding; Saxena 2023).

    Example: after 1 2 3 4 1 2 3, with lengths 2..2 and a budget of 3, the proposal is 4 1 2.

    The index of a request grows by the tokens it has not seen; finding a match costs a few dictionary
    look-ups whatever the length of the context. It is made at the first call for a request, and again if the
    request comes back after a preemption.
    """

    name: ClassVar[str] = "ngram"
    evident: ClassVar[bool] = True

    def __init__(
        self,
        prompt_lookup_max: int = 5,
        prompt_lookup_min: int = 2,
        *,
        num_drafts: int = 0,
        native: bool | None = None,
    ) -> None:
        """``num_drafts``: most drafts of a request whose steps stay on a device; 0: none does. ``native``: use the
        native index (None: where it was built).

        Raises:
            ValueError: not 1 <= prompt_lookup_min <= prompt_lookup_max.
            ConfigError: ``native`` is True and the library was not built.
        """
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                "prompt lookup needs 1 <= prompt_lookup_min <= prompt_lookup_max, got "
                f"{prompt_lookup_min} and {prompt_lookup_max}"
            )
        self.sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self._num_drafts = num_drafts
        library = None if native is False else native_library()
        if native and library is None:
            raise ConfigError(f"ngram: {why_not_native()}")
        self._engine: _PythonNgrams | NativeNgrams = (
            _PythonNgrams(self.sizes)
            if library is None
            else NativeNgrams(library, prompt_lookup_max, prompt_lookup_min)
        )
        self._indexes: dict[int, Any] = {}  # of the engine's kind
        self._together: tuple[list[int], RoundNgrams] | None = None
        """What rounds were told last, and of whom; None: one of them has left, or has another index now."""

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """Take the lengths from the configuration; one that is not given equals the other, if that is."""
        longest, shortest = context.speculative.prompt_lookup_max, context.speculative.prompt_lookup_min
        num_drafts = context.speculative.num_speculative_tokens
        if longest is None and shortest is None:
            return cls(num_drafts=num_drafts)
        longest = longest if longest is not None else shortest
        shortest = shortest if shortest is not None else longest
        assert longest is not None and shortest is not None
        return cls(longest, shortest, num_drafts=num_drafts)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [proposal for proposal, _ in self.look_ups(rows)]

    def draft_columns(self, columns: DraftColumns) -> DraftBlock | None:
        found = None if says_itself(self, NgramProposer.propose) else self.look_up_columns(columns)
        return None if found is None else found[0]

    def look_up_columns(self, columns: DraftColumns) -> tuple[DraftBlock, Sequence[int]] | None:
        engine, indexes = self._engine, self._indexes
        if not isinstance(engine, NativeNgrams) or columns.is_tree:
            return None
        facts = columns.facts
        wanted = list(map(min, columns.budgets, facts.max_depths))
        asked: list[Any] = []
        for rid, known in zip(columns.rids, facts.known, strict=True):
            index = indexes.get(rid)
            if index is None or index.done >= known:
                index = indexes[rid] = engine.index()
                self._together = None
            asked.append(index)
        tokens, sizes, matches = engine.columns(asked, facts.known, wanted, facts.tokens_at)
        return DraftBlock(tokens, sizes), matches

    def round_drafts(self, columns: DraftColumns, rounds: int, rows: int) -> tuple[RoundDrafts, None] | None:
        if not isinstance(self._engine, NativeNgrams) or says_itself(self, NgramProposer.propose):
            return None
        if columns.is_tree:
            return None
        if self._together is None or self._together[0] != columns.rids:
            found = [index.handle for rid in columns.rids if (index := self._indexes.get(rid)) is not None]
            # an index is made by a request's first look-up
            if len(found) < len(columns.rids):
                return None
            self._together = columns.rids, RoundNgrams(method_number(self.name), found)
        return self._together[1], None

    def look_up(self, row: DraftRow) -> tuple[Proposal, int]:
        """The draft of one row, and the length of the match it follows (0: none)."""
        return self.look_ups([row])[0]

    def look_ups(self, rows: Sequence[DraftRow]) -> list[tuple[Proposal, int]]:
        """The draft of each row, and the length of the match it follows (0: none)."""
        if not rows:
            return []
        indexes: list[Any] = []
        texts: list[IntArray] = []
        known: list[int] = []
        wanted: list[int] = []
        places: list[int] = []
        for row in rows:
            tokens_np = row.token_ids_np
            at = row.tokens_at
            if not at and (tokens_np.dtype != np.int32 or not tokens_np.flags.c_contiguous):
                tokens_np = np.ascontiguousarray(tokens_np, np.int32)
            count = len(tokens_np)
            index = self._indexes.get(row.rid)
            if index is None or index.done >= count:
                index = self._indexes[row.rid] = self._engine.index()
                self._together = None
            indexes.append(index)
            known.append(count)
            length = row.budget if row.budget < row.max_depth else row.max_depth
            if row.forced:  # look for what followed them
                length -= len(row.forced)
                tokens_np, at = np.concatenate([tokens_np, np.asarray(row.forced, np.int32)]), 0
            texts.append(tokens_np)
            places.append(at)
            wanted.append(length if length > 0 else 0)
        out: list[tuple[Proposal, int]] = []
        found = self._engine.step(indexes, texts, known, wanted, places)
        for row, (copied, length) in zip(rows, found, strict=True):
            if not copied:
                out.append((EMPTY_PROPOSAL, 0))
                continue
            drafts = (*row.forced, *copied) if row.forced else tuple(copied)
            out.append((Proposal(drafts, chain_parents(len(drafts)), self.name), length))
        return out

    def remove(self, rid: int) -> None:
        self._together = None
        self._indexes.pop(rid, None)

    def seated(self) -> LookUp | None:
        if not self._num_drafts or says_itself(self, NgramProposer.propose):
            return None
        return LookUp(self._num_drafts, self.sizes[0], self.sizes[-1])


def _continuation(token_ids_np: IntArray, start: int, length: int) -> list[int]:
    """``length`` tokens from ``start`` on; past the end of the tokens they go on with the copy itself.

    Example: 5 6 5 6 5 6 with start 4: 5 6, then the copy 5 6 again, ... A suffix that overlaps its own
    occurrence is a period, and a period is most likely continued.
    """
    assert start < len(token_ids_np), "nothing to copy"
    found: list[int] = token_ids_np[start : start + length].tolist()
    while len(found) < length:
        found += found[: length - len(found)]
    return found

"""The state of a draft head for a request between steps: the stored rows, and the features of the next ones.

See `models.heads.base` for what a row and a feature are. With n committed tokens, of which the target has read all but
the last, the features of tokens 0..n-2 have been seen, and rows 1..n-1 can be computed: row s from token s and the
feature of token s - 1.

A head with several depths (MTP layers that take turns) has a `Track` for each: depth d + 1 reads what depth d gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.types import new_record

MANY_FEATURES = 256
"""Rows of features; a few that are left of more must not keep all of them alive."""


class Features:
    """Rows of features, of one request or of several, which are computed when they are read."""

    __slots__ = ("_compute", "_lent", "_value")

    def __init__(self, compute: Callable[[], None] | None = None) -> None:
        """``compute``: calls `give`."""
        self._compute = compute
        self._value: Tensor | None = None
        self._lent = False

    @classmethod
    def of(cls, value: Tensor) -> Features:
        """Features that are computed already, [n, F]."""
        found = cls()
        found.give(value)
        return found

    @classmethod
    def lent(cls, value: Tensor) -> Features:
        """Features [n, F] in memory that others are written to later: see `keep`."""
        found = cls.of(value)
        found._lent = True
        return found

    def keep(self) -> None:
        """Have them in memory of their own."""
        if self._lent:
            assert self._value is not None
            self._value, self._lent = self._value.clone(), False

    def give(self, value: Tensor) -> None:
        self._value = value
        self._compute = None

    @property
    def value(self) -> Tensor:
        """[n, F]"""
        if self._compute is not None:
            self._compute()
        assert self._value is not None, "features that could not be computed"
        return self._value


class Piece(NamedTuple):
    """Rows start..stop-1 of some features."""

    features: Features
    start: int
    stop: int

    @classmethod
    def of(cls, value: Tensor) -> Piece:
        """All rows of ``value`` [n, F]."""
        return cls(Features.of(value), 0, value.shape[0])


def joined(pieces: Sequence[Piece]) -> Tensor:
    """[n, F] the rows of all pieces, at least one.

    What a step gave for all requests is one tensor, and what they need of it often stands there one behind the other:
    rows 0..1, 2..4 and 5..5 of the same features are their rows 0..5.
    """
    features, start, stop = pieces[0]
    runs: list[Tensor] = []
    for piece in pieces[1:]:
        if piece.features is features and piece.start == stop:
            stop = piece.stop
        else:
            runs.append(features.value[start:stop])
            features, start, stop = piece
    runs.append(features.value[start:stop])
    return runs[0] if len(runs) == 1 else torch.cat(runs)


class FeatureQueue:
    """Features of consecutive tokens ``first .. end - 1``, in the pieces in which they came."""

    __slots__ = ("_pieces", "end", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self._pieces: list[Piece] = []

    def append(self, features: Features, start: int, stop: int) -> None:
        """Rows start..stop-1 of ``features`` are those of the next tokens."""
        self._pieces.append(new_record(Piece, (features, start, stop)))
        self.end += stop - start

    def of(self, start: int, stop: int) -> list[Piece]:
        """Pieces that together are the features of tokens start..stop-1."""
        assert self.first <= start <= stop <= self.end, (self.first, start, stop, self.end)
        if stop == self.end and self._pieces:
            last = self._pieces[-1]
            if start == stop - last.stop + last.start:  # nearly always: what the newest step gave
                return [last]
        found = []
        first = self.first
        for piece in self._pieces:
            features, begin, after = piece
            end = first + after - begin
            if first >= start and end <= stop:
                found.append(piece)
            elif first < stop and end > start:
                # Example: rows 4..6 of a step's features are tokens 20..22; of tokens 21..29 these are rows 5 and 6.
                found.append(Piece(features, begin + max(start - first, 0), begin + min(stop, end) - first))
            first = end
        return found

    @property
    def only(self) -> Piece | None:
        """What it has, if that is the feature of one token."""
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 and self.end == self.first + 1 else None

    def saved(self) -> tuple[int, int, list[Piece]]:
        """The state, for `restore`."""
        return self.first, self.end, self._pieces.copy()

    def restore(self, saved: tuple[int, int, list[Piece]]) -> None:
        """Set the state back to a saved one."""
        self.first, self.end, self._pieces = saved

    def drop(self, start: int) -> None:
        """Forget the features of tokens before ``start``. What is left of many is copied, so that a prompt's are
        freed."""
        start = min(start, self.end)
        pieces = self._pieces
        if start == self.end - 1 and pieces:  # nearly always: only the newest feature is kept
            features, begin, end = pieces[-1]
            if end - begin <= MANY_FEATURES:
                pieces[:] = [new_record(Piece, (features, end - 1, end))]
                self.first = start
                return
        while self.first < start:
            features, begin, end = pieces[0]
            count = end - begin
            gone = start - self.first
            if gone >= count:
                del pieces[0]
                self.first += count
                continue
            self.first = start
            if count > MANY_FEATURES:
                pieces[0] = Piece.of(features.value[begin + gone : end].clone())
            else:
                pieces[0] = Piece(features, begin + gone, end)


@dataclass(slots=True)
class Track:
    """One depth: its rows ``first_key .. next - 1`` are stored; ``queue`` has the features that later rows read."""

    first_key: int
    next: int
    queue: FeatureQueue

    @classmethod
    def at(cls, first_key: int, first_row: int) -> Track:
        """Nothing to come before ``first_row`` is missing (features from token ``first_row - 1`` on)."""
        return cls(first_key, first_row, FeatureQueue(first_row - 1))

    def advance(self, row: int) -> None:
        """Rows before ``row`` are stored now. The last one's feature is kept: its slot may be trimmed away."""
        if row > self.next:
            self.next = row
        self.queue.drop(self.next - 2)


@dataclass(slots=True)
class HeadState:
    """One request.

    After a prefix-cache hit whose blocks the head has not filled, the features of the hit's tokens are gone. The head
    then goes on behind the gap: its first row is that of the first token whose predecessor's feature is known, nothing
    before it is ever looked at, and no block of this request may be reused by others (``gap``: the leading tokens that
    are there nevertheless).
    """

    tracks: list[Track] = field(default_factory=list)
    gap: int | None = None

    @classmethod
    def opened(cls, depths: int, computed: int, filled: int, stored: Tensor | None) -> HeadState:
        """A request whose first ``computed`` tokens are cached.

        Args:
            filled: leading tokens of them that the head has in the same blocks.
            stored: [depths, F] features of token ``computed - 1``, needed if ``filled == computed > 0``.

        Example: 32 tokens cached, all filled: row 32 is next, from token 32 and the stored feature of token 31. Were
        only 16 filled, features would be known from token 32 on, and the first row behind the gap would be row 33.
        """
        if computed and filled == computed:
            assert stored is not None
            # A depth has no rows before its first key, which a short hit does not reach.
            tracks = [Track.at(1 + depth, max(1 + depth, computed)) for depth in range(depths)]
            for depth, track in enumerate(tracks):
                if track.next == computed:
                    track.queue.append(Features.of(stored[depth : depth + 1].clone()), 0, 1)
            return cls(tracks)
        # depth d + 1 starts one row after depth d, whose first output it reads
        tracks = [Track.at(computed + 1 + depth, computed + 1 + depth) for depth in range(depths)]
        return cls(tracks, gap=filled if computed else None)

    def skipped(self, computed: int) -> HeadState:
        """The request as it goes on from token ``computed`` after the features of some before it were not kept: behind
        a gap, as after such a prefix hit.

        Example: tokens 0..19 were seen and rows 1..20 stored, tokens 20..49 were not seen. The feature of token 50 is
        the next one to come, row 51 the first behind the gap, and blocks of tokens 0..20 may still be reused.
        """
        first_rows = [computed + 1 + depth for depth in range(len(self.tracks))]
        return HeadState([Track.at(row, row) for row in first_rows], gap=self.filled)

    @property
    def seen(self) -> int:
        """The token whose feature comes next."""
        return self.tracks[0].queue.end

    @property
    def filled(self) -> int:
        """The number of leading tokens whose blocks other requests may reuse."""
        if self.gap is not None:
            return self.gap
        return self.tracks[0].next if len(self.tracks) == 1 else min([track.next for track in self.tracks])

    @property
    def pending(self) -> int:
        """Rows whose features are there."""
        track = self.tracks[0]
        if len(self.tracks) == 1:
            return track.queue.end + 1 - track.next
        return max([track.queue.end + 1 - track.next for track in self.tracks])

    def trimmed(self, num_tokens: int) -> None:
        """Forget rows of tokens from ``num_tokens`` on, whose storage was freed."""
        for track in self.tracks:
            track.next = max(min(track.next, num_tokens), track.first_key)

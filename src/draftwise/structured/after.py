"""A grammar that begins behind a mark: what a model thinks before it answers follows none.

The marks are looked for in the bytes of the tokens, so that a mark may be one token or several. A token that holds the
end of a mark and more is not allowed: the grammar begins with a token of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from draftwise.errors import RequestError
from draftwise.sampling.masks import Words, pack
from draftwise.structured.base import Grammar, Matcher


class TokenBytes:
    """The bytes of every token, in their order, to find those that begin with something."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """``token_bytes[i]``: of token i; empty: it has no text."""
        self.of = list(token_bytes)
        self._order = sorted(range(len(self.of)), key=self.of.__getitem__)
        self._sorted = [self.of[token] for token in self._order]

    def beginning_with(self, start: bytes) -> list[int]:
        """Tokens with more bytes than ``start``, with which they begin."""
        low = bisect_left(self._sorted, start + b"\0")
        high = low
        while high < len(self._sorted) and self._sorted[high].startswith(start):
            high += 1
        return self._order[low:high]

    def equal_to(self, whole: bytes) -> list[int]:
        """Tokens with exactly these bytes."""
        low, high = bisect_left(self._sorted, whole), bisect_left(self._sorted, whole + b"\0")
        return self._order[low:high]


class Marks:
    """Follows a text until one of ``after`` is complete. What is read so far is a *tail*: the longest end of the text
    that a mark begins with.

    ``opened_by``: the text is free only if it begins with this; else the grammar holds from its start. None: it is
    free.
    """

    def __init__(self, after: Sequence[str], opened_by: str | None, tokens: TokenBytes) -> None:
        self._marks = tuple(mark.encode() for mark in after)
        self.opener = None if opened_by is None else opened_by.encode()
        self._tokens = tokens
        self._prefixes = frozenset(mark[:n] for mark in self._marks for n in range(1, len(mark)))
        self._longest = max(map(len, self._marks))
        self._free: dict[bytes, Words] = {}
        self._opening: dict[int, Words] = {}
        self._spelling: dict[bytes, Words | None] = {b"": None}
        self._never = [t for t, text in enumerate(tokens.of) if self._ends_early(text)]

    def _ends_early(self, text: bytes) -> bool:
        """Whether a whole mark stands in a token before its end."""
        return any(0 <= text.find(mark) < len(text) - len(mark) for mark in self._marks)

    def bytes_of(self, token: int) -> bytes:
        return self._tokens.of[token]

    def step(self, tail: bytes, piece: bytes) -> tuple[bytes, bytes | None]:
        """(tail behind ``piece``, what stands behind the mark or None if it is not complete).

        Example: mark ``</t>``, tail ``<``: ``/t>`` gives (b"", b""), ``/t>x`` gives (b"", b"x"), ``/`` gives
        (b"</", None).
        """
        text = tail + piece
        ends = [at + len(mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if ends:
            return b"", text[min(ends) :]
        for count in range(min(len(text), self._longest - 1), 0, -1):
            if text[-count:] in self._prefixes:
                return text[-count:], None
        return b"", None

    def free(self, tail: bytes) -> Words:
        """[W]: tokens that may follow inside; all but those that complete a mark and go on."""
        words = self._free.get(tail)
        if words is None:
            bits = self._bits(True)
            bits[self._never] = False
            for mark in self._marks:
                for count in range(1, len(mark)):
                    if tail.endswith(mark[:count]):
                        bits[self._tokens.beginning_with(mark[count:])] = False
            words = self._free[tail] = pack(bits)
        return words

    def opening(self, read: int) -> Words:
        """[W]: tokens that go on with what opens a free text, of which ``read`` bytes were read."""
        words = self._opening.get(read)
        if words is None:
            assert self.opener is not None
            left = self.opener[read:]
            bits = self._bits(False)
            for count in range(1, len(left) + 1):
                bits[self._tokens.equal_to(left[:count])] = True
            for token in self._tokens.beginning_with(left):
                bits[token] = not self.step(b"", self.bytes_of(token)[len(left) :])[1]
            words = self._opening[read] = pack(bits)
        return words

    def opened(self, read: int, token: int) -> tuple[int, bytes | None]:
        """(bytes read of what opens, -1: it is something else; what stands behind it, or None: it is not complete)."""
        assert self.opener is not None
        left, piece = self.opener[read:], self.bytes_of(token)
        if piece and left.startswith(piece):
            return read + len(piece), b"" if piece == left else None
        return (len(self.opener), piece[len(left) :]) if piece.startswith(left) else (-1, None)

    def rest(self, tail: bytes) -> bytes:
        """The tokens that complete a mark behind ``tail``: the first mark that the vocabulary can write.

        Raises `RequestError`: none can.
        """
        begun = [mark[len(tail) :] for mark in self._marks if mark.startswith(tail)]
        for left in (*begun, *self._marks):
            if self.spelling(left) is not None:
                return left
        raise RequestError("structured_outputs: within: this tokenizer cannot write the text of after")

    def spelling(self, left: bytes) -> Words | None:
        """[W]: tokens that go on with ``left`` to its end, in one token if there is such a token; None: it cannot be.

        Example: tokens ``</``, ``t``, ``>``, ``t>``: of ``</t>`` the first, of ``t>`` the last alone.
        """
        if left not in self._spelling:
            whole = self._tokens.equal_to(left)
            some = whole or [
                token
                for count in range(1, len(left))
                if self.spelling(left[count:]) is not None
                for token in self._tokens.equal_to(left[:count])
            ]
            bits = self._bits(False)
            bits[some] = True
            self._spelling[left] = pack(bits) if some else None
        return self._spelling[left]

    def _bits(self, value: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.full(-(-len(self._tokens.of) // 32) * 32, value, np.bool_)


class _Place(NamedTuple):
    """Where a text stands. Inside the free text: ``tail``. Before it is known what the text is: ``front``, whether it
    follows the grammar so far, and ``opening``, bytes read of what opens a free text (-1: it is none). None of these:
    behind the mark. ``inside``: tokens so far; ``left``: there were enough, and this has to follow."""

    front: bool = False
    opening: int = -1
    tail: bytes | None = None
    inside: int = 0
    left: bytes = b""

    @property
    def behind(self) -> bool:
        return not self.front and self.opening < 0 and self.tail is None


_BEHIND = _Place()
_KEPT = 128
"""Places that can be gone back to: more than a draft tree is deep."""


class AfterMatcher(Matcher):
    """One text: free up to the mark, then under the grammar.

    Example with ``opened_by`` "<t>", ``after`` "</t>" and the grammar "yes" | "no": "yes", "<t>yes?</t>no".
    """

    def __init__(self, make: Callable[[], Matcher], marks: Marks, within: int | None = None) -> None:
        """``make``: a matcher at the start of the grammar; ``within``: most tokens before the mark."""
        self._marks = marks
        self._within = within
        self._matcher = make()  # behind the mark
        self._front = None if marks.opener is None else make()
        self._places = [self._place(b"", 0) if marks.opener is None else _Place(True, 0)]

    def mask(self) -> Words:
        place = self._places[-1]
        if place.left:
            words = self._marks.spelling(place.left)
            assert words is not None, "only what can be written is left"
            return words
        if place.tail is not None:
            return self._marks.free(place.tail)
        if place.behind:
            return self._matcher.mask()
        if place.opening < 0:
            return self._of_front().mask()
        words = self._marks.opening(place.opening)
        return words | self._of_front().mask() if place.front else words

    def advance(self, token: int) -> bool:
        place = self._places[-1]
        if place.behind:
            if not self._matcher.advance(token):
                return False
            following = _BEHIND
        elif place.tail is not None:
            inside = self._inside(place, self._marks.bytes_of(token))
            if inside is None:
                return False
            following = inside
        else:
            opening, behind = self._marks.opened(place.opening, token) if place.opening >= 0 else (-1, None)
            if behind is not None:
                inside = self._opened(behind)
                if inside is None:
                    return False
                following = inside
            else:
                front = place.front and self._of_front().advance(token)
                if not front and opening < 0:
                    return False
                following = _Place(front, opening)
        self._places.append(following)
        if len(self._places) > 2 * _KEPT:
            del self._places[:-_KEPT]
        return True

    def _opened(self, piece: bytes) -> _Place | None:
        """Behind what opens; ``piece``: what the same token holds behind it."""
        if not piece:
            return self._place(b"", 0)
        return self._inside(_Place(tail=b""), piece)

    def _inside(self, place: _Place, piece: bytes) -> _Place | None:
        assert place.tail is not None
        if place.left:
            if not piece or not place.left.startswith(piece):
                return None
            left = place.left[len(piece) :]
            return place._replace(left=left) if left else _BEHIND
        tail, rest = self._marks.step(place.tail, piece)
        if rest is None:
            return self._place(tail, place.inside + 1)
        return None if rest else _BEHIND

    def _place(self, tail: bytes, count: int) -> _Place:
        full = self._within is not None and count >= self._within
        return _Place(tail=tail, inside=count, left=self._marks.rest(tail) if full else b"")

    def _of_front(self) -> Matcher:
        assert self._front is not None
        return self._front

    def rollback(self, count: int) -> None:
        assert count < len(self._places)
        fronts = behinds = 0
        for _ in range(count):
            place = self._places.pop()
            fronts += place.front
            behinds += place.behind and self._places[-1].behind  # the mark itself is none of the grammar's
        if fronts:
            self._of_front().rollback(fronts)
        if behinds:
            self._matcher.rollback(behinds)

    def is_accepting(self) -> bool:
        place = self._places[-1]
        if place.behind:
            return self._matcher.is_accepting()
        return place.front and self._of_front().is_accepting()

    def is_finished(self) -> bool:
        place = self._places[-1]
        if place.behind:
            return self._matcher.is_finished()
        return place.front and place.opening < 0 and self._of_front().is_finished()

    def forced(self, limit: int) -> Sequence[int]:
        place = self._places[-1]
        if place.behind:
            return self._matcher.forced(limit)
        return self._of_front().forced(limit) if place.front and place.opening < 0 else ()


class AfterGrammar(Grammar):
    """``inner`` behind a free text of at most ``within`` tokens."""

    def __init__(self, inner: Grammar, marks: Marks, within: int | None = None) -> None:
        """Raises `RequestError`: with ``within``, if no mark can be written with the tokens there are."""
        self._inner = inner
        self._marks = marks
        self._within = within
        if within is not None:
            marks.rest(b"")

    def matcher(self) -> Matcher:
        return AfterMatcher(self._inner.matcher, self._marks, self._within)


class FreeMatcher(Matcher):
    """Everything may follow, and the text may end anywhere."""

    def __init__(self, num_tokens: int) -> None:
        self._mask: Words = np.full(-(-num_tokens // 32), -1, np.int32)

    def mask(self) -> Words:
        return self._mask

    def advance(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        pass

    def is_accepting(self) -> bool:
        return True

    def is_finished(self) -> bool:
        return False

    def forced(self, limit: int) -> Sequence[int]:
        return ()


class FreeGrammar(Grammar):
    """No grammar at all: what stands behind a text of limited length."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def matcher(self) -> Matcher:
        return FreeMatcher(self._num_tokens)

"""The state of requests that go on drafting together, side by side.

In the usual step all requests of a head have drafted, verify, and draft again. Their numbers then change alike, and a
record for each would cost more than the step's arithmetic. `SteadyHeads` keeps such requests in arrays, and writes
their `HeadState` when anything else has to be done with one of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from draftwise.kernels.cpu.book_drafts import BookFeatures
from draftwise.propose.heads.state import Features, HeadState, Piece
from draftwise.types import IntArray


class SteadyHeads:
    """R requests whose rows of known tokens are all stored. Of each the feature of the last token that the target has
    read is kept, and nothing else.

    Example: 10 known tokens. Rows 1..9 are stored, the feature of token 8 is kept. A step commits tokens 9, 10 and 11
    (a root and two drafts) and finds token 12: features of tokens 9, 10, 11 come, with which rows 10, 11 and 12 are
    computed in the next draft.
    """

    __slots__ = ("_came", "_counts", "_features", "_first_keys", "_gaps", "_last", "_states", "rids", "seen")

    def __init__(
        self,
        rids: list[int],
        states: Sequence[HeadState],
        seen: array[int],
        features: Features,
        last: array[int],
    ) -> None:
        """``seen`` [R] int32: the token whose feature comes next, one before `Track.next`; ``last`` [R] int32: the rows
        of ``features`` that are kept. Native code writes both when it has drafted (`BookFeatures`)."""
        self.rids = rids
        self._states = states
        self.seen = seen
        self._first_keys = array("i", [state.tracks[0].first_key for state in states])
        self._gaps = array("i", [-1 if state.gap is None else state.gap for state in states])
        self._features = features
        self._last = last
        self._came: Features | None = None  # of the step's tokens, one request after the other
        self._counts = array("i")

    @classmethod
    def of(cls, rids: list[int], states: Sequence[HeadState]) -> SteadyHeads | None:
        """These requests, if that is what they are, and if what is kept of them came from one step."""
        features: Features | None = None
        seen, last = array("i"), array("i")
        for state in states:
            if len(state.tracks) != 1:
                return None
            track = state.tracks[0]
            kept = track.queue.only
            if kept is None or track.queue.end != track.next - 1:
                return None
            if features is None:
                features = kept.features
            if kept.features is not features:
                return None
            seen.append(track.next - 1)
            last.append(kept.start)
        return None if features is None else cls(rids, states, seen, features, last)

    def follows(self, rids: Sequence[int], first_tokens_np: IntArray) -> bool:
        """Whether tokens of exactly these requests, from ``first_tokens_np`` [R] on, come next."""
        return (
            self._came is None and rids == self.rids and first_tokens_np.tobytes() == self.seen.tobytes()
        )  # bytes of int32

    def came(self, features: Features, counts: array[int]) -> None:
        """The step committed ``counts`` [R] int32 tokens of each, of which these are the features."""
        self._came, self._counts = features, counts

    def ready(self, rids: Sequence[int]) -> BookFeatures | None:
        """The features of all rows that the head has not read of these requests; None: it is not so."""
        if self._came is None or rids != self.rids:
            return None
        return BookFeatures(
            self._came.value, self._counts, self.seen, self._last, self._gaps, self._first_keys
        )

    def rests(self, rids: Sequence[int]) -> bool:
        """Whether it has exactly these requests, and has read all that came."""
        return self._came is None and rids == self.rids

    @property
    def counts(self) -> array[int]:
        """[R] int32: what native code writes how many tokens of each came to."""
        if len(self._counts) != len(self.rids):
            self._counts = array("i", bytes(4 * len(self.rids)))
        return self._counts

    def features_in(self, values: Tensor) -> BookFeatures:
        """What is read of features [n, F] that native code puts there, as many as `counts` says then."""
        return BookFeatures(values, self.counts, self.seen, self._last, self._gaps, self._first_keys)

    def went_on(self, features: Features, before: Features | None, drafted: bool) -> None:
        """Rounds gave these ``features`` in the last one, of `counts` tokens, and those in the one ``before``;
        ``drafted``: whether the head has read the last ones, too."""
        if drafted:
            self._features, self._came = features, None
        else:
            self._features, self._came = before or self._features, features

    def drafted(self) -> None:
        """All rows of known tokens are stored now."""
        if self._came is not None:
            self._features, self._came = self._came, None

    def write(self) -> None:
        """Write what is known into the states, which may be kept for long."""
        self._features.keep()
        if self._came is not None:
            self._came.keep()
        start = 0
        counts = self._counts if self._came is not None else array("i", bytes(4 * len(self.rids)))
        for state, seen, last, count in zip(self._states, self.seen, self._last, counts, strict=True):
            track = state.tracks[0]
            track.next = seen + 1
            track.queue.restore((seen - 1, seen, [Piece(self._features, last, last + 1)]))
            if self._came is not None:
                track.queue.append(self._came, start, start + count)
            start += count

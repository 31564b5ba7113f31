"""The state of requests that go on drafting together, side by side.

In the usual step all requests of a head have drafted, verify, and draft again. Their numbers then change alike, and a
record for each would cost more than the step's arithmetic. `SteadyHeads` keeps such requests in arrays, and writes
their `HeadState` when anything else has to be done with one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftwise.propose.heads.state import Features, HeadState, Piece
from draftwise.types import IntArray

_Ints = npt.NDArray[np.int64]


class Drafted(NamedTuple):
    """``next_np``, ``last_np`` [R]: of `SteadyHeads`, once all rows are stored. ``filled``: of each request the number
    of leading tokens that others may reuse (`HeadState.filled`)."""

    next_np: _Ints
    last_np: _Ints
    filled: list[int]


class SteadyHeads:
    """R requests whose rows of known tokens are all stored. Of each the feature of the last token that the target has
    read is kept, and nothing else.

    Example: 10 known tokens. Rows 1..9 are stored, the feature of token 8 is kept. A step commits tokens 9, 10 and 11
    (a root and two drafts) and finds token 12: features of tokens 9, 10, 11 come, with which rows 10, 11 and 12 are
    computed in the next draft.
    """

    __slots__ = (
        "_came",
        "_counts_np",
        "_features",
        "_gaps_np",
        "_last_np",
        "_states",
        "first_keys",
        "next_np",
        "rids",
    )

    def __init__(
        self,
        rids: list[int],
        states: Sequence[HeadState],
        next_np: _Ints,
        features: Features,
        last_np: _Ints,
    ) -> None:
        """``next_np`` [R]: `Track.next`; the kept features are rows ``last_np`` [R] of ``features``."""
        self.rids = rids
        self._states = states
        self.next_np = next_np
        self.first_keys = [state.tracks[0].first_key for state in states]
        self._gaps_np: _Ints = np.array(
            [-1 if state.gap is None else state.gap for state in states], np.int64
        )
        self._features = features
        self._last_np = last_np
        self._came: Features | None = None  # of the step's tokens, one request after the other
        self._counts_np: _Ints = np.empty(0, np.int64)

    @classmethod
    def of(cls, rids: list[int], states: Sequence[HeadState]) -> SteadyHeads | None:
        """These requests, if that is what they are, and if what is kept of them came from one step."""
        features: Features | None = None
        after: list[int] = []
        last: list[int] = []
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
            after.append(track.next)
            last.append(kept.start)
        if features is None:
            return None
        return cls(rids, states, np.array(after, np.int64), features, np.array(last, np.int64))

    def follows(self, rids: Sequence[int], first_tokens_np: IntArray) -> bool:
        """Whether tokens of exactly these requests, from ``first_tokens_np`` [R] on, come next."""
        return self._came is None and rids == self.rids and bool((first_tokens_np == self.next_np - 1).all())

    def came(self, features: Features, counts_np: IntArray) -> None:
        """The step committed ``counts_np`` [R] tokens of each, of which these are the features."""
        self._came, self._counts_np = features, counts_np.astype(np.int64)

    def ready(self, rids: Sequence[int], known_np: _Ints) -> Tensor | None:
        """The features of the rows from ``next_np`` to the last known tokens, one request after the other, if these
        requests have ``known_np`` [R] of them; None: it is not so."""
        if self._came is None or rids != self.rids or not (self.next_np + self._counts_np == known_np).all():
            return None
        return self._came.value

    def drafting(self) -> Drafted:
        """What `drafted` is to write. It is computed before the passes: behind them the caches are full of weights."""
        after_np = self.next_np + self._counts_np
        filled: list[int] = np.where(self._gaps_np < 0, after_np, self._gaps_np).tolist()
        return Drafted(after_np, np.cumsum(self._counts_np) - 1, filled)

    def drafted(self, found: Drafted) -> None:
        """All rows of known tokens are stored now."""
        self.next_np, self._last_np = found.next_np, found.last_np
        if self._came is not None:
            self._features, self._came = self._came, None

    def write(self) -> None:
        """Write what is known into the states."""
        start = 0
        counts = [0] * len(self.rids) if self._came is None else self._counts_np.tolist()
        for state, after, last, count in zip(
            self._states, self.next_np.tolist(), self._last_np.tolist(), counts, strict=True
        ):
            track = state.tracks[0]
            track.next = after
            track.queue.restore((after - 2, after - 1, [Piece(self._features, last, last + 1)]))
            if self._came is not None:
                track.queue.append(self._came, start, start + count)
            start += count

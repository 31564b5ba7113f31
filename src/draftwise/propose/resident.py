"""Drafters whose captured loops take part in resident steps (`graphs.resident`): what a run finds of them, and what it
leaves behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from draftwise.graphs.loop import ChainLoop, LoopKind
from draftwise.graphs.resident import DrafterSeats
from draftwise.kv.storage import KVStorage
from draftwise.propose.head_passes import HeadPasses
from draftwise.propose.head_state import FeatureQueue, Features, HeadState, Track
from draftwise.sampling.draw import POINT_MASS_RULES, DraftSampleMethod


class Place(NamedTuple):
    """Where a request stands that boards: leading tokens whose K/V the drafter has, drafts behind them of which it has
    it, too, and the first key that it looks at."""

    fed: int
    stored: int
    first_key: int


class ResidentDrafter(ABC):
    """One drafter's side of resident runs. From a request's boarding until it leaves nobody else drafts for it."""

    def __init__(self, loops: Sequence[ChainLoop], max_len: int, sample_method: DraftSampleMethod) -> None:
        self._loops = loops
        self._max_len = max_len
        self._sample_method = sample_method

    @property
    def steps(self) -> int:
        """Drafts of its loops."""
        return self._loops[0].steps

    @property
    def most_requests(self) -> int:
        """Of its largest loop."""
        return max(loop.shape.requests for loop in self._loops)

    def kind(self, greedy: bool, rule: str) -> LoopKind:
        """How drafts are drawn of a request under a rule; ``greedy``: at temperature 0. See `sampling.draw`."""
        if greedy or self._sample_method == "greedy" or rule in POINT_MASS_RULES:
            return "argmax"
        return "shared" if rule == "coupled" else "draft"

    def seats(self, requests: int, keys: int, kind: LoopKind) -> DrafterSeats | None:
        """The smallest loop for exactly so many requests of up to ``keys`` keys."""
        for loop in self._loops:
            if loop.kind == kind and loop.shape.requests == requests and loop.shape.keys >= keys:
                return self._seats(loop)
        return None

    @abstractmethod
    def _seats(self, loop: ChainLoop) -> DrafterSeats: ...

    def prepare(self) -> None:  # noqa: B027
        """Requests are about to board."""

    @abstractmethod
    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        """Where a request stands; None: it cannot board yet.

        Args:
            rid: the request.
            known: its tokens.
            filled: as `DraftRow.filled`.
            stored: drafts behind them that are stored.
            drafts: drafts that wait.
        """

    @abstractmethod
    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        """A step was read: the drafter has the first ``fed`` tokens now, and ``drafts`` of its drafts wait. What
        `Proposer.filled_after` and `Proposer.drafts_stored` would answer."""

    def left(self, rid: int, known: int, fed: int, feature: Tensor | None) -> None:  # noqa: B027
        """The request goes on in the ordinary way. ``feature`` [1, F]: of its last token but one, of heads."""


class ResidentModel(ResidentDrafter):
    """A draft model."""

    def __init__(
        self,
        loops: Sequence[ChainLoop],
        max_len: int,
        sample_method: DraftSampleMethod,
        storage: KVStorage,
    ) -> None:
        super().__init__(loops, max_len, sample_method)
        assert storage.spare_slot is not None
        self._spare_slot = storage.spare_slot

    def _seats(self, loop: ChainLoop) -> DrafterSeats:
        return DrafterSeats(loop, self._max_len, self._spare_slot)

    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        # its loop reads one or two tokens; behind a chain that is accepted whole these are its last draft and the root
        if filled == known:
            return Place(filled, stored if drafts else 0, 0)
        return Place(filled, 0, 0) if filled == known - 1 and not drafts else None

    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        return fed, max(drafts - 1, 0)


class ResidentHead(ResidentDrafter):
    """A draft head of one depth."""

    def __init__(
        self,
        loops: Sequence[ChainLoop],
        max_len: int,
        sample_method: DraftSampleMethod,
        passes: HeadPasses,
        states: dict[int, HeadState],
    ) -> None:
        """``states``: the proposer's, by request."""
        super().__init__(loops, max_len, sample_method)
        self._passes = passes
        self._states = states

    def _seats(self, loop: ChainLoop) -> DrafterSeats:
        passes = self._passes
        assert passes.kv.spare_slot is not None
        return DrafterSeats(loop, self._max_len, passes.kv.spare_slot, passes.head, passes.block_features)

    def prepare(self) -> None:
        self._passes.source.compute()  # what waits was computed before what the run computes

    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        state = self._states.get(rid)
        if state is None or state.tracks[0].next != known or known < 2:
            return None
        return Place(known, 0, state.tracks[0].first_key)

    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        state = self._states[rid]
        track = state.tracks[0]
        # features stay on the device, for `left`; a request that is removed now has nothing to fill
        track.next, track.queue = fed, FeatureQueue(fed - 1)
        return state.filled, 0

    def left(self, rid: int, known: int, fed: int, feature: Tensor | None) -> None:
        assert feature is not None
        state = self._states[rid]
        track = state.tracks[0]
        if fed < known - 1:
            # past its longest context it has stopped; features of tokens in between are gone
            state.gap = fed if state.gap is None else state.gap
            track = state.tracks[0] = Track.at(known - 1, known - 1)
        else:
            track.next, track.queue = fed, FeatureQueue(known - 2)
        track.queue.append(Features.of(feature), 0, 1)

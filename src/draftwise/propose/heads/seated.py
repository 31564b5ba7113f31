"""A draft head's part in steps that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.graphs.loop import DraftLoop
from draftwise.graphs.seats.drafter import Place, SeatedDrafter
from draftwise.graphs.seats.features import DrafterSeats
from draftwise.propose.heads.passes import Fill, HeadPasses
from draftwise.propose.heads.state import FeatureQueue, Features, HeadState, Track, joined
from draftwise.sampling.draw import DraftSampleMethod
from draftwise.types import IntArray


class SeatedHead(SeatedDrafter):
    """A draft head."""

    def __init__(
        self,
        loops: Sequence[DraftLoop],
        max_len: int,
        sample_method: DraftSampleMethod,
        passes: HeadPasses,
        states: dict[int, HeadState],
        scratch: Sequence[range],
    ) -> None:
        """``states``: the proposer's, by request."""
        super().__init__(loops, max_len, sample_method, scratch)
        self._passes = passes
        self._states = states

    def _seats(self, loop: DraftLoop) -> DrafterSeats:
        passes = self._passes
        return DrafterSeats(loop, self._max_len, passes.head, passes.block_features)

    def prepare(self) -> None:
        self._passes.source.compute()  # what waits was computed before what steps of seats compute

    def catch_up(self, rid: int, token_ids_np: IntArray, blocks_np: IntArray, filled: int) -> int:
        state = self._states.get(rid)
        if state is None:
            return filled
        stop = min(len(token_ids_np), self._max_len)
        self._passes.fill([Fill(state, token_ids_np, blocks_np, stop)])
        return min(state.filled, len(token_ids_np))

    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        state = self._states.get(rid)
        if state is None or known < 2 or any(track.next != known for track in state.tracks):
            return None
        first, *deeper = state.tracks
        if any(track.queue.end < known for track in deeper):
            return None
        carried = [joined(track.queue.of(known - 1, known)) for track in deeper]
        return Place(known, 0, first.first_key, torch.cat(carried) if carried else None)

    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        state = self._states[rid]
        for track in state.tracks:
            # features stay on the device, for `left`; a request that is removed now has nothing to fill
            track.next, track.queue = fed, FeatureQueue(fed - 1)
        return state.filled, 0

    def left(self, rid: int, known: int, fed: int, feature: Tensor | None) -> None:
        assert feature is not None
        state = self._states[rid]
        if fed < known - 1:
            # past its longest context it has stopped; features of tokens in between are gone
            state.gap = fed if state.gap is None else state.gap
            state.tracks = [
                Track.at(known - 1 + depth, known - 1 + depth) for depth in range(len(state.tracks))
            ]
        else:
            for depth, track in enumerate(state.tracks):
                track.next, track.queue = fed, FeatureQueue(fed - 1 if depth else known - 2)
                if depth:
                    track.queue.append(Features.of(feature[depth : depth + 1]), 0, 1)
        state.tracks[0].queue.append(Features.of(feature[:1]), 0, 1)

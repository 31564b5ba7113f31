"""A draft model's side of steps that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.graphs.loop import ChainLoop
from draftwise.graphs.seats.drafter import Place, SeatedDrafter
from draftwise.graphs.seats.step import DrafterSeats
from draftwise.kv.storage import KVStorage
from draftwise.sampling.draw import DraftSampleMethod


class SeatedModel(SeatedDrafter):
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

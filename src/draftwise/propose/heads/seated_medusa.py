"""The part of Medusa heads in steps that stay on the device: they keep nothing of any request."""

from __future__ import annotations

from draftwise.graphs.loop import DraftLoop, LoopKind
from draftwise.graphs.seats.drafter import Place, SeatedDrafter
from draftwise.graphs.seats.features import DrafterSeats
from draftwise.types import IntArray


class SeatedMedusa(SeatedDrafter):
    """Medusa heads. ``max_len``: no draft stands at this position or behind it."""

    def _seats(self, loop: DraftLoop) -> DrafterSeats:
        # other drafters are fed all drafts but the last, which may stand one further
        return DrafterSeats(loop, self._max_len - 1)

    def seats(self, requests: int, keys: int, kind: LoopKind) -> DrafterSeats | None:
        return super().seats(requests, 0, kind)

    def catch_up(self, rid: int, token_ids_np: IntArray, blocks_np: IntArray, filled: int) -> int:
        return filled

    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        return Place(known, 0, 0)

    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        return fed, 0

"""A draft model's recurrent state: which slot of the store a request has."""

from __future__ import annotations

from functools import cached_property

import torch

from draftwise.kv.states import StateSpec, StateStore
from draftwise.propose.base import DraftRow


class CarriedStates:
    """States of one drafter, of ``max_num_seqs`` requests with ``num_drafts`` drafts each."""

    def __init__(self, spec: StateSpec, max_num_seqs: int, num_drafts: int, device: torch.device) -> None:
        self._spec = spec
        self._shape = max_num_seqs, num_drafts + 1
        self._device = device
        self._slots: dict[int, int] = {}  # request -> slot
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @cached_property
    def store(self) -> StateStore:
        """Made when it is first asked for."""
        return StateStore(self._spec, *self._shape, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes that `store` takes."""
        return StateStore.bytes_of(self._spec, *self._shape)

    def slot(self, rid: int) -> int:
        """The slot of a request, from its first draft on until it leaves."""
        found = self._slots.get(rid)
        if found is None:
            found = self._slots[rid] = self._free.pop()
        return found

    def known(self, row: DraftRow) -> int:
        """Leading tokens behind which the drafter can go on: those with K/V, if their state is kept, else none. It is
        not kept after a prefix that another request computed, or after a call that failed."""
        return row.filled if self.store.holds(self.slot(row.rid), row.filled) else 0

    def remove(self, rid: int) -> None:
        """Free the slot of a request that left."""
        slot = self._slots.pop(rid, None)
        if slot is not None:
            self.store.leave(slot)  # the next one may have a prefix that is as long
            self._free.append(slot)

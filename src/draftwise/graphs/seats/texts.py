"""The host's side of texts that look-ups read on the device: those of requests that enter, and outputs that ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftwise.graphs.backend import GraphBackend
from draftwise.graphs.seats.memory import SeatMemory
from draftwise.types import IntArray

PAST: Final = 32_768
"""Tokens of others' outputs that a look-up reads in every step, at most: 128 KB, which stays in a device's cache."""

_AT_FIRST: Final = 1 << 17
"""Tokens that a buffer has room for in the beginning: pinning more memory makes the device wait."""


class Texts:
    """Copies tokens to `SeatMemory.text` and `SeatMemory.past`. ``turns``: steps that may be on their way."""

    def __init__(self, memory: SeatMemory, backend: GraphBackend, turns: int) -> None:
        self._memory = memory
        self._backend = backend
        tokens = min(memory.text.numel() + len(memory.past), _AT_FIRST)
        self._buffers = [backend.host_buffer(tokens // 2 + 1) for _ in range(turns)]
        self._next = 0  # place of the next output among the past ones

    def take_in(
        self, turn: int, texts: Sequence[tuple[int, IntArray]], outputs: Sequence[IntArray] = ()
    ) -> None:
        """Once before the step of this turn.

        Args:
            turn: in turn, so that no buffer is written before it was read.
            texts: seats and all tokens [known] of requests that enter.
            outputs: of requests that have ended, [n] each; the oldest ones make room.
        """
        copies = [(self._memory.text[seat, : len(text_np)], text_np) for seat, text_np in texts]
        copies += [(self._place_of(output_np), output_np) for output_np in outputs]
        total = sum(len(place) for place, _ in copies)
        buffer = self._buffers[turn]
        if total > 2 * len(buffer):  # it grows with what comes at a time: most requests are short
            buffer = self._buffers[turn] = self._backend.host_buffer(total)
        words = buffer.view(torch.int32)
        at = 0
        for place, tokens_np in copies:
            own = words[at : at + len(place)]
            own_np = own.numpy()
            own_np[:] = -1  # behind an output
            own_np[: len(tokens_np)] = tokens_np[: len(own_np)]
            place.copy_(own, non_blocking=True)
            at += len(place)

    def forget(self) -> None:
        """No output was ever there."""
        self._memory.past.fill_(-1)
        self._next = 0

    def _place_of(self, output_np: IntArray) -> Tensor:
        """Where an output goes, with a -1 behind it. It does not go over the end.

        Example: of 10 places 7 are taken, and 4 tokens come: they go to 0..3, and -1 to 4.
        """
        past = self._memory.past
        size = min(len(output_np) + 1, len(past))
        if self._next + size > len(past):
            self._next = 0
        self._next += size
        return past[self._next - size : self._next]


def output_of(token_ids_np: IntArray, num_prompt: int) -> IntArray:
    """What others may look up of a request that ends: a copy of its last tokens, its prompt left out."""
    return np.array(token_ids_np[max(num_prompt, len(token_ids_np) - PAST + 1) :], np.int32)

"""Waking the readers of one event loop: one call per engine step, and no more often than they can be served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

_FREE = 8
"""The number of streams that are never delayed, because a few cost little."""


class Reader(Protocol):
    """A reader that waits for ``event`` and then reads all new output. ``due``: see `Readers`."""

    event: asyncio.Event
    due: float


class Readers:
    """The readers that live in one event loop.

    Waking a reader, building its piece and writing it to a socket costs about the same however many tokens the piece
    has. If waking every reader for every step would exceed ``rate`` pieces per second, readers that were served a
    moment ago wait for a later step and get the tokens of both in one piece. First and last pieces never wait, and no
    reader waits when there are few.

    Example: 64 readers and a rate of 2,500 are 25.6 ms between the pieces of one reader; with steps of 13 ms every
    second step is told.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float | None) -> None:
        """``rate``: the most pieces per second; None: no limit."""
        self.num_open = 0  # readers of this loop, counted by their streams
        self.loop = loop
        self._rate = rate
        self._held: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, news: Sequence[Reader], ended: Sequence[Reader]) -> bool:
        """Called from any thread. Readers in ``news`` have new output; those in ``ended`` have their last one. False:
        the event loop is closed, and nobody waits any more."""
        try:
            self.loop.call_soon_threadsafe(self._deliver, news, ended)
        except RuntimeError:
            return False
        return True

    def _deliver(self, news: Sequence[Reader], ended: Sequence[Reader]) -> None:
        for reader in ended:
            self._held.pop(reader, None)
            reader.event.set()
        if self._rate is None or len(news) <= _FREE:
            for reader in news:
                self._held.pop(reader, None)
                reader.event.set()
            return
        now, gap = self.loop.time(), len(news) / self._rate
        for reader in news:
            # Steps do not end when a piece is due: what is almost due goes with this one.
            if reader.due <= now + gap / 4:
                reader.due = now + gap
                self._held.pop(reader, None)
                reader.event.set()
            else:
                self._held[reader] = None
        if self._held and self._timer is None:
            self._arm(gap / 2)

    def _arm(self, grace: float) -> None:
        """Send what is held a little after it was due, because the next step may take long."""
        first = min(reader.due for reader in self._held)
        self._timer = self.loop.call_at(first + grace, self._late, grace)

    def _late(self, grace: float) -> None:
        self._timer = None
        now = self.loop.time()
        for reader in [r for r in self._held if r.due <= now]:
            del self._held[reader]
            reader.due = now + 2 * grace
            reader.event.set()
        if self._held:
            self._arm(grace)

"""Waking the readers of one event loop: one call per engine step, and no more often than they can be served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

_FREE = 8
"""Streams that are never held up: what they cost is small, and somebody watches them."""


class Reader(Protocol):
    """Someone who waits for ``event`` and then reads whatever is new. ``due``: see `Readers`."""

    event: asyncio.Event
    due: float


class Readers:
    """The readers that live in one event loop.

    Waking a reader, building its piece and writing it to a socket costs about the same however many tokens the piece
    has. Above ``rate`` pieces per second, if all that a step has news for were told of every step, those who were
    served a moment ago wait for a later one, whose tokens then come in the same piece. First pieces and last ones never
    wait, and nobody waits when few read.

    Example: 64 readers and a rate of 2,500 are 25.6 ms between the pieces of one reader; with steps of 13 ms every
    second step is told.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float | None) -> None:
        """``rate``: pieces per second; None: as many as there are."""
        self.num_open = 0  # readers of this loop; whoever adds or removes one counts
        self.loop = loop
        self._rate = rate
        self._held: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, news: Sequence[Reader], ended: Sequence[Reader]) -> None:
        """From any thread: there is something new for ``news``, and nothing will follow for ``ended``."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._deliver, news, ended)

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
        """The next step may be a long one: what is held goes out without it, a little after it was due."""
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

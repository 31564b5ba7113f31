"""A replica's side of what fronts know of its cache: a log of changes that is read by number, and from anew by whoever
is too far behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from draftwise.deploy.noted import Changes
from draftwise.kv.events import BlocksRemoved, BlocksStored, CacheEvent

_KEPT = 4096
"""Changes that are kept for readers."""
_GATHER = 0.02
"""Seconds for which changes are gathered before they are told: steps come every few milliseconds."""


class CacheLog:
    """Written in the engine's thread (`observe`), read in one event loop (`since`)."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._cached: set[bytes] = set()
        self._log: deque[tuple[str, Sequence[bytes]]] = deque(maxlen=_KEPT)
        self._number = 0  # of the last change
        self._news = asyncio.Event()

    def observe(self, events: Sequence[CacheEvent]) -> None:
        """Add changes of blocks."""
        with self._lock:
            for event in events:
                if isinstance(event, BlocksStored):
                    self._cached.update(event.digests)
                    self._log.append(("+", event.digests))
                elif isinstance(event, BlocksRemoved):
                    self._cached.difference_update(event.digests)
                    self._log.append(("-", event.digests))
                else:
                    self._cached.clear()
                    self._log.append(("0", ()))
            self._number += len(events)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._news.set)

    async def since(self, number: int | None, seconds: float) -> tuple[int, Changes]:
        """(number of the last change, what changed since ``number``); waits for news, so long at most. None, and what
        the log has lost: all that is cached, behind ("0", ())."""
        self._loop = asyncio.get_running_loop()
        if number == self._number:
            self._news.clear()
            if number == self._number:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), seconds)
                    await asyncio.sleep(_GATHER)
        with self._lock:
            behind = self._number - number if number is not None else -1
            if 0 <= behind <= len(self._log):
                return self._number, list(self._log)[len(self._log) - behind :]
            return self._number, [("0", ()), ("+", tuple(self._cached))]

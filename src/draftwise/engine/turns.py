"""Threads that share an engine which runs in its caller's thread."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from draftwise.errors import RequestError


class Turns:
    """One thread at a time uses an engine; others wait for their turn: ``with turns.take():``.

    Two threads that step one engine would take each other's results.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def take(self) -> AbstractContextManager[object]:
        """What the turn is held in: the lock itself. Python looks at signals wherever Python code is called, so that in
        ``__enter__`` and ``__exit__`` of our own Ctrl-C could come with the lock held, and nobody to release it.

        Raises RequestError if the thread has its turn already: a function that the engine calls has called the engine.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks its lock
            raise RequestError(
                "the engine is generating: a function that it calls, such as a logits processor, cannot use it"
            )
        return self._lock

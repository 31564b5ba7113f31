"""Threads that share an engine which runs in its caller's thread."""

from __future__ import annotations

import threading
from types import TracebackType

from draftwise.errors import RequestError


class Turns:
    """A context that one thread at a time may be in; others wait for their turn.

    Two threads that step one engine would take each other's results.

    Raises RequestError if the thread is in it already: a function that the engine calls has called the engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise RequestError(
                "the engine is generating: a function that it calls, such as a logits processor, cannot use it"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None
        self._lock.release()

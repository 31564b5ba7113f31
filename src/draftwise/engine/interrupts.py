"""Ctrl-C between the steps of an engine that runs in the caller's thread."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class WholeSteps:
    """Inside this context Ctrl-C waits for `check`, which is called between two steps. A second Ctrl-C does not wait.

    KeyboardInterrupt in the middle of planning or of taking in a step would leave the books of scheduler and cache half
    written, and the engine, which goes on to be used in a notebook, would give out a block twice. Only Python's own
    handler is delayed; handlers of commands, which end at once, stay.
    """

    def __init__(self) -> None:
        self._installed = False
        self._asked = False

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._installed = True
            signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()  # one that came after the last step

"""What handlers of signals raise (Ctrl-C, a time limit) comes between the steps of an engine that runs in the caller's
thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGVTALRM", "SIGPROF")
    if hasattr(signal, name)  # Windows has few
)  # fmt: skip


class WholeSteps:
    """Inside this context handlers of signals run at once, but what they raise waits for `check`, which is called
    between two steps. What a second one raises does not wait, unless the books are being written.

    KeyboardInterrupt, or the TimeoutError of an alarm, in the middle of planning or of taking in a step would leave the
    books of scheduler and cache half written, and the engine, which goes on to be used, would give out a block twice.
    In a drafter or a logits processor it would be taken for an error of theirs.
    """

    def __init__(self, breakable: Callable[[], bool] = lambda: True) -> None:
        """``breakable``: whether a second one may come through now."""
        self._breakable = breakable
        self.broken_off = False
        """Whether `check` raised something."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the program's
        self._held: BaseException | None = None
        self._over = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._run)
            except BaseException:  # by a handler that is not replaced yet
                self._give_back()
                raise
        return self

    def _run(self, number: int, frame: FrameType | None) -> None:
        if self._over or (self._held is not None and self._breakable()):
            self._handlers[number](number, frame)
            return
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self._held = self._held or error

    def check(self) -> None:
        """Raise what a handler has raised."""
        if self._held is None:
            return
        self.broken_off = True
        error, self._held = self._held, None
        try:
            raise error
        finally:
            del error  # its traceback has this frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        if error is None:
            self.check()  # one that came after the last step

    def _give_back(self) -> None:
        """Put the program's handlers back, Ctrl-C's last: until then what it raises waits. If another one raises here,
        those that are left behind only pass on, so that nothing is held that nobody asks for."""
        try:
            for number, handler in reversed(self._handlers.items()):
                if signal.getsignal(number) == self._run:  # else a handler has put another one there
                    signal.signal(number, handler)
        finally:
            self._over = True

"""Ctrl-C and SIGTERM end a command at once: one line on stderr and an exit code, at whatever moment they come.

Not by an exception: raised in the middle of an import or of a callback that native code runs, KeyboardInterrupt is
swallowed, wrapped, or shown as a traceback, and on its way out it waits for whatever runs. There is nothing to put
away: output is flushed as it is written, and memory goes with the process. Commands that have something to finish use
`raised`; the server has handlers of its own.

Exit codes: 130 after Ctrl-C, 143 after SIGTERM, as a shell shows a program that died of them. ``serve`` ends with 0
after SIGTERM: being stopped is how a server ends, and supervisors take any other code for a failure.

Imported first of all and importing next to nothing, so that the time in which Python's own handler would answer, with a
traceback, is that of the interpreter's start.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


def install() -> None:
    """Let both signals end the process at once. One that is ignored stays so (a shell's background jobs)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        say("interrupted")
        os._exit(130)
    say("terminated")
    os._exit(0 if sys.argv[1:2] == ["serve"] else 143)


def say(what: str) -> None:
    """One line on stderr. On a terminal it begins behind the ^C or what was streamed, on a line of its own."""
    line = f"draftwise: {what}\n".encode()
    try:  # noqa: SIM105  (contextlib is not needed otherwise)
        os.write(2, b"\n" + _SHOW_CURSOR + line if os.isatty(2) else line)
    except OSError:  # nobody reads
        pass


class raised:
    """Inside this context Ctrl-C raises KeyboardInterrupt, for work that has something to finish. The work must end
    soon.

    Without effect where the signals were not `install`ed: KeyboardInterrupt is what they are then.
    """

    def __enter__(self) -> None:
        self._installed = signal.getsignal(signal.SIGINT) is _end
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, _end)


_code: int | None = None  # of the command, once it is done


def finish(code: int) -> None:
    """The command is done, and ``code`` is its exit code. Later signals only end it sooner.

    The process ends behind the last ``atexit`` callback. What the interpreter would do after that, taking every module
    apart, takes half a second and has nothing to do with the command.
    """
    global _code
    _code = code
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _end:
            signal.signal(number, _leave)


def _leave(*_: object) -> None:
    if _code is None:  # `finish` was not called: not a command's process
        return
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, or nobody reads
            pass
    os._exit(_code)


atexit.register(_leave)  # before all others: callbacks run in the reverse order

"""Ctrl-C and SIGTERM end a command at once: one line on stderr and an exit code, at whatever moment they come.

Not by an exception: raised in the middle of an import or of a callback that native code runs, KeyboardInterrupt is
swallowed, wrapped, or shown as a traceback, and on its way out it waits for whatever runs. There is little to put
away: output is flushed as it is written, memory goes with the process, and temporary folders are on a list
(`lifetime.passing_folder`). Commands that have something to finish use `raised`; the server has handlers of its own.

Exit codes: 130 after Ctrl-C, 143 after SIGTERM, as a shell shows a program that died of them. ``serve`` ends with 0
after SIGTERM: being stopped is how a server ends, and supervisors take any other code for a failure.

Python runs handlers in the main thread, between two of its instructions. While that thread is in one long native call,
such as a step with a long prompt, a thread of our own ends the process instead: `_watch`.

Imported first of all and importing next to nothing, so that the time in which Python's own handler would answer, with a
traceback, is that of the interpreter's start.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


def install() -> None:
    """Let both signals end the process at once. One that is ignored stays so (a shell's background jobs)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    if hasattr(os, "register_at_fork"):  # not on Windows
        came, comes = os.pipe()
        os.set_blocking(comes, False)
        signal.set_wakeup_fd(comes, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_unwatched)  # the pipe is the parent's
        _thread.start_new_thread(_watch, (came,))


_PATIENCE = 0.3
"""Seconds after which the main thread is taken to be in a native call. It usually answers within some milliseconds."""
_ending = False


def _watch(came: int) -> None:
    """End the process for the main thread, if it does not answer a signal that is to end it."""
    while numbers := os.read(came, 1):
        number = numbers[0]
        if signal.getsignal(number) is _end:
            time.sleep(_PATIENCE)
            if signal.getsignal(number) is _end and not _ending:
                _end(number, None)


def _unwatched() -> None:
    signal.set_wakeup_fd(-1)


def _end(number: int, frame: FrameType | None) -> None:
    global _ending
    _ending = True
    if number == signal.SIGINT:
        say("interrupted")
        code = 130
    else:
        say("terminated")
        code = 0 if sys.argv[1:2] == ["serve"] else 143
    lifetime = sys.modules.get("draftwise.lifetime")
    if lifetime is not None and hasattr(lifetime, "remove_folders"):  # else it is imported at this moment
        lifetime.remove_folders()
    os._exit(code)


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

"""A process that runs one of our modules and is watched: what it writes, how it ends, and that it ends with us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

PATIENCE = 5.0
"""Seconds that a process has to end once it was asked to."""
_LAST_WORDS = 30
"""Lines of what it wrote that are kept."""


class Lifeline:
    """A pipe whose one end only this process holds. Children read from the other: nothing ever comes but its end, and
    then they end, whatever they do (`belong_to`)."""

    def __init__(self) -> None:
        self.children_end, self._own_end = os.pipe()

    def let_go(self) -> None:
        """Children that still run end. Asking twice is fine."""
        for descriptor in (self._own_end, self.children_end):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._own_end = self.children_end = -1


def belong_to(lifeline: int) -> None:
    """In a child: end when the process that started it is gone, and leave it to that process what Ctrl-C and SIGTERM
    mean, which a terminal sends to all. Returns at once; a thread watches.

    Call it before anything that is slow to import: until then a host that ends leaves the child behind, which would go
    on to import for seconds."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Child:
    """One such process, held by its starter."""

    def __init__(
        self,
        name: str,
        module: str,
        fds: Sequence[int],
        *,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            name: for people, and before each line that it writes: "rank 1".
            module: what it runs as ``python -m``.
            fds: file descriptors, its arguments.
            inherited: others that it has under the same numbers.
            environment: variables that it has besides this process's.
        """
        self.name = name
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(*fds, *inherited),
            env={**os.environ, **paths, **(environment or {})},
        )
        assert self._process.stdout is not None
        self._said: deque[str] = deque(maxlen=_LAST_WORDS)
        self._reader = threading.Thread(
            target=_listen,
            args=(self._process.stdout, self._said, name),
            name=f"draftwise-{name.replace(' ', '-')}",
            daemon=True,
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.has_ended

    def kill(self) -> None:
        """Send it a signal that it cannot refuse."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def end(self, patience: float = PATIENCE) -> None:
        """See that it has ended, by force after ``patience`` seconds, and that all it wrote was read. Asking twice is
        fine."""
        if not self.wait(patience):
            self.kill()
            self.wait(PATIENCE)
        self._reader.join(1.0)

    def said(self) -> list[str]:
        """The last lines of what it wrote; all of them, once it has ended."""
        if self.has_ended:
            self._reader.join(1.0)
        return list(self._said)

    @property
    def how(self) -> str:
        """How it ended, for people, behind its name."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def disown(self) -> None:
        """In a forked child: it is not this process's to wait for."""
        self._process.returncode = 0


def _listen(stream: IO[bytes], said: deque[str], name: str) -> None:
    """Keep the last lines of what it writes, and pass them on."""
    with contextlib.suppress(ValueError, OSError), stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            said.append(text)
            with contextlib.suppress(Exception):  # stderr may be gone at the end of the program
                print(f"[{name}] {text}", file=sys.stderr, flush=True)

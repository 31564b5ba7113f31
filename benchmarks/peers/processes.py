"""The driver's side: starts workers in their environments, asks them in turn, and keeps idle ones off the cores."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from channel import Unsupported

TAIL = 1500  # characters of a worker's log that an error quotes


class Unavailable(Exception):
    """The engine is not installed here; the message says what is missing."""


class PeerError(Exception):
    """A worker died, hung, or answered nonsense. It may not be asked again, unless it is an `AnswerError`."""


class AnswerError(PeerError):
    """A worker said that it failed at one question; it lives on."""


def interpreter(name: str, given: Mapping[str, str], folder: str | None, default: str | None = None) -> str:
    """The Python of a peer's environment.

    Args:
        given: engine -> environment folder or interpreter, as named on the command line.
        folder: holds one environment per peer, ``folder/NAME`` or ``folder/env-NAME``.
        default: what to use if nothing was named.

    Raises:
        Unavailable: There is no such environment.
    """
    places = []
    if name in given:
        places = [Path(given[name])]
    elif folder:
        places = [Path(folder) / name, Path(folder) / f"env-{name}"]
    for place in places:
        for python in (place, place / "bin" / "python"):
            if python.is_file() and os.access(python, os.X_OK):
                return str(python)
    if default is not None and name not in given:
        return default
    where = " or ".join(map(str, places)) if places else "neither --peers nor --python names its environment"
    raise Unavailable(f"{name} is not installed ({where}); README.md says how")


def check_imports(python: str, modules: Sequence[str]) -> None:
    """Raises Unavailable unless the interpreter finds the modules."""
    probe = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None], sep=', ')"
    # not in this folder: a script's own folder would come first on the path
    done = subprocess.run([python, "-I", "-c", probe, *modules], capture_output=True, text=True, check=False)
    missing = done.stdout.strip()
    if done.returncode:
        raise Unavailable(f"{python} does not run: {done.stderr.strip()[-200:]}")
    if missing:
        raise Unavailable(f"{python} lacks {missing}")


class Worker:
    """One engine in a process of its own session, stopped (SIGSTOP) whenever it is not asked anything.

    An engine whose threads spin while they wait would otherwise slow down the one that is measured.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        pause: bool = True,
    ) -> None:
        self.name = name
        self._log = log
        self._pause = pause
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._buffer = b""

    def ask(self, question: Mapping[str, Any], timeout: float = 600.0) -> Any:
        """The answer to one question.

        Raises:
            Unsupported: The engine cannot do that.
            AnswerError: It failed at this one.
            PeerError: It died, hung, or answered what is no answer.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._failed("has died") from None
            reply = self._line(timeout)
        finally:
            if self._pause:
                self._signal(signal.SIGSTOP)
        return self._open(reply)

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time used so far by all processes of the worker's session."""
        return session_cpu_seconds(self._process.pid)

    def close(self) -> None:
        """End the process, kindly first."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._selector.close()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise self._failed(f"did not answer within {timeout:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failed("has died")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _open(self, line: bytes) -> Any:
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if isinstance(reply, dict):
            if "ok" in reply:
                return reply["ok"]
            if "unsupported" in reply:
                raise Unsupported(reply["unsupported"])
            if "error" in reply:
                raise AnswerError(str(self._failed(f"failed: {reply['error']}")))
        raise self._failed(f"answered what is no answer: {line[:200]!r}")

    def _failed(self, what: str) -> PeerError:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()
        return PeerError(f"{self.name} {what}" + (f"\n--- end of {self._log} ---\n{tail}" if tail else ""))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def session_cpu_seconds(session: int) -> float:
    """User and system time of every living process of a session, in seconds."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the command's name, in parentheses, may hold blanks and parentheses itself
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")

"""Processes that run tests against mutants. Each has a copy of the sources, and imports what is slow to import once: it
forks for every mutant."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_MEMORY = 3 << 30
"""Bytes that a mutant's process may hold; a mutant that takes more hangs in its own way."""
_COPIED = ("src", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Job:
    """Source text to put in place of a file, and pytest targets, each run if the ones before it passed.

    ``limits``: seconds of a processor that a test may take, by its id; ``limit``: of those that are not among them. A
    process that waits is given ten times as many on the clock, for the machine may be busy.
    """

    number: int
    file: Path | None
    source: str
    targets: tuple[str, ...]
    limits: dict[str, float] = field(default_factory=dict)
    limit: float = 60.0


@dataclass(frozen=True)
class Ran:
    """``status``: passed, failed, "timed out", or "broken" (pytest could not run the tests). ``test``: that failed, or
    was running. ``seconds``: of the tests that ended, by id; ``took``: of all."""

    number: int
    status: str
    test: str
    seconds: dict[str, float]
    took: float
    output: str


def make_copy(root: Path, folder: Path) -> None:
    """Copy what is needed to run tests. What is not Python text is linked."""
    for name in _COPIED:
        source = root / name
        if source.is_file():
            shutil.copy2(source, folder / name)
            continue
        for path in sorted(source.rglob("*")):
            target = folder / path.relative_to(root)
            if "__pycache__" in path.parts or ".hypothesis" in path.parts:
                continue
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif path.suffix in (".py", ".typed"):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)
    for name in ("README.md", "docs", "examples", "scripts", "constraints.txt"):
        if (root / name).exists():
            (folder / name).symlink_to(root / name)


class Worker:
    """One process with its copy. Jobs go in by `start`, answers come out by `connection`."""

    def __init__(self, root: Path, folder: Path, warm: Callable[[], None]) -> None:
        """``warm``: imports, in the new process, what all tests need and no mutant can be in."""
        folder.mkdir()
        make_copy(root, folder)
        context = get_context("fork")
        self.connection, other = context.Pipe()
        self.busy = False
        self._process = context.Process(target=_serve, args=(other, folder, warm), daemon=True)
        self._process.start()
        other.close()

    def start(self, job: Job) -> None:
        self.busy = True
        self.connection.send(job)

    def answer(self) -> Ran:
        """Raises EOFError if the process has died."""
        ran: Ran = self.connection.recv()
        self.busy = False
        return ran

    def stop(self) -> None:
        """End the process, and the tests it runs."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGTERM)
        self._process.join(10)


def _serve(connection: Connection, folder: Path, warm: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who waits for us decides
    running: list[int] = []

    def terminate(*_: object) -> None:
        for pid in running:
            _kill(pid)
        os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    os.chdir(folder)
    source = str(folder / "src")
    sys.path[:] = [
        source,
        str(folder),
        *(p for p in sys.path if not p.endswith("/src") and p not in ("", ".")),
    ]
    os.environ["PYTHONPATH"] = source
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / ".hypothesis")
    warm()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_run(job, folder, running))


def _run(job: Job, folder: Path, running: list[int]) -> Ran:
    before = None
    if job.file is not None:
        path = folder / job.file
        before = path.read_text()
        _write(path, job.source)
    try:
        return _in_a_fork(job, folder, running)
    finally:
        if job.file is not None and before is not None:
            _write(folder / job.file, before)


def _write(path: Path, source: str) -> None:
    """What was compiled of the file is taken away: two mutants of one second and one size look alike to Python."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _in_a_fork(job: Job, folder: Path, running: list[int]) -> Ran:
    start = time.monotonic()
    log = folder / "output.txt"
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        _child(job, write, log)
    os.close(write)
    running.append(pid)
    seconds: dict[str, float] = {}
    test, status, data = "", "", b""
    watch = _Limit(pid, job.limit)
    try:
        while not status:
            ready, _, _ = select.select([read], [], [], 0.5)
            if ready:
                piece = os.read(read, 65536)
                if not piece:
                    break
                data += piece
                *lines, data = data.split(b"\n")
                for line in lines:
                    kind, name, value = line.decode(errors="replace").split("\t")
                    if kind == "start":
                        test = name
                        watch = _Limit(pid, job.limits.get(name, job.limit))
                    elif kind == "end":
                        seconds[name] = float(value)
                        watch = _Limit(pid, job.limit)
                    else:
                        status, test = kind, name or test
            elif watch.is_over() or _resident(pid) > _MEMORY:
                status = "timed out"
    finally:
        os.close(read)
        _kill(pid)
        os.waitpid(pid, 0)
        running.remove(pid)
    # Without a word at its end the process crashed.
    output = log.read_text(errors="replace") if log.exists() else ""
    return Ran(job.number, status or "failed", test, seconds, time.monotonic() - start, output[-4000:])


def _kill(pid: int) -> None:
    """The process, and those it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # before it had a group of its own
        os.kill(pid, signal.SIGKILL)


class _Limit:
    """From now on a process has so many seconds."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._processor = _processor(pid) + seconds
        self._clock = time.monotonic() + 10 * seconds

    def is_over(self) -> bool:
        return _processor(self._pid) > self._processor or time.monotonic() > self._clock


def _processor(pid: int) -> float:
    """Seconds of processors that a process has taken, and those it started and waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _child(job: Job, write: int, log: Path) -> None:
    """Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(os.open(os.devnull, os.O_RDONLY))
        if job.file is not None:
            sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "draftwise")]:
            del sys.modules[name]  # those of the copy are others
        _tests(job.targets, write)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--tb=short",
    "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
)  # fmt: skip


def _tests(targets: Sequence[str], write: int) -> None:
    import pytest

    watch = _Watch(write)
    for target in targets:
        code = pytest.main([*_OPTIONS, *target.split()], plugins=[watch])
        if code == pytest.ExitCode.TESTS_FAILED:
            return watch.say("failed", watch.failed)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return watch.say("broken", watch.failed or target)
    return watch.say("passed")


class _Watch:
    """A plugin of pytest that tells which test runs."""

    def __init__(self, write: int) -> None:
        self.failed = ""
        self._write = write
        self._seconds = 0.0

    def say(self, kind: str, name: str = "", value: float = 0.0) -> None:
        os.write(self._write, f"{kind}\t{name}\t{value:.4f}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seconds = 0.0
        self.say("start", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        if report.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.say("end", nodeid, self._seconds)

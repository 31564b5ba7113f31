"""Ctrl-C and SIGTERM end a command with one line and a code, at any moment; who reads no longer ends it quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from draftwise.cli import main, signals

ROOT = Path(__file__).parents[2]
READY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background
from draftwise.cli import signals
signals.install()
def ready():
    os.write(1, b".")
"""


def ended_by(number: int, script: str, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a script that is sent a signal when it has called ``ready``."""
    process = subprocess.Popen(
        [sys.executable, "-c", READY + script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"."
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.decode()


BUSY = "ready()\nwhile True:\n    pass"
SWALLOWS = """
class Late:
    def __del__(self):  # where Python drops exceptions
        ready()
        while True:
            pass
try:
    Late()
except BaseException:
    pass
while True:
    pass
"""
IN_NATIVE_CODE = """
import hashlib
ready()
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # an hour
"""
HANGS_AT_THE_END = """
import atexit, time
def hang():
    ready()
    time.sleep(600)
atexit.register(hang)
signals.finish(7)
"""


@pytest.mark.parametrize(
    ("number", "script", "arguments", "code", "line"),
    [
        (signal.SIGINT, BUSY, (), 130, "draftwise: interrupted\n"),
        (signal.SIGTERM, BUSY, (), 143, "draftwise: terminated\n"),
        (signal.SIGTERM, BUSY, ("serve", "--port", "0"), 0, "draftwise: terminated\n"),
        (signal.SIGINT, SWALLOWS, (), 130, "draftwise: interrupted\n"),
        (signal.SIGINT, IN_NATIVE_CODE, (), 130, "draftwise: interrupted\n"),
        (signal.SIGTERM, IN_NATIVE_CODE, (), 143, "draftwise: terminated\n"),
        (signal.SIGINT, HANGS_AT_THE_END, (), 7, ""),
        (signal.SIGTERM, HANGS_AT_THE_END, (), 7, ""),
    ],
)
def test_a_signal_is_one_line_and_a_code(
    number: int, script: str, arguments: tuple[str, ...], code: int, line: str
) -> None:
    assert ended_by(number, script, *arguments) == (code, line)


def test_temporary_folders_are_gone(tmp_path: Path) -> None:
    script = """
import tempfile
tempfile.tempdir = sys.argv[1]
from draftwise import lifetime
with lifetime.passing_folder("one-") as one, lifetime.passing_folder("two-"):
    open(one + "/file", "w").close()
    assert len(os.listdir(sys.argv[1])) == 2
    ready()
    while True:
        pass
"""
    assert ended_by(signal.SIGTERM, script, str(tmp_path)) == (143, "draftwise: terminated\n")
    assert not list(tmp_path.iterdir())


def test_a_signal_of_a_forked_child_is_not_its_parents() -> None:
    script = """
import time
if not os.fork():
    signal.raise_signal(signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 143
time.sleep(2 * signals._PATIENCE)
ready()
while True:
    pass
"""
    assert ended_by(signal.SIGINT, script) == (130, "draftwise: terminated\ndraftwise: interrupted\n")


def test_commands_that_finish_something_are_interrupted_by_an_exception() -> None:
    script = """
with signals.raised():
    try:
        ready()
        while True:
            pass
    except KeyboardInterrupt:
        os.write(2, b"saved\\n")
assert signal.getsignal(signal.SIGINT) is signals._end
sys.exit(5)
"""
    assert ended_by(signal.SIGINT, script) == (5, "saved\n")


def test_a_signal_that_is_ignored_stays_so() -> None:
    script = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signals.install()
os.kill(os.getpid(), signal.SIGINT)
ready()
signal.pause()
"""
    assert ended_by(signal.SIGTERM, script) == (143, "draftwise: terminated\n")


def test_the_handlers_are_there_before_anything_else() -> None:
    """What is imported before them is the time in which Python answers, with a traceback."""
    script = """
import sys
before = set(sys.modules)
import draftwise.cli.signals
own = {name for name in set(sys.modules) - before if name.startswith("draftwise")}
assert own == {"draftwise", "draftwise.cli", "draftwise.cli.signals"}, own
assert not {"typing", "re", "argparse", "logging"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["scripts"] == {"draftwise": "draftwise.__main__:start"}
    source = (ROOT / "src/draftwise/__main__.py").read_text()
    assert source.index("signals.install()") < source.index("from draftwise.cli.main import")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_nobody_reads(arguments: list[str]) -> None:
    """As in ``draftwise --help | true``."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "draftwise", *arguments], stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert done.returncode in (0, 1) and done.stderr == b""  # argparse itself does not mind


def test_nobody_reads_errors_either() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "draftwise", "--no-such-option"]
    done = subprocess.run(command, stdout=writer, stderr=writer, timeout=60)
    os.close(writer)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MemoryError("dw_linear_pack: not enough"), 1, "draftwise: out of memory: dw_linear_pack: not enough"),
        (RuntimeError("[enforce fail] can't allocate memory: you"), 1, "draftwise: out of memory: [enforce"),
        (KeyboardInterrupt(), 130, "draftwise: interrupted"),
    ],
)  # fmt: skip
def test_what_ends_a_command_is_one_line(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(main, "_run", fail)
    assert main.main([]) == code
    told = capfd.readouterr().err
    assert told.startswith(line) and told.count("\n") == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(main, "_run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main.main([])


def test_nothing_happens_where_the_handlers_are_not_installed() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals.raised():
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before

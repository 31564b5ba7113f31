"""The native library built for ARM, called from tests on another processor: qemu runs it (`driver.cpp`).

`library(cpu)` is a `NativeLibrary` like any other: every test of the kernels can use it. ``DRAFTWISE_TEST_ARM`` = a
processor that ``qemu-aarch64 -cpu`` knows makes `tests.native` do so, for example

    DRAFTWISE_TEST_ARM=max pytest tests/unit/test_cpu_linear.py

and ``DRAFTWISE_CPU_LIBRARY`` besides, a library for ARM that somebody else built.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwise.kernels.cpu import build as builder
from draftwise.kernels.cpu.library import NativeLibrary

COMPILER = "aarch64-linux-gnu-g++"
DUMP = "aarch64-linux-gnu-objdump"  # comes with the compiler
QEMU = "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
PROCESSORS = {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}
"""Processors of qemu, and the best level of each."""

_REQUEST = struct.Struct("<QQ16Q8d")
_ANSWER = struct.Struct("<Qq")
_CALL, _SYMBOL, _STRING = range(3)
_REGISTERS, _MOST = 8, 16
_FLOATING = (ctypes.c_float, ctypes.c_double)
_ROOM = 2 << 30
"""Between memory of this process and of qemu: either may grow."""


def why_not() -> str | None:
    """The reason that nothing can be run for ARM here, or None."""
    for name in (COMPILER, QEMU):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
    if os.uname().machine != "x86_64":
        return "the driver shares addresses with this process, which was tried on x86_64 only"
    return None


@functools.cache
def build() -> tuple[Path, Path]:
    """The library and the driver, compiled if their sources changed."""
    folder = builder.object_cache("arm")
    library = builder.build(folder / "_native.so", folder, compiler=COMPILER)
    source = Path(__file__).with_name("driver.cpp")
    driver = folder / f"driver-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not driver.exists():
        partial = driver.with_suffix(f".{os.getpid()}.tmp")
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
        subprocess.run([COMPILER, *flags, str(source), "-o", str(partial), "-ldl"], check=True)
        partial.replace(driver)
    return library, driver


@functools.cache
def library(cpu: str, path: Path | None = None) -> NativeLibrary:
    """The library, or another build of it, on a processor of qemu, in a process that ends with this one."""
    own, driver = build()
    path = path or own
    remote = Remote(cpu, driver, path)
    atexit.register(remote.close)
    return NativeLibrary(path, remote)


class Remote:
    """A library behind a driver; has its functions by name, as a ``ctypes.CDLL`` has."""

    def __init__(self, cpu: str, driver: Path, path: Path) -> None:
        self._lock = threading.RLock()
        self._asking = False
        self._later: list[tuple[int, int, Sequence[int], Sequence[float]]] = []
        """Calls that came while another waited for its answer: of finalizers, which the garbage collector runs whenever
        it likes, also in the middle of a request. They are made behind it."""
        # Of this very process, whoever reads it: the right to it was checked when it was opened.
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 until close
        try:
            for _ in range(20):
                self._process = subprocess.Popen(
                    [QEMU, "-L", SYSROOT, "-cpu", cpu, str(driver), str(path), str(memory)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    pass_fds=[memory],
                )
                self._answer()
                if _apart(_mapped(os.getpid()), _mapped(self._process.pid)):
                    return
                self._end()  # the addresses are drawn anew
        finally:
            os.close(memory)
        raise AssertionError("qemu always lies where this process has its memory")

    def close(self) -> None:
        self._end()
        self._log.close()

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def __getitem__(self, name: str) -> Any:
        symbol = ctypes.create_string_buffer(name.encode())
        address, _ = self.request(_SYMBOL, ctypes.addressof(symbol))
        if address == 0:
            raise AttributeError(name)
        return RemoteFunction(self, name, address)

    def request(
        self, kind: int, what: int, integers: Sequence[int] = (), floats: Sequence[float] = ()
    ) -> tuple[int, int]:
        """The result, 64 bits of it, and errno; of a finalizer's call that has to wait for its turn, zeros."""
        with self._lock:
            if self._asking:
                self._later.append((kind, what, integers, floats))
                return 0, 0
            self._asking = True
            try:
                found = self._ask(kind, what, integers, floats)
                while self._later:
                    self._ask(*self._later.pop(0))
                return found
            finally:
                self._asking = False

    def _ask(self, kind: int, what: int, integers: Sequence[int], floats: Sequence[float]) -> tuple[int, int]:
        whole = [*integers, *[0] * (_MOST - len(integers))]
        numbers = [*floats, *[0.0] * (_REGISTERS - len(floats))]
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(_REQUEST.pack(kind, what, *whole, *numbers))
        pipe.flush()
        return self._answer()

    def text(self, address: int) -> bytes:
        room = ctypes.create_string_buffer(4096)
        self.request(_STRING, address, [ctypes.addressof(room), len(room)])
        return room.value

    def _answer(self) -> tuple[int, int]:
        pipe = self._process.stdout
        assert pipe is not None
        data = pipe.read(_ANSWER.size)
        if len(data) < _ANSWER.size:
            self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            raise AssertionError(f"the driver is gone ({self._process.returncode}): {said}")
        result, error = _ANSWER.unpack(data)
        return result, error


class RemoteFunction:
    """What `NativeLibrary.function` wants of a function of ctypes."""

    def __init__(self, remote: Remote, name: str, address: int) -> None:
        self.__name__ = name
        self.restype: Any = ctypes.c_int
        self.argtypes: Sequence[Any] = ()
        self.errcheck: Any = None
        self._remote = remote
        self._address = address

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes), self.__name__
        integers: list[int] = []
        floats: list[float] = []
        for kind, value in zip(self.argtypes, arguments, strict=True):
            if kind in _FLOATING:
                floats.append(_in_register(kind, value))
            else:
                integers.append(_integer(kind, value))
        assert len(integers) <= _MOST and len(floats) <= _REGISTERS
        bits, error = self._remote.request(_CALL, self._address, integers, floats)
        ctypes.set_errno(error)
        result = self._result(bits)
        return result if self.errcheck is None else self.errcheck(result, self, arguments)

    def _result(self, bits: int) -> Any:
        if self.restype is None:
            return None
        assert self.restype not in _FLOATING, "no exported function returns one"
        if self.restype is ctypes.c_char_p:
            return self._remote.text(bits) if bits else None
        size = ctypes.sizeof(self.restype)
        return self.restype.from_buffer_copy(bits.to_bytes(8, "little")[:size]).value


def _in_register(kind: Any, value: float) -> float:
    """The double whose lower half is a float: how a register holds it."""
    number: float
    (number,) = struct.unpack("<d", bytes(kind(value)).ljust(8, b"\0"))
    return number


def _integer(kind: Any, value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return int.from_bytes(bytes(kind(value)).ljust(8, b"\0"), "little")
    if issubclass(kind, ctypes._Pointer) and isinstance(value, kind._type_):
        return ctypes.addressof(value)
    if isinstance(value, bytes):
        return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0
    if isinstance(value, ctypes._SimpleCData):
        return _integer(kind, value.value)
    pointed = getattr(value, "_obj", value)  # of byref
    if isinstance(pointed, ctypes._Pointer):
        return ctypes.cast(pointed, ctypes.c_void_p).value or 0
    return ctypes.addressof(pointed)


def _mapped(pid: int) -> list[tuple[int, int]]:
    """The ranges of addresses that a process uses, but for the system's own."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, _, end = line.split(" ", 1)[0].partition("-")
        if not line.endswith("[vsyscall]"):
            found.append((int(begin, 16), int(end, 16)))
    return found


def _apart(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> bool:
    return all(
        end + _ROOM <= other_begin or other_end + _ROOM <= begin
        for begin, end in ours
        for other_begin, other_end in theirs
    )

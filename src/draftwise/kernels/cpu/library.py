"""The native library: found, loaded once, told which instruction set to use.

``DRAFTWISE_CPU_ISA`` = ``portable`` | ``avx2`` | ``avx512`` forces an instruction set that the processor has. Results
are the same bits for any batch on each of them, not across them. ``DRAFTWISE_CPU_LIBRARY`` names another build of the
library, for example one with a sanitiser in it.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from draftwise.errors import ConfigError

ISA_VARIABLE = "DRAFTWISE_CPU_ISA"
LIBRARY_VARIABLE = "DRAFTWISE_CPU_LIBRARY"
_PATH = Path(__file__).resolve().parent / "_native.so"


class Isa(enum.IntEnum):
    """Instruction sets with kernels of their own, weakest first; the values of ``csrc/isa.h``."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2


class NativeLibrary:
    """The loaded library. Functions are declared by who uses them, with `function`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = ctypes.CDLL(str(path))
        self._lock = threading.Lock()
        self.best_isa = Isa(self.function("dw_isa_best", ctypes.c_int, [])())
        self._set_isa = self.function("dw_isa_set", ctypes.c_int, [ctypes.c_int])
        self._current_isa = self.function("dw_isa_current", ctypes.c_int, [])

    def function(self, name: str, result: type | None, arguments: Sequence[type]) -> ctypes._NamedFuncPointer:
        """A C function by name, with its types; calls release the interpreter lock."""
        pointer = self._handle[name]
        pointer.restype = result
        pointer.argtypes = list(arguments)
        return pointer

    @property
    def isa(self) -> Isa:
        """What kernels run on now."""
        return Isa(self._current_isa())

    def use_isa(self, isa: Isa) -> None:
        """Run on this instruction set from now on, in the whole process.

        Raises:
            ConfigError: The processor, or the compiler that made the library, lacks it.
        """
        if not self._set_isa(int(isa)):
            raise ConfigError(
                f"{ISA_VARIABLE}={isa.name.lower()}: this processor and build offer at most "
                f"{self.best_isa.name.lower()}"
            )


def release_with(
    owner: object, free: Callable[..., object], *arguments: object
) -> Callable[[], object | None]:
    """Call ``free(*arguments)`` when ``owner`` is gone, or when the returned function is called; once.

    Not at the end of the program: a thread may still be in a call that reads this memory, and the system takes it back.
    """
    finalizer = weakref.finalize(owner, free, *arguments)
    finalizer.atexit = False
    return finalizer


@functools.cache
def _loaded() -> NativeLibrary | str:
    """The library, or why there is none."""
    path = Path(os.environ.get(LIBRARY_VARIABLE) or _PATH)
    if not path.exists():
        return f"{path.name} is not built (python -m draftwise.kernels.cpu.build)"
    try:
        library = NativeLibrary(path)
    except (OSError, AttributeError) as error:  # made for another platform, or by another version
        return f"{path.name} cannot be loaded: {error}"
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        names = {isa.name.lower(): isa for isa in Isa}
        if forced.lower() not in names:
            raise ConfigError(f"{ISA_VARIABLE}={forced}: not one of {', '.join(names)}")
        library.use_isa(names[forced.lower()])
    return library


def native_library() -> NativeLibrary | None:
    """The native library, or None where it was not built; `why_not_native` then says why.

    Raises:
        ConfigError: ``DRAFTWISE_CPU_ISA`` names nothing, or what this processor lacks.
    """
    loaded = _loaded()
    return loaded if isinstance(loaded, NativeLibrary) else None


def why_not_native() -> str | None:
    """The reason that `native_library` is None, for people; None when it is not."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None

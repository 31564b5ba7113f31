"""The native library: found, loaded once, told which instruction set to use.

A library that was built from other sources than those beside it is refused: structures are mirrored in ctypes, and one
field more makes a call write where it should not. That is an error, not a reason to go on without: the engine would be
several times slower, and whoever edited a source or updated the package would not learn why. Where there is no library,
nobody built one (no compiler, say), and models run on plain torch with a warning.

How calls fail is said in errno (``csrc/boundary.h``) and raised here: MemoryError; ValueError for arguments that a
kernel refuses; else OSError.

``DRAFTWISE_ISA`` = ``portable`` | ``avx2`` | ``avxvnni`` | ``avx512vnni`` | ``avx512`` | ``amx``, on ARM ``portable`` |
``neon`` | ``dotprod`` | ``i8mm``, forces an instruction set that the processor has; without it, `levels` chooses.
Results are the same bits for any batch on each of them, not across them. ``DRAFTWISE_CPU_LIBRARY`` names another build
of the library, for example one with a sanitiser in it.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.build import LIBRARY, SOURCES, source_id
from draftwise.names import KERNELS_VARIABLE

ISA_VARIABLE = "DRAFTWISE_ISA"
LIBRARY_VARIABLE = "DRAFTWISE_CPU_LIBRARY"
_PATH = SOURCES.parent / LIBRARY


class Isa(enum.IntEnum):
    """Instruction sets with kernels of their own, weakest first; the values of ``csrc/isa.h``."""

    PORTABLE = 0
    AVX2 = 1
    AVXVNNI = 2
    AVX512VNNI = 3
    AVX512 = 4
    AMX = 5
    NEON = 6  # ARM from here
    DOTPROD = 7
    I8MM = 8
    EMULATED = 9  # AMX's kernels with computed tiles, for tests


class NativeLibrary:
    """The loaded library. Its users declare functions with `function`."""

    def __init__(self, path: Path, handle: Any = None) -> None:
        """Raises ConfigError if it was built from other sources, OSError if the system cannot load it.

        ``handle``: what has the functions, as a ``ctypes.CDLL`` has; tests call a library for another processor.
        """
        self.path = path
        self._handle = ctypes.CDLL(str(path), use_errno=True) if handle is None else handle
        self._check_sources()
        self.best_isa = Isa(self.function("dw_isa_best", ctypes.c_int, [])())
        self._isa_supported = self.function("dw_isa_supported", ctypes.c_int, [ctypes.c_int])
        self._set_isa = self.function("dw_isa_set", ctypes.c_int, [ctypes.c_int])
        self._current_isa = self.function("dw_isa_current", ctypes.c_int, [])

    def function(self, name: str, result: type | None, arguments: Sequence[type]) -> ctypes._NamedFuncPointer:
        """A C function by name, with its types; calls release the interpreter lock, and raise what it says in errno."""
        pointer = self._handle[name]
        pointer.restype = result
        pointer.argtypes = list(arguments)
        pointer.errcheck = _raise_errno
        return pointer

    def _check_sources(self) -> None:
        wanted = source_id()
        try:
            built_from = self._handle["dw_source_id"]
        except AttributeError:  # from before there was one
            found = None
        else:
            built_from.restype = ctypes.c_char_p
            found = built_from()
        if found != wanted.encode():
            raise ConfigError(
                f"the native library {self.path} was not built from the sources beside it ({SOURCES}): run python -m "
                "draftwise.kernels.cpu.build to build it again, or set DRAFTWISE_KERNELS=torch to do without"
            )

    @property
    def isas(self) -> tuple[Isa, ...]:
        """The instruction sets of this processor and build, weakest first, without those for tests."""
        return tuple(isa for isa in Isa if isa is not Isa.EMULATED and self.supports(isa))

    def supports(self, isa: Isa) -> bool:
        """Whether this processor and build offer it, for use or for tests."""
        return bool(self._isa_supported(int(isa)))

    @property
    def isa(self) -> Isa:
        """The instruction set that kernels use now."""
        return Isa(self._current_isa())

    def use_isa(self, isa: Isa) -> None:
        """Run on this instruction set from now on, in the whole process.

        Raises:
            ConfigError: The processor, or the compiler that made the library, lacks it.
        """
        if not self._set_isa(int(isa)):
            offered = ", ".join(one.name.lower() for one in self.isas)
            raise ConfigError(f"{ISA_VARIABLE}={isa.name.lower()}: this processor and build offer {offered}")


def release_with(
    owner: object, free: Callable[..., object], *arguments: object
) -> Callable[[], object | None]:
    """Call ``free(*arguments)`` when ``owner`` is gone, or when the returned function is called; once.

    Not at the end of the program: a thread may still be in a call that reads this memory, and the system takes it back.
    """
    finalizer = weakref.finalize(owner, free, *arguments)
    finalizer.atexit = False
    return finalizer


def _raise_errno(result: Any, function: Any, arguments: Any) -> Any:
    code = ctypes.get_errno()
    if code == 0:
        return result
    name = getattr(function, "__name__", "a native function")
    if code == errno.ENOMEM:
        raise MemoryError(f"{name}: not enough memory")
    if code == errno.EINVAL:
        raise ValueError(f"{name}: the arguments do not fit together")
    raise OSError(code, f"{name}: {os.strerror(code)}")


@functools.cache
def _loaded() -> NativeLibrary | str:
    """The library, or why there is none."""
    path = Path(os.environ.get(LIBRARY_VARIABLE) or _PATH)
    if not path.exists():
        return f"{path.name} is not built (python -m draftwise.kernels.cpu.build)"
    try:
        library = NativeLibrary(path)
    except OSError as error:  # made for another platform
        return f"{path.name} cannot be loaded: {error}"
    except ConfigError as error:
        # Users who choose torch have seen that error: look-ups and rules go without the library as models do.
        if os.environ.get(KERNELS_VARIABLE, "").lower() == "torch":
            return str(error)
        raise
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
        ConfigError: ``DRAFTWISE_ISA`` names nothing, or what this processor lacks.
    """
    loaded = _loaded()
    return loaded if isinstance(loaded, NativeLibrary) else None


def why_not_native() -> str | None:
    """The reason that `native_library` is None, for people; None when it is not."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None

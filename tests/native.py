"""The native library for tests: built when it is missing or its sources changed, skipped without a compiler.

``DRAFTWISE_TEST_ARM`` = a processor that qemu knows: the library built for ARM, on that processor (`tests.arm.remote`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftwise.kernels.cpu import build as builder
from draftwise.kernels.cpu import library as loader
from draftwise.kernels.cpu.levels import settle_level
from draftwise.kernels.cpu.library import LIBRARY_VARIABLE, Isa, NativeLibrary, native_library, why_not_native
from tests.arm import remote

ARM_VARIABLE = "DRAFTWISE_TEST_ARM"


@functools.cache
def _build() -> str | None:
    """Why the library could not be built, or None."""
    target = builder.SOURCES.parent / builder.LIBRARY
    try:
        builder.build(target, builder.object_cache())
    except builder.BuildError as error:
        return str(error)
    return None


def native_or_skip() -> NativeLibrary:
    """The library; skips the test without a compiler. A compiler that fails on our sources is a failure."""
    if os.environ.get(ARM_VARIABLE):
        return _arm_or_skip(os.environ[ARM_VARIABLE])
    if not os.environ.get(LIBRARY_VARIABLE):
        try:
            builder.find_compiler()
        except builder.BuildError as error:
            pytest.skip(str(error))
        failed = _build()
        assert failed is None, failed
    library = native_library()
    assert library is not None, why_not_native()
    return library


def _arm_or_skip(cpu: str) -> NativeLibrary:
    reason = remote.why_not()
    if reason is not None:
        pytest.skip(reason)
    other = os.environ.get(LIBRARY_VARIABLE)
    library = remote.library(cpu, Path(other).resolve() if other else None)
    loader._loaded = lambda: library  # for whoever asks the package
    return library


@contextmanager
def on_level(name: str) -> Iterator[None]:
    """``best``: the level that an engine would choose; or another one, for engines that are made inside, too."""
    settle_level(native_or_skip())  # an engine that is made inside does not choose again
    if name == "best":
        yield
        return
    with forced_isa(Isa[name.upper()]):
        yield


@contextmanager
def forced_isa(isa: Isa) -> Iterator[None]:
    """Kernels run on this instruction set inside; skips the test where the processor lacks it."""
    library = native_or_skip()
    if not library.supports(isa):
        pytest.skip(f"this processor has no {isa.name}")
    before = library.isa
    library.use_isa(isa)
    try:
        yield
    finally:
        library.use_isa(before)

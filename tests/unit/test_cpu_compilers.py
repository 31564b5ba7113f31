"""Libraries of two compilers compute the same bits, on every level of instructions."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native import native_or_skip

from draftwise.kernels.cpu import build
from draftwise.kernels.cpu.library import LIBRARY_VARIABLE

ROOT = Path(__file__).parents[2]
OTHERS = ("clang++", "clang++-19", "clang++-16", "clang++-14", "g++", "g++-12", "g++-11")
"""Where no library is named, that of the first of these that is there and not of the kind of the usual one is built."""
SECOND_VARIABLE = "DRAFTWISE_SECOND_LIBRARY"


def second_library(folder: Path) -> Path:
    named = os.environ.get(SECOND_VARIABLE)
    if named:
        return Path(named)
    usual = kind_of(build.find_compiler())
    for name in OTHERS:
        if shutil.which(name) and kind_of(name) != usual:
            return build.build(folder / build.LIBRARY, build.object_cache(name), compiler=name)
    pytest.skip("one kind of compiler is here")


def kind_of(compiler: str) -> str:
    version = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True).stdout
    return "clang" if "clang" in version else "gcc"


def fingerprints(library: Path) -> dict[str, dict[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fingerprints"],
        env={**os.environ, LIBRARY_VARIABLE: str(library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_same_bits_from_two_compilers(tmp_path: Path) -> None:
    one, other = (fingerprints(path) for path in (native_or_skip().path, second_library(tmp_path)))
    assert one.keys() == other.keys()
    different = [f"{isa}: {case}" for isa in one for case in one[isa] if one[isa][case] != other[isa][case]]
    assert not different, f"{len(different)} of {sum(map(len, one.values()))}: {different[:40]}"


def test_objects_of_compilers_stand_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    usual = build.object_cache()
    monkeypatch.setenv("CXX", "clang++-14")
    named = build.object_cache()
    monkeypatch.setenv("CXX", "python -m ziglang c++ -target x86_64-linux-gnu.2.28")
    assert len({usual, named, build.object_cache(), build.object_cache("thread")}) == 4
    assert usual.parent == named.parent


def test_the_library_has_the_suffix_of_the_compilers_system(tmp_path: Path) -> None:
    for macro, suffix in (("_WIN32", "dll"), ("__APPLE__", "dylib"), ("__linux__", "so")):
        compiler = tmp_path / f"c++-{suffix}"
        compiler.write_text(f"#!/bin/sh\necho '#define {macro} 1'\n")
        compiler.chmod(0o755)
        assert build.library_name(str(compiler)) == f"_native.{suffix}"
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(build.BuildError, match="no such thing"):
        build.library_name(str(broken))

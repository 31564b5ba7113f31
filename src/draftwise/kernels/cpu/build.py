"""Compile the native kernels: ``python -m draftwise.kernels.cpu.build``, and what ``pip install`` runs.

This file imports nothing of the package, so that ``setup.py`` can use it before the package can be imported. Every
source in ``csrc/`` is compiled on its own: ``*_avx512.cpp``, ``*_avx2.cpp`` and so on with the flags of that
instruction set (and only where the compiler has them), the others for the platform's baseline. The choice is made at
run time. The platform is the compiler's: ``CXX=aarch64-linux-gnu-g++`` makes a library for ARM on any machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
_SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
LIBRARY = "_native" + _SUFFIXES.get(sys.platform, ".so")
"""The library's name on this system."""

# -ffp-contract=off: a product and a sum are fused where the source says so and nowhere else, else two
# loops over the same numbers could round differently.
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-Wall", "-Wextra", "-Wno-unknown-warning-option", "-Wno-psabi",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # GCC 12 sees some in its own intrinsics
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512VNNI = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512"
)  # fmt: skip
_AVX512 = (*_AVX512VNNI, "-mavx512vbmi", "-mavx512bf16")
ISA_FLAGS = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512vnni": _AVX512VNNI,
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),  # told by the flags; tiles.h writes assembly
    "emulated": (),  # AMX on computed tiles
    "neon": (),  # every ARM of 64 bits has it
    "dotprod": ("-march=armv8.2-a+dotprod",),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
}  # fmt: skip
_OTHER_FLAGS = {
    "dotprod": ("-mcpu=generic+dotprod",),  # zig reads -march as the name of a processor; GCC needs it
    "i8mm": ("-mcpu=generic+dotprod+i8mm+bf16",),
}
_ARM_PROBES = {
    "neon": "",
    "dotprod": "int32x4_t f(int32x4_t a, int8x16_t b) { return vdotq_s32(a, b, b); }",
    "i8mm": "int32x4_t f(int32x4_t a, uint8x16_t b, int8x16_t c) { return vusmmlaq_s32(a, b, c); }\n"
    "float32x4_t g(float32x4_t a, bfloat16x8_t b) { return vbfdotq_f32(a, b, b); }",
}


class BuildError(Exception):
    """No compiler, or it failed; the message ends with what it said."""


def source_id(folder: Path = SOURCES) -> str:
    """A digest of the sources in a folder; the library carries that of what it was made from (``dw_source_id``)."""
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.h"), *folder.glob("*.cpp")), key=lambda path: path.name):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def find_compiler() -> str:
    """The C++ compiler: ``$CXX``, or the first of g++, clang++, c++ that is there.

    Raises:
        BuildError: There is none.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        if name and shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError(f"no C++ compiler found ({'CXX=' + wanted if wanted else 'g++, clang++ or c++'})")


def library_name(compiler: str) -> str:
    """The library's name on the system that a compiler makes code for.

    Raises:
        BuildError: It does not say.
    """
    command = [*shlex.split(compiler), "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr}".rstrip())
    macros = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("#define ")}
    system = "win32" if "_WIN32" in macros else "darwin" if "__APPLE__" in macros else "linux"
    return "_native" + _SUFFIXES.get(system, ".so")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())
    if done.stderr:
        print(done.stderr.rstrip(), file=sys.stderr)


def _flags_for(compiler: Sequence[str], isa: str) -> tuple[str, ...] | None:
    """The flags for code of an instruction set; None: the compiler has none (an old one may lack AVX512-BF16; one
    for ARM has none of Intel's)."""
    probe = "#include <immintrin.h>\n"
    if isa in _ARM_PROBES:
        probe = "#if !defined(__aarch64__)\n#error another processor\n#endif\n#include <arm_neon.h>\n"
        probe += f"{_ARM_PROBES[isa]}\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(probe)
        for flags in dict.fromkeys((ISA_FLAGS[isa], _OTHER_FLAGS.get(isa, ISA_FLAGS[isa]))):
            command = [*compiler, *flags, "-c", str(source), "-o", str(Path(folder, "probe.o"))]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return flags
    return None


def _files_of(source: Path) -> list[Path]:
    """A source and the headers beside it that it includes, by itself or through others, in the order of their names:
    what else changes does not make it be compiled again. An include behind an #if counts, too."""
    found, waiting = {source}, [source]
    while waiting:
        for name in re.findall(rb'^\s*#\s*include\s+"([^"]+)"', waiting.pop().read_bytes(), re.MULTILINE):
            header = source.parent / name.decode()
            if header not in found and header.is_file():
                found.add(header)
                waiting.append(header)
    return sorted(found)


def _isa_of(source: Path) -> str | None:
    suffix = source.stem.rpartition("_")[2]
    return suffix if suffix in ISA_FLAGS else None


def build(
    target: Path, objects: Path | None = None, *, sanitize: str | None = None, compiler: str | None = None
) -> Path:
    """Compile and link.

    Args:
        target: The library to write; replaced as a whole, so that a process that has it loaded is not disturbed.
        objects: Folder for object files, kept: sources that did not change are not compiled again. None: a
            temporary one.
        sanitize: What ``-fsanitize=`` takes, for an instrumented library.
        compiler: The command; None: `find_compiler`.

    Returns:
        ``target``.

    Raises:
        BuildError: No compiler, or it failed.
    """
    command = shlex.split(compiler or find_compiler())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if objects is None else objects
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            return _build(command, target, folder, sanitize)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One build in a folder at a time, in whatever processes: a second one waits, and finds what the first has made."""
    with open(folder / "lock", "w") as lock:
        try:
            import fcntl
        except ImportError:  # not POSIX
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def object_cache(kind: str | None = None) -> Path:
    """The folder for object files of these sources: each checkout has its own, and each compiler that ``$CXX`` names,
    or they would take each other's away. ``kind``: of builds that are made in another way."""
    if kind is None:
        kind = re.sub(r"[^a-z0-9.+]+", "-", os.environ.get("CXX", "").lower()).strip("-") or "plain"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "draftwise", "objects")
    return cache / hashlib.sha256(str(SOURCES).encode()).hexdigest()[:12] / kind


def _build(compiler: Sequence[str], target: Path, folder: Path, sanitize: str | None) -> Path:
    common = [*COMMON_FLAGS]
    if sanitize:
        common += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]  # what is found ends the process
        common += ["-fno-omit-frame-pointer", "-g", "-O1"]
    isa_flags = {isa: _flags_for(compiler, isa) for isa in ISA_FLAGS}
    common += [f"-DDW_HAVE_{isa.upper()}={int(flags is not None)}" for isa, flags in isa_flags.items()]
    sources = [
        path for path in sorted(SOURCES.glob("*.cpp")) if isa_flags.get(_isa_of(path) or "", ()) is not None
    ]

    def flags_of(source: Path) -> list[str]:
        isa = _isa_of(source)
        return [*common, *((isa_flags[isa] or ()) if isa else ())]

    def digest_of(source: Path) -> str:
        how = repr((compiler, flags_of(source))).encode()
        read = b"".join(path.read_bytes() for path in _files_of(source))
        return hashlib.sha256(how + read).hexdigest()[:16]

    # the library carries the digest of what it was made from: nothing to do if that did not change
    parts = repr([(path.name, digest_of(path)) for path in sources]).encode()
    identity = hashlib.sha256(parts).hexdigest()[:32]
    mark = f"draftwise-build:{identity}:{source_id()}".encode()
    if target.exists() and mark in target.read_bytes():
        return target

    def compile_one(source: Path) -> str:
        result = folder / f"{source.stem}-{digest_of(source)}.o"
        if not result.exists():
            for stale in folder.glob(f"{source.stem}-????????????????.o"):
                stale.unlink(missing_ok=True)
            partial = result.with_suffix(f".{os.getpid()}.o")
            _run([*compiler, *flags_of(source), "-c", str(source), "-o", str(partial)])
            partial.replace(result)
        return str(result)

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        compiled = list(threads.map(compile_one, sources))
    identity_source = folder / "identity.cpp"
    identity_source.write_text(
        '#include "compiler.h"\n'
        f'DW_EXPORT const char* dw_build_id() {{ return "{mark.decode()}"; }}\n'
        f'DW_EXPORT const char* dw_source_id() {{ return "{source_id()}"; }}\n'
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = [
        "-shared",
        "-fPIC",
        "-pthread",
        f"-I{SOURCES}",
        *([f"-fsanitize={sanitize}"] if sanitize else []),
    ]
    # beside the target, to be renamed; in a folder, for some linkers leave more files than they are asked for
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as beside:
        linked = Path(beside, target.name)
        _run([*compiler, *flags, "-o", str(linked), str(identity_source), *compiled])
        linked.replace(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m draftwise.kernels.cpu.build", description=__doc__)
    parser.add_argument("--output", type=Path, default=SOURCES.parent / LIBRARY, help="library to write")
    parser.add_argument(
        "--sanitize", choices=["address,undefined", "thread"], help="make an instrumented library"
    )
    options = parser.parse_args()
    try:
        built = build(options.output, object_cache(options.sanitize), sanitize=options.sanitize)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(built)
    return 0


if __name__ == "__main__":
    sys.exit(main())

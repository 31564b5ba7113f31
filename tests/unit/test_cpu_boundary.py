"""What crosses the border to native code: no exception, no stale library, no wrong argument (``python -O`` too)."""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native import native_or_skip

from draftwise.errors import ConfigError
from draftwise.kernels.cpu import (
    attention,
    blocks,
    book_drafts,
    build,
    chains,
    draws,
    experts,
    handles,
    library,
    medusa,
    pass_records,
    rounds,
    trees,
)
from draftwise.kernels.cpu.records import check_record
from draftwise.kv.manager import TableBook
from draftwise.propose.lookup import suffix_native
from draftwise.runner.rows import DrafterFill, RowBook
from draftwise.sampling.state import DRAW
from draftwise.sched.request import RequestBook

MIRRORS = {
    "AttentionCall": ctypes.sizeof(attention.AttentionCall),
    "BookDrafts": ctypes.sizeof(book_drafts.BookRecord),
    "BlockPlan": ctypes.sizeof(blocks.BlockPlan),
    "Correction": ctypes.sizeof(blocks.CorrectionStruct),
    "BatchView": ctypes.sizeof(attention.BatchView),
    "ChainKey": draws._CHAIN_KEY.size,
    "ChainOutput": ctypes.sizeof(chains.ChainOutput),
    "ExpertsSetting": ctypes.sizeof(experts.Setting),
    "FillBook": ctypes.sizeof(DrafterFill),
    "Guesses": ctypes.sizeof(rounds.GuessesRecord),
    "MedusaLayers": ctypes.sizeof(medusa.MedusaRecord),
    "PassInput": ctypes.sizeof(pass_records.PassInput),
    "ProgramOp": ctypes.sizeof(pass_records.Operation),
    "RequestBook": ctypes.sizeof(RequestBook),
    "RopeCall": ctypes.sizeof(handles.RopeCall),
    "Rounds": ctypes.sizeof(rounds.RoundsRecord),
    "RowBook": ctypes.sizeof(RowBook),
    "SlotPool": ctypes.sizeof(rounds.SlotPool),
    "SuffixDraft": ctypes.sizeof(suffix_native.DraftStruct),
    "SuffixLimits": ctypes.sizeof(suffix_native.LimitsStruct),
    "TableBook": ctypes.sizeof(TableBook),
    "TreeOutput": ctypes.sizeof(trees.TreeOutput),
    "TreeWish": trees.WISH.size,
    "VerifyDraw": DRAW.size,
}


def test_structures_are_as_large_as_the_native_ones() -> None:
    name_of = native_or_skip().function(
        "dw_layout", ctypes.c_char_p, [ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]
    )
    found = {}
    size = ctypes.c_int64()
    while (name := name_of(len(found), size)) is not None:
        found[name.decode()] = size.value
    assert found == MIRRORS


class Shifted(ctypes.Structure):
    """As large as `DrafterFill`, and its fields in another order."""

    _fields_ = (("drafts", ctypes.c_int64), ("tokens", ctypes.c_int64))


class Short(ctypes.Structure):
    _fields_ = (("tokens", ctypes.c_int64),)


class Wide(ctypes.Structure):
    _fields_ = (("tokens", ctypes.c_int32), ("drafts", ctypes.c_int64))


def test_fields_of_shared_records_lie_where_native_code_expects_them() -> None:
    library = native_or_skip()
    check_record(library, "FillBook", DrafterFill)
    check_record(library, "BookDrafts", book_drafts.BookRecord)
    for mirror, message in (
        (Shifted, "FillBook.tokens out at byte 0 .8 bytes., but Python expects drafts at byte 0"),
        (Short, "2 fields of FillBook, but Python has 1"),
        (Wide, "FillBook.tokens out at byte 0 .8 bytes., but Python expects tokens at byte 0 .4 bytes."),
    ):
        with pytest.raises(ConfigError, match=message):
            check_record(library, "FillBook", mirror)


def test_every_exported_function_is_guarded() -> None:
    exported = 0
    for source in build.SOURCES.glob("*.cpp"):
        for body in re.findall(r"^DW_EXPORT [^;{]*\{(.*?)^\}", source.read_text(), re.DOTALL | re.MULTILINE):
            exported += 1
            assert re.search(r"\bguarded\(\[", body), f"{source.name}: {body}"
    assert exported > 30


def compiled(folder: Path, name: str, *arguments: str) -> Path:
    try:
        compiler = shlex.split(build.find_compiler())
    except build.BuildError as error:
        pytest.skip(str(error))
    target = folder / name
    subprocess.run([*compiler, "-std=c++17", "-pthread", "-o", str(target), *arguments], check=True)
    return target


def test_tasks_that_throw(tmp_path: Path) -> None:
    sources = [str(build.SOURCES / name) for name in ("pool.cpp", "team.cpp", "isa.cpp")]
    test = compiled(
        tmp_path,
        "throwing",
        f"-I{build.SOURCES}",
        str(Path(__file__).parents[1] / "fakes/throwing.cpp"),
        *sources,
    )
    done = subprocess.run([str(test)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("identity", [None, "0123", ""])
def test_a_library_of_other_sources_is_refused(
    identity: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "stale.cpp"
    source.write_text(
        "" if identity is None else f'extern "C" const char* dw_source_id() {{ return "{identity}"; }}'
    )
    stale = compiled(tmp_path, "stale.so", "-shared", "-fPIC", str(source))
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(stale))
    library._loaded.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"not built from the sources.*python -m draftwise\.kernels\.cpu\.build"
        ):
            library.native_library()
        monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")  # what the error says
        library._loaded.cache_clear()
        assert library.native_library() is None
        assert "not built from the sources" in str(library.why_not_native())
    finally:
        library._loaded.cache_clear()


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    for name, text in (("a.h", "1"), ("b.cpp", "2"), ("notes.txt", "3")):
        (tmp_path / name).write_text(text)
    first = build.source_id(tmp_path)
    (tmp_path / "notes.txt").write_text("4")
    assert build.source_id(tmp_path) == first
    (tmp_path / "a.h").rename(tmp_path / "c.h")
    renamed = build.source_id(tmp_path)
    (tmp_path / "b.cpp").write_text("5")
    assert len({first, renamed, build.source_id(tmp_path)}) == 3


PREPARED = """
import ctypes, resource
from contextlib import contextmanager
import numpy as np, torch
from draftwise.kernels.cpu.library import native_library
from draftwise.kernels.cpu.linear import Epilogue, LinearKernels
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import TASK, ThreadPool
from draftwise.propose.lookup.suffix_native import NativeSuffixTree

torch.set_num_threads(1)
library = native_library()
pool = ThreadPool(library, 2)
kernels = LinearKernels(library, pool)

@contextmanager
def memory(spare):
    # No more address space than is in use now, and a little.
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def raises(error, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except error:
        return
    raise SystemExit(f"{function} did not raise {error.__name__}")
"""

NO_MEMORY = """
w, x = torch.randn(1024, 2048), torch.randn(2048, 2048)
out = torch.empty(2048, 1024)
with memory(1 << 20):
    raises(MemoryError, kernels.pack, w)
layer = kernels.pack(w)
with memory(1 << 20):
    raises(MemoryError, kernels.run, x, layer, out)
torch.testing.assert_close(kernels.run(x, layer, out), x @ w.T, rtol=1e-3, atol=1e-3)

crowd, done = ThreadPool(library, 64), []
task = TASK(lambda _, index, thread: done.append(index))
with memory(1 << 20):  # room for no thread's stack
    crowd.parallel_for(100, task)
assert sorted(done) == list(range(100))

many = np.random.default_rng(0).integers(0, 1000, 1_000_000).astype(np.int32)
tree = NativeSuffixTree(library, 32)
seq = tree.begin()
with memory(1 << 20):
    raises(MemoryError, tree.append, seq, many)
raises(MemoryError, tree.length, seq)  # half changed: it is used no more
tree = NativeSuffixTree(library, 32)
tree.append(tree.begin(), many[:1000])
tree.check()
"""

WRONG = """
assert not __debug__
ops = NativeOps(library, pool, torch.float32)
layer, x = kernels.pack(torch.randn(64, 32)), torch.randn(4, 32)
for wrong in (torch.randn(4, 31), torch.randn(4, 33), torch.randn(4, 32).bfloat16(), torch.randn(32, 4).T):
    raises(ValueError, kernels.run, wrong, layer)
raises(ValueError, kernels.run, x, layer, torch.empty(4, 63))
raises(ValueError, kernels.run, x, layer, torch.empty(4, 64, dtype=torch.float64))
raises(ValueError, kernels.run, x, layer, None, Epilogue.ADD)
raises(ValueError, kernels.run, x, layer, None, Epilogue.SILU_MUL)
raises(ValueError, kernels.pack, torch.randn(8, 8), torch.randn(7))
raises(ValueError, kernels.pack, torch.randn(7, 8), paired=True)
raises(ValueError, kernels.pack, torch.empty(0, 8))
raises(ValueError, ThreadPool, library, 0)
table = torch.randn(10, 4)
for bad in (-1, 10, 1 << 40):
    raises(ValueError, ops.embedding, torch.tensor([1, bad]), table)
raises(ValueError, ops.embedding, torch.tensor([1], dtype=torch.int32), table)
raises(ValueError, ops.rms_norm, torch.randn(2, 8), ops.pack_norm(torch.ones(7), 1e-6))
raises(ValueError, ops.silu_mul, torch.randn(2, 8).double())
from draftwise.kernels.base import HeadShape
heads, kv = HeadShape(2, 1, 8), (torch.zeros(16, 2, 8),)
rope = torch.zeros(3, 2, 4)
def write(slots, kv=kv, rope=rope):
    return ops.qkv_rope_write(torch.randn(3, 32), heads, rope, kv, torch.tensor(slots))
write([0, 15, 3])
for bad in ([0, 16, 1], [-1, 0, 1], [0, 1]):
    raises(ValueError, write, bad)
raises(ValueError, write, [0, 1, 2], (torch.zeros(16, 2, 4),))
raises(ValueError, write, [0, 1, 2], (torch.zeros(16, 2, 8, dtype=torch.int8),))
raises(ValueError, write, [0, 1, 2], (torch.zeros(16, 2, 8, dtype=torch.float8_e4m3fn),))
raises(ValueError, write, [0, 1, 2], kv, rope[:2])
tree = NativeSuffixTree(library, 8)
raises(ValueError, tree.append, tree.begin(), np.arange(4))
"""


@pytest.mark.parametrize(
    ("flags", "script"), [((), NO_MEMORY), (("-O",), WRONG)], ids=["memory", "arguments"]
)
def test_what_would_have_ended_the_process_raises(flags: tuple[str, ...], script: str) -> None:
    native_or_skip()
    done = subprocess.run(
        [sys.executable, *flags, "-c", PREPARED + script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

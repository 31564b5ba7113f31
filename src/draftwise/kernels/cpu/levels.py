"""Which level of instructions to use where the processor's flags do not say it all.

Two things are looked at, and what came of them is kept per processor and build in the user's cache folder:

- Tiles are used once they have given what other instructions give, in linear layers and in attention: exactly the same
  for int8, nearly the same for bfloat16.
- Products of pairs of bfloat16 are used where they are quicker than widening and multiplying floats. On Intel's
  Sapphire Rapids they run at half the speed, on Zen 4 at twice.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draftwise.cpus import model
from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.build import source_id
from draftwise.kernels.cpu.library import ISA_VARIABLE, Isa, NativeLibrary
from draftwise.kernels.cpu.linear import LinearKernels
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.probe import Probe
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import quantize
from draftwise.types import AttentionBatch

_WORTH = 0.9
"""Widening is preferred where pairs reach less than this part of its arithmetic."""
_ROUNDS = 20_000
"""Rounds of a measurement: about a millisecond."""


@dataclass(frozen=True, slots=True)
class Level:
    """``reason``: why this level and no other, for people."""

    isa: Isa
    reason: str


@dataclass(frozen=True, slots=True)
class Looks:
    """Facts about the machine; tests give their own. ``tiles_agree``: whether tiles compute what AVX-512 does.
    ``speeds``: operations per second of (float32, pairs of bfloat16)."""

    tiles_agree: Callable[[], bool]
    speeds: Callable[[], tuple[float, float]]


def choose_level(offered: tuple[Isa, ...], looks: Looks) -> Level:
    """The level to use of those that are offered, weakest first."""
    best = offered[-1]
    said = "the best that this processor and build offer"
    if best is Isa.AMX:
        if looks.tiles_agree():
            return Level(best, f"{said}; tiles compute what AVX-512 computes")
        offered = offered[:-1]
        best, said = offered[-1], "tiles do not compute what AVX-512 computes: they are not used"
    if best is Isa.AVX512 and Isa.AVX512VNNI in offered:
        floats, pairs = looks.speeds()
        figures = f"pairs of bfloat16 {pairs / 1e9:.0f} Gop/s, float32 {floats / 1e9:.0f} Gop/s, measured on one thread"
        if pairs < _WORTH * floats:
            return Level(Isa.AVX512VNNI, f"bfloat16 is quicker widened: {figures}")
        return Level(best, f"{said}; {figures}")
    return Level(best, said)


@functools.cache
def settle_level(library: NativeLibrary) -> Level:
    """Choose the level of a library and use it; as ``DRAFTWISE_ISA`` says, if it says something."""
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        return Level(library.isa, f"{ISA_VARIABLE}={forced}")
    folder = _cache_folder()
    path = None if folder is None else folder / "levels.json"
    key = f"{model().name}, {source_id()}"
    known = {} if path is None else _read(path)
    if key in known and known[key][0] in {isa.name for isa in library.isas}:
        level = Level(Isa[known[key][0]], known[key][1])
    else:
        level = choose_level(library.isas, _looks(library))
        if path is not None:
            _write(path, {**known, key: [level.isa.name, level.reason]})
    library.use_isa(level.isa)
    return level


def _looks(library: NativeLibrary) -> Looks:
    return Looks(functools.partial(_tiles_agree, library), functools.partial(_speeds, library))


def _tiles_agree(library: NativeLibrary) -> bool:
    return linear_agrees(library, Isa.AMX, Isa.AVX512) and attention_agrees(library, Isa.AMX, Isa.AVX512)


def linear_agrees(library: NativeLibrary, tiles: Isa, vectors: Isa) -> bool:
    """Whether tiles give what vectors give, for a layer with tails in every direction."""
    generator = torch.Generator().manual_seed(1)
    kernels = LinearKernels(library, ThreadPool(library, 1))
    weight = torch.randn(70, 300, generator=generator).to(torch.bfloat16)
    rows = torch.randn(19, 300, generator=generator).to(torch.bfloat16)
    schemes = {name: parse_scheme(name) for name in ("int8_dynamic", "int4_dynamic")}
    packed = [
        kernels.pack(weight),
        *(kernels.pack_quantized(quantize(weight.float(), s), None, dynamic=True) for s in schemes.values()),
    ]
    plain, tiled = _on_both(
        library, tiles, vectors, lambda: [kernels.run(rows, one, dtype=torch.float32) for one in packed]
    )
    exact = all(torch.equal(a, b) for a, b in zip(plain[1:], tiled[1:], strict=True))
    return exact and bool(torch.allclose(plain[0], tiled[0], rtol=1e-3, atol=1e-3))


def attention_agrees(library: NativeLibrary, tiles: Isa, vectors: Isa) -> bool:
    """Whether tiles give what vectors give: a prompt, one row behind more than a partition, and a tree; heads that fill
    whole chunks of dimensions and heads that do not."""
    generator = torch.Generator().manual_seed(2)
    attention = NativeAttention(library, ThreadPool(library, 1))
    batch = AttentionBatch(
        query_start_np=np.array([0, 40, 41, 45], np.int32),
        context_len_np=np.array([0, 299, 45], np.int32),
        is_tree_np=np.array([False, False, True]),
        block_tables_np=np.random.default_rng(3).permutation(57).astype(np.int32).reshape(3, 19),
        ancestors_np=np.array([*[0] * 41, 0b1, 0b11, 0b101, 0b1011], np.uint64),
        block_size=16,
    )
    cases = []
    for heads, kv_heads, dim in ((8, 2, 64), (3, 1, 40)):
        q = torch.randn(45, heads, dim, generator=generator).to(torch.bfloat16)
        kv = torch.randn(57 * 16, 2 * kv_heads, dim, generator=generator).to(torch.bfloat16)
        cases.append((q, kv, kv_heads))
    plain, tiled = _on_both(
        library,
        tiles,
        vectors,
        lambda: [attention.run(q, (kv,), batch, num_kv_heads=heads, scale=0.2) for q, kv, heads in cases],
    )
    return all(
        torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-4) for a, b in zip(plain, tiled, strict=True)
    )


def _on_both(
    library: NativeLibrary, tiles: Isa, vectors: Isa, run: Callable[[], list[torch.Tensor]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results on vectors, and on tiles."""
    before = library.isa
    results = []
    try:
        for isa in (vectors, tiles):
            library.use_isa(isa)
            results.append(run())
    finally:
        library.use_isa(before)
    return results[0], results[1]


def _speeds(library: NativeLibrary) -> tuple[float, float]:
    """Medians of three, in turns."""
    probe = Probe(library, ThreadPool(library, 1))
    before = library.isa
    try:
        library.use_isa(Isa.AVX512)
        turns = [[probe.arithmetic(kind, _ROUNDS) for kind in ("float32", "bfloat16")] for _ in range(3)]
    finally:
        library.use_isa(before)
    floats, pairs = (sorted(column)[1] for column in zip(*turns, strict=True))
    return floats, pairs


# ------------------------------------------------------------------------------------------------ what is kept


def _cache_folder() -> Path | None:
    """None: there is no home (a container's user that no file names)."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "draftwise")
    except RuntimeError:
        return None


def _read(path: Path) -> dict[str, list[str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, list) and len(value) == 2}


def _write(path: Path, known: dict[str, list[str]]) -> None:
    """Whole or not at all: several processes may begin at once. Where there is no place for it, the next one looks
    again."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only file system refuses this, too
            partial.unlink()

"""Which level of instructions is used, and tiles against everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.native import forced_isa, native_or_skip

from draftwise.kernels.cpu import levels
from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.levels import Level, Looks, choose_level, settle_level
from draftwise.kernels.cpu.library import ISA_VARIABLE, Isa
from draftwise.kernels.cpu.linear import LinearKernels
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import quantize

ALL = (Isa.PORTABLE, Isa.AVX2, Isa.AVX512VNNI, Isa.AVX512, Isa.AMX)


def looks(agree: bool = True, floats: float = 220e9, pairs: float = 440e9) -> Looks:
    return Looks(lambda: agree, lambda: (floats, pairs))


def test_tiles_are_used_where_they_compute_the_same() -> None:
    assert choose_level(ALL, looks()).isa is Isa.AMX
    refused = choose_level(ALL, looks(agree=False))
    assert refused.isa is Isa.AVX512


def test_pairs_are_used_where_they_are_quicker() -> None:
    """The second line is a Sapphire Rapids without tiles."""
    assert choose_level(ALL[:4], looks(floats=120e9, pairs=230e9)).isa is Isa.AVX512
    slow = choose_level(ALL[:4], looks(floats=220e9, pairs=106e9))
    assert slow.isa is Isa.AVX512VNNI and "106 Gop/s" in slow.reason and "220 Gop/s" in slow.reason


def test_other_levels_need_no_look() -> None:
    def unwanted() -> tuple[float, float]:
        raise AssertionError("measured")

    assert choose_level(ALL[:2], Looks(lambda: False, unwanted)).isa is Isa.AVX2
    assert choose_level(ALL[:3], Looks(lambda: False, unwanted)).isa is Isa.AVX512VNNI
    arm = (Isa.PORTABLE, Isa.NEON, Isa.DOTPROD, Isa.I8MM)
    for isa in arm:
        assert choose_level(arm[: arm.index(isa) + 1], Looks(lambda: False, unwanted)).isa is isa


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    settle_level.cache_clear()
    yield tmp_path / "draftwise" / "levels.json"
    settle_level.cache_clear()


def test_what_was_found_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_or_skip()
    before = library.isa
    try:
        asked = []

        def choose(offered: tuple[Isa, ...], looks: Looks) -> Level:
            asked.append(offered)
            return Level(Isa.PORTABLE, "for a test")

        monkeypatch.setattr(levels, "choose_level", choose)
        assert settle_level(library) == Level(Isa.PORTABLE, "for a test")
        assert library.isa is Isa.PORTABLE and cache.is_file()
        settle_level.cache_clear()  # another process
        assert settle_level(library).reason == "for a test" and len(asked) == 1
        cache.write_text("{broken")
        settle_level.cache_clear()
        assert settle_level(library).isa is Isa.PORTABLE and len(asked) == 2
        monkeypatch.setenv(ISA_VARIABLE, "portable")
        settle_level.cache_clear()
        assert settle_level(library).reason == "DRAFTWISE_ISA=portable" and len(asked) == 2
    finally:
        library.use_isa(before)


def test_measured_here(cache: Path) -> None:
    library = native_or_skip()
    before = library.isa
    try:
        level = settle_level(library)
        assert library.isa is level.isa and level.isa in library.isas
    finally:
        library.use_isa(before)


def test_without_a_place_to_keep_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that cannot be, a file system that is read only, a user without a home."""
    library = native_or_skip()
    before = library.isa
    monkeypatch.setattr(levels, "choose_level", lambda *_: Level(Isa.PORTABLE, "for a test"))

    def refused(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    try:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/there/is/none")
        assert settle_level(library).reason == "for a test"
        settle_level.cache_clear()
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
            for call in ("mkdir", "write_text", "unlink"):
                patch.setattr(Path, call, refused)
            assert settle_level(library).reason == "for a test"
        settle_level.cache_clear()
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
        assert settle_level(library).reason == "for a test"
    finally:
        library.use_isa(before)


def test_tiles_are_looked_at_in_linear_layers_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """With computed tiles; then with ones that go wrong, which nothing else may hide."""
    library = native_or_skip()
    if not library.supports(Isa.EMULATED):
        pytest.skip("tiles are computed on x86 only")
    before = library.isa
    assert levels.attention_agrees(library, Isa.EMULATED, Isa.PORTABLE)
    assert levels.linear_agrees(library, Isa.EMULATED, Isa.EMULATED)
    assert library.isa is before

    def spoiled(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrong(*arguments: Any, **named: Any) -> torch.Tensor:
            out = run(*arguments, **named)
            if library.isa is Isa.EMULATED:
                out[-1, -1] += 0.25
            return out

        return wrong

    monkeypatch.setattr(NativeAttention, "run", spoiled(NativeAttention.run))
    monkeypatch.setattr(LinearKernels, "run", spoiled(LinearKernels.run))
    assert not levels.attention_agrees(library, Isa.EMULATED, Isa.PORTABLE)
    assert not levels.linear_agrees(library, Isa.EMULATED, Isa.PORTABLE)
    asked: list[str] = []
    monkeypatch.setattr(levels, "linear_agrees", lambda *_: asked.append("linear") or True)
    monkeypatch.setattr(levels, "attention_agrees", lambda *_: asked.append("attention"))
    assert not levels._tiles_agree(library) and asked == ["linear", "attention"]


@pytest.mark.parametrize("name", ["int8_dynamic", "int4_dynamic_g32", "int4_dynamic"])
@pytest.mark.parametrize("isa", [isa for isa in Isa if isa not in (Isa.PORTABLE, Isa.EMULATED)])
def test_integers_are_the_same_on_every_level(isa: Isa, name: str) -> None:
    """Sums of int8_dynamic are exact, and its way out is two products. Groups of int4 are summed in floats, with fused
    products or without."""
    library = native_or_skip()
    kernels = LinearKernels(library, ThreadPool(library, 2))
    generator = torch.Generator().manual_seed(7)
    scheme = parse_scheme(name)
    weight = quantize(torch.randn(70, 4100, generator=generator) * 0.02, scheme)
    x = torch.randn(45, 4100, generator=generator).to(torch.bfloat16)
    packed = kernels.pack_quantized(weight, None, dynamic=True)
    with forced_isa(Isa.PORTABLE):
        want = kernels.run(x, packed, dtype=torch.float32)
    with forced_isa(isa):
        got = kernels.run(x, packed, dtype=torch.float32)
    if name == "int8_dynamic":
        assert torch.equal(got, want)
    else:
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [64, 100, 2050])
def test_every_height_of_a_tile_has_the_same_bits(inputs: int) -> None:
    """1 to 32 rows in one or two tiles, 33 and more in several; the last chunk of k is not whole."""
    library = native_or_skip()
    kernels = LinearKernels(library, ThreadPool(library, 1))
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(40, inputs, generator=generator).to(torch.bfloat16)
    x = torch.randn(70, inputs, generator=generator).to(torch.bfloat16)
    packed = kernels.pack(weight)
    with forced_isa(Isa.EMULATED):
        whole = kernels.run(x, packed, dtype=torch.float32)
        for rows in range(1, 70):
            assert torch.equal(kernels.run(x[:rows], packed, dtype=torch.float32), whole[:rows]), rows
        assert torch.allclose(whole, x.float() @ weight.float().t(), rtol=1e-3, atol=1e-2)

"""The native library built for ARM, under qemu: the tests of the kernels that run here, on a processor of each level.

No test here says anything about speed, and no ARM processor has run this code.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.arm import remote
from tests.native import ARM_VARIABLE, native_or_skip

from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.linear import LinearKernels
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import QuantizedWeight, quantize, quantize_rows

REASON = remote.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(ARM_VARIABLE in os.environ, reason="these tests begin such runs"),
]
FILES = (
    "cpu_linear", "cpu_linear_quantized", "cpu_levels", "cpu_attention", "cpu_attention_whole", "cpu_experts",
    "cpu_mxfp4", "cpu_ops", "cpu_verify", "cpu_program", "cpu_trees", "latent",
)  # fmt: skip
FORMATS = ("float32", "bfloat16", "int8", "int8_dynamic", "int4_g32", "int4_dynamic_g32")
SOME = (
    "cpu_attention.py::test_equals_the_oracle[neon-(4, 2, 64)-7-float32]",
    "cpu_attention.py::test_equals_the_oracle[neon-(6, 2, 12)-None-bfloat16]",
    "cpu_attention.py::test_equals_the_oracle[neon-(4, 4, 80)-300-bfloat16]",
    "cpu_attention.py::test_caches_of_other_types[neon-(4, 2, 64)-2.5-torch.float32-torch.int8]",
    "cpu_attention.py::test_caches_of_other_types[neon-(6, 2, 12)-None-torch.bfloat16-torch.float16]",
    "cpu_attention.py::test_tree_paths_have_the_bits_of_chains[neon-250-20-bfloat16]",
    "cpu_attention.py::test_tree_paths_have_the_bits_of_chains[neon-5-None-float32]",
    "cpu_attention.py::test_same_bits_over_caches_of_other_types[neon-float32-torch.int8]",
    "cpu_attention.py::test_one_request_split_over_threads_has_the_same_bits[neon]",
    "cpu_verify.py::test_decides_like_torch[64-neon]",
    "cpu_verify.py::test_noise_is_that_of_the_module[neon]",
    "cpu_boundary.py::test_structures_are_as_large_as_the_native_ones",
)
"""Of the tests of attention and verification, whose vectors are the same on every level."""

LAYERS = (
    "cpu_experts.py::test_value_and_bits[i8mm-bfloat16]",
    "cpu_experts.py::test_value_and_bits[i8mm-int8_dynamic]",
    "cpu_experts.py::test_value_and_bits[i8mm-int4_dynamic]",
    "cpu_experts.py::test_what_no_row_chose_is_not_read[i8mm]",
    "cpu_mxfp4.py::test_products_are_those_of_the_numbers[i8mm-33-4-16-kept]",
    "cpu_mxfp4.py::test_products_are_those_of_the_numbers[i8mm-33-4-16-rounded]",
    "cpu_mxfp4.py::test_gate_and_up[i8mm-kept]",
    "cpu_attention_whole.py::test_same_bits_alone_and_on_threads[bfloat16-i8mm]",
    "cpu_attention_whole.py::test_native_equals_torch[(6, 2, 12)-7-float32-i8mm]",
    "latent.py::test_attention[i8mm-5-24-torch.bfloat16-torch.bfloat16]",
    "latent.py::test_a_layer_for_each_head[i8mm-torch.bfloat16]",
)
"""Of the tests of experts, floats of four bits, blocks that see themselves, and latent attention."""


def either(tests: tuple[str, ...]) -> str:
    """An expression that chooses the files of these tests."""
    return " or ".join(sorted({test.partition(".")[0] for test in tests}))


def run_tests(cpu: str, tests: tuple[str, ...], chosen: str = "") -> None:
    """Tests of the kernels (what stands behind ``test_``) with this processor's library."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [*command, *(f"{folder}/test_{name}" for name in tests)],
        env={**os.environ, ARM_VARIABLE: cpu},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "100%" in done.stdout, done.stdout


@pytest.mark.parametrize("cpu", remote.PROCESSORS)
def test_levels(cpu: str) -> None:
    best = Isa[remote.PROCESSORS[cpu].upper()]
    library = remote.library(cpu)
    offered = [Isa.PORTABLE, Isa.NEON, Isa.DOTPROD, Isa.I8MM]
    assert library.isas == tuple(offered[: offered.index(best) + 1])
    assert library.best_isa is best and not library.supports(Isa.EMULATED)


@pytest.mark.parametrize("cpu", remote.PROCESSORS)
def test_integers_are_those_of_other_processors(cpu: str) -> None:
    """Rows of int8_dynamic are rounded and summed in integers, and what follows are products: the same bits as here."""
    generator = torch.Generator().manual_seed(7)
    weight = quantize(torch.randn(70, 300, generator=generator) * 0.02, parse_scheme("int8_dynamic"))
    weight.codes[3, :9] = -128
    x = torch.randn(19, 300, generator=generator).to(torch.bfloat16)
    bias = torch.randn(70, generator=generator)
    here, there = native_or_skip(), remote.library(cpu)
    results = []
    for library in (here, there):
        kernels = LinearKernels(library, ThreadPool(library, 2))
        packed = kernels.pack_quantized(weight, bias, dynamic=True)
        results.append([kernels.run(x[:rows], packed, dtype=torch.float32) for rows in range(1, 20)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("cpu", "name"),
    [  # products of floats are the same with and without SDOT (below)
        pytest.param(
            cpu, name, marks=pytest.mark.slow if cpu == "neoverse-n1" and "dynamic" not in name else []
        )
        for cpu in remote.PROCESSORS
        for name in FORMATS
    ],
)
def test_linear(cpu: str, name: str) -> None:
    """Near the exact product, and the same bits for any number of rows and threads, where nothing is a whole number of
    panels, units, groups or tiles."""
    library = remote.library(cpu)
    one, many = (LinearKernels(library, ThreadPool(library, threads)) for threads in (1, 3))
    generator = torch.Generator().manual_seed(3)
    # the last one is cut into blocks of k
    for outputs, inputs in ((5, 3), (33, 40), (70, 301), (33, 8201 if "dynamic" in name else 2101)):
        weight = torch.randn(outputs, inputs, generator=generator) * 0.02
        bias = torch.randn(outputs, generator=generator) * 0.02
        x = torch.randn(32, inputs, generator=generator).to(torch.bfloat16)
        exact = x.double()
        if name in ("float32", "bfloat16"):
            dtype = getattr(torch, name)
            x = x.to(dtype)
            packed = one.pack(weight.to(dtype), bias)
            held = weight.to(dtype).double()
        else:
            scheme = parse_scheme(name)
            quantized = quantize(weight, scheme)
            if scheme.bits == 4:
                zeros = torch.randint(0, 16, quantized.scales.shape, generator=generator, dtype=torch.uint8)
                quantized = QuantizedWeight(4, quantized.codes, quantized.scales, zeros, quantized.group)
            packed = one.pack_quantized(quantized, bias, dynamic=scheme.dynamic)
            held = quantized.dequantize().double()
            if scheme.dynamic:
                codes, scales = quantize_rows(x)
                exact = codes.double() * scales.double()[:, None]
        got = one.run(x, packed, dtype=torch.float32)
        want = exact @ held.t() + bias.double()
        assert float((got.double() - want).norm() / want.norm()) < 1e-5, (outputs, inputs)
        for rows in range(1, 18):
            assert torch.equal(one.run(x[:rows], packed, dtype=torch.float32), got[:rows]), rows
        for rows in (1, 5, 32):
            assert torch.equal(many.run(x[32 - rows :], packed, dtype=torch.float32), got[32 - rows :]), rows


def test_floats_have_the_same_bits_on_every_level_but_for_pairs() -> None:
    """Where bfloat16 is widened, or nothing is rounded to it, the lanes' sums are those of NEON."""
    generator = torch.Generator().manual_seed(4)
    weight, x = torch.randn(70, 301, generator=generator), torch.randn(9, 301, generator=generator)
    library = remote.library("max")
    kernels = LinearKernels(library, ThreadPool(library, 1))
    wide, narrow = kernels.pack(weight), kernels.pack(weight.to(torch.bfloat16))
    results = {}
    for isa in (Isa.NEON, Isa.DOTPROD, Isa.I8MM):
        library.use_isa(isa)
        results[isa] = kernels.run(x, wide), kernels.run(x.to(torch.bfloat16), narrow, dtype=torch.float32)
    assert torch.equal(results[Isa.NEON][0], results[Isa.I8MM][0])
    assert all(torch.equal(a, b) for a, b in zip(results[Isa.NEON], results[Isa.DOTPROD], strict=True))
    assert not torch.equal(results[Isa.NEON][1], results[Isa.I8MM][1]), "BFDOT is not used"


def test_probes_count_what_they_do() -> None:
    for cpu, products in (("cortex-a72", (4, 4, 16)), ("neoverse-n1", (4, 4, 16)), ("max", (4, 8, 32))):
        library = remote.library(cpu)
        pool = ThreadPool(library, 2)
        count = library.function(
            "dw_probe_arithmetic", ctypes.c_int64, [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
        )
        assert [count(pool.pointer, kind, 10) for kind in range(3)] == [2 * 10 * 16 * 2 * n for n in products]


def test_hot_loops_are_vector_code() -> None:
    """Which instructions of interest stand in which function; a compiler that makes loops over single numbers of the
    vector layer, or folds the chains of a probe into one, is noticed here and not by any result."""
    path, _ = remote.build()
    text = subprocess.run(
        [remote.DUMP, "-dC", "--no-show-raw-insn", path], capture_output=True, text=True, check=True
    )
    found: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in text.stdout.splitlines():
        if line.endswith(">:"):
            counts = found.setdefault(line.partition("<")[2][:-2], Counter())
        elif (instruction := re.match(r"\s+[0-9a-f]+:\s+(\w+)", line)) is not None:
            counts[instruction[1]] += 1
    plain = ("tile_plain", "tile_grouped", "finish_plain")
    single = [name for name, counts in found.items() if counts["fmadd"] and not any(p in name for p in plain)]
    assert not single
    assert not any("fmaf" in name for name in found), "called for want of an instruction"
    wanted = {
        "fmla": ("score_rows<", "add_values_rows<", "rms_norm_rows<", "weights_row", "gumbel_row", "span<"),
        "bfdot": ("span<", "arithmetic<1>"),
        "sdot": ("bytes_i8<", "bytes_i4_of<", "arithmetic<2>"),
        "usdot": ("bytes_i8<1>", "bytes_i4_of<1, false>", "bytes_i4_of<1, true>"),
        "usmmla": ("matrix_i8<", "matrix_i4_of<", "arithmetic<2>"),
        "smull": ("bytes_i8<", "bytes_i4_of<", "arithmetic<2>"),
    }
    for instruction, names in wanted.items():
        for name in names:
            most = max((counts[instruction] for one, counts in found.items() if name in one), default=0)
            assert most >= (16 if "arithmetic" in name else 4), (instruction, name, most)


def test_row_operations_attention_and_verification() -> None:
    """The vectors that every level has. One process for all of them: to begin one takes longer than most tests."""
    operations = "neon and not -1030] and not -48] and not -16] and not -1]"  # two widths of six
    run_tests("cortex-a72", ("cpu_ops.py", *SOME), f"{either(SOME)} or ({operations})")


def test_ways_out_of_linear_layers_and_layers_of_newer_models() -> None:
    """What the products of the newest level are used for, in one process."""
    ways = "add_is or silu or special or strided or epilogues or rows_of_zeros or float32_rows or zero_points"
    files = ("cpu_linear.py", "cpu_linear_quantized.py")
    run_tests("max", (*files, *LAYERS), f"{either(LAYERS)} or (i8mm and ({ways}))")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cpu", remote.PROCESSORS)
def test_kernels(cpu: str, name: str) -> None:
    """Every test of the kernels at every level that the processor has."""
    run_tests(cpu, (f"{name}.py",), "not one_text")  # that one is an engine, and there is none under qemu

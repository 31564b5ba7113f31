"""The native library built for ARM, under qemu: the tests of the kernels that run here, on a processor of each level.

No test here says anything about speed, and no ARM processor has run this code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.arm import remote
from tests.native import ARM_VARIABLE, native_or_skip

from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.linear import LinearKernels
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import quantize

REASON = remote.why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(ARM_VARIABLE in os.environ, reason="these tests begin such runs"),
]
FILES = ("linear", "linear_quantized", "levels", "attention", "ops", "verify", "program", "trees")


def run_tests(cpu: str, files: tuple[str, ...], chosen: str) -> None:
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [*command, *(str(folder / f"test_cpu_{name}.py") for name in files)],
        env={**os.environ, ARM_VARIABLE: cpu},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


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


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cpu", remote.PROCESSORS)
def test_kernels(cpu: str, name: str) -> None:
    """Every test of the kernels at every level that the processor has."""
    run_tests(cpu, (name,), "not slow")

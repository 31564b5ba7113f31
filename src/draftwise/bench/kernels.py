"""Native linear layers of a model's shape against the machine's roofline: what a pass over 1, 2, ... rows costs.

The roofline of a pass is the larger of (bytes it must read / read bandwidth) and (operations / peak of the unit that
does them), both measured in the same run, between the passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.levels import settle_level
from draftwise.kernels.cpu.library import native_library, why_not_native
from draftwise.kernels.cpu.linear import LinearKernels, NativeLinear
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.probe import Probe
from draftwise.quantization.scheme import Scheme, parse_scheme
from draftwise.quantization.weights import E2M1, QuantizedWeight

FORMATS = ("bfloat16", "int8", "int4", "int8_weight_only", "int4_weight_only", "float32")
FP4 = {"nvfp4": 16, "mxfp4": 32, "nvfp4_dynamic": 16, "mxfp4_dynamic": 32}
"""Formats of checkpoints alone, which no `Scheme` rounds to: so many numbers share a scale. ``_dynamic``: over rows
rounded to int8."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model; the default is TinyLlama's, 1.1 billion parameters."""

    hidden: int = 2048
    inner: int = 5632
    layers: int = 22
    heads: int = 32
    kv_heads: int = 4
    vocab: int = 32000

    def layer(self) -> list[tuple[int, int, bool]]:
        """The linear layers of a decoder layer: (outputs, inputs, gate and up)."""
        dim = self.hidden // self.heads
        return [
            ((self.heads + 2 * self.kv_heads) * dim, self.hidden, False),
            (self.hidden, self.heads * dim, False),
            (2 * self.inner, self.hidden, True),
            (self.hidden, self.inner, False),
        ]

    def linear_weights(self) -> int:
        """Weights of all linear layers, the head included."""
        return self.layers * sum(n * k for n, k, _ in self.layer()) + self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One format at one number of rows. Times in seconds, medians; ``against_one``: ratio to the pass of one row."""

    format: str
    rows: int
    seconds: float  # of the linear layers of a whole pass
    read_rate: float  # bytes of weights per second
    operation_rate: float  # operations per second
    roofline: float  # seconds that the roofline allows
    share: float  # roofline / seconds
    against_one: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class KernelReport:
    """``bandwidth`` in bytes per second, ``peaks`` in operations per second by dtype: medians over the run."""

    isa: str
    threads: int
    bandwidth: float
    peaks: dict[str, float]
    rows: list[KernelRow]


class _Model:
    """The packed weights of a few layers, in one format; enough that no cache holds them."""

    def __init__(self, kernels: LinearKernels, shape: Shape, name: str, layers: int) -> None:
        floats = name in ("bfloat16", "float32") or name in FP4
        self.scheme: Scheme | None = None if floats else parse_scheme(name)
        self._dynamic = (
            name.endswith("_dynamic") if floats else self.scheme is not None and self.scheme.dynamic
        )
        self.dtype = torch.float32 if name == "float32" else torch.bfloat16
        self.kernels = kernels
        generator = torch.Generator().manual_seed(0)
        self.weights: list[NativeLinear] = []
        for outputs, inputs, paired in shape.layer():
            source = torch.randn(outputs, inputs, generator=generator).mul_(0.02).to(self.dtype)
            if name in FP4:
                codes = _fp4(outputs, inputs, FP4[name], generator)
                self.weights += [
                    kernels.pack_quantized(codes, dynamic=self._dynamic, paired=paired) for _ in range(layers)
                ]
            else:
                self.weights += [
                    kernels.pack_as(source, None, self.scheme, paired=paired) for _ in range(layers)
                ]
        self.weights = [w for i in range(layers) for w in self.weights[i::layers]]  # layer by layer
        self.num_weights = sum(w.outputs * w.inputs for w in self.weights)
        self.bytes = sum(w.bytes for w in self.weights)

    @property
    def unit(self) -> str:
        """The unit that does the arithmetic."""
        if self.dtype is torch.float32:
            return "float32"
        return "int8" if self._dynamic else "bfloat16"

    def buffers(self, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """An input and an output of every linear layer held; made before anything is timed, because threads of torch
        that have just worked keep spinning on a core for a while."""
        generator = torch.Generator().manual_seed(rows)
        return [
            (
                torch.randn(rows, w.inputs, generator=generator).to(self.dtype),
                torch.empty(rows, w.outputs, dtype=self.dtype),
            )
            for w in self.weights
        ]

    def run(self, buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        start = time.perf_counter()
        for (x, out), weight in zip(buffers, self.weights, strict=False):
            self.kernels.run(x, weight, out)
        return time.perf_counter() - start


def _fp4(outputs: int, inputs: int, group: int, generator: torch.Generator) -> QuantizedWeight:
    """Any numbers of a format of `FP4`: they all take the same time."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.full((outputs, -(-inputs // group)), 0.01)
    return QuantizedWeight(4, codes, scales, group=group, levels=E2M1)


def bench_kernels(
    *,
    formats: Sequence[str] = FORMATS[:5],
    rows: Sequence[int] = (1, 2, 4, 6, 8, 16, 64),
    threads: int | None = None,
    rounds: int = 15,
    layers: int = 3,
    shape: Shape | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> KernelReport:
    """Time passes, all formats and row counts in turn each round, with the rooflines measured in between.

    Args:
        formats: From `FORMATS` and `FP4`; int4 ones also with a group size.
        rows: Row counts; 1 is added.
        threads: None: as many as torch uses.
        layers: Decoder layers that are held; times are scaled to the shape's whole model.
        advance: Called after each measurement with what was measured.

    Raises:
        ConfigError: There is no native library, or a format is unknown.
    """
    library = native_library()
    if library is None:
        raise ConfigError(f"no native kernels: {why_not_native()}")
    settle_level(library)
    shape = shape or Shape()
    pool = ThreadPool(library, threads or torch.get_num_threads())
    kernels, probe = LinearKernels(library, pool), Probe(library, pool)
    counts = sorted({1, *rows})
    models = {name: _Model(kernels, shape, name, layers) for name in formats}
    buffers = {(name, n): model.buffers(n) for name, model in models.items() for n in counts}
    bandwidth: list[float] = []
    peaks: dict[str, list[float]] = {model.unit: [] for model in models.values()}
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in formats for n in counts}
    largest = max(models.values(), key=lambda model: model.bytes)
    for turn in range(rounds + 1):
        for unit, found in peaks.items():
            found.append(probe.arithmetic(unit))
        for name, model in models.items():
            bandwidth.append(probe.read_weights(largest.weights))
            for n in counts if turn % 2 else reversed(counts):
                model.run(buffers[name, n][:1])  # the pool's threads are awake
                times[name, n].append(model.run(buffers[name, n]))
                advance(f"{name}, {n} rows")
        if turn == 0:  # warming up
            bandwidth.clear()
            for series in (*peaks.values(), *times.values()):
                series.clear()
    read = statistics.median(bandwidth)
    top = {unit: statistics.median(found) for unit, found in peaks.items()}
    result = []
    for name, model in models.items():
        whole = shape.linear_weights() / model.num_weights  # a whole pass, in units of what was run
        one = statistics.median(times[name, 1])
        for n in counts:
            seconds = statistics.median(times[name, n])
            operations = 2 * n * model.num_weights
            roofline = max(model.bytes / read, operations / top[model.unit])
            result.append(
                KernelRow(
                    format=name,
                    rows=n,
                    seconds=seconds * whole,
                    read_rate=model.bytes / seconds,
                    operation_rate=operations / seconds,
                    roofline=roofline * whole,
                    share=roofline / seconds,
                    against_one=None if n == 1 else seconds / one,
                )
            )
    return KernelReport(library.isa.name.lower(), pool.threads, read, top, result)

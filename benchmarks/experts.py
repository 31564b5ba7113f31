"""Experts on a CPU: what a pass over 1, 2, 4 and 8 rows takes, against reading the weights of the experts that it hits.

    python benchmarks/experts.py [--threads 2] [--rounds 15] [--hidden 1024 --inner 512 --experts 64 --top-k 8]

Several layers of random experts, more than any cache holds, and rows with random scores. Everything takes turns in one
process: reading a large layer (what the memory gives), the passes of every number of rows, and the same rows one after
the other. Medians are printed: milliseconds per layer, the bytes of the experts that are hit, and the time over that
of reading so many bytes. With one thread it is that thread's own time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from draftwise.kernels.cpu.experts import ExpertsKernels, NativeExperts
from draftwise.kernels.cpu.library import NativeLibrary, native_library
from draftwise.kernels.cpu.linear import LinearKernels, NativeLinear
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.probe import Probe
from draftwise.kernels.cpu.quantized import QuantizedOps
from draftwise.kernels.routing import Routing
from draftwise.quantization.scheme import parse_scheme

ROWS = (1, 2, 4, 8)


def layers_of(ops: NativeOps, routing: Routing, count: int, hidden: int, inner: int) -> list[NativeExperts]:
    """Random experts; every layer has weights of its own."""
    made = []
    for _ in range(count):
        pairs = [
            (
                ops.pack_gate_up((torch.randn(2 * inner, hidden) * 0.02).to(ops.dtype)),
                ops.pack_linear((torch.randn(hidden, inner) * 0.02).to(ops.dtype)),
            )
            for _ in range(routing.num_experts)
        ]
        experts = ops.pack_experts(pairs, routing)
        assert isinstance(experts, NativeExperts)
        made.append(experts)
    return made


def measure(
    library: NativeLibrary,
    form: str,
    threads: int,
    rounds: int,
    routing: Routing,
    layers: int,
    hidden: int,
    inner: int,
) -> None:
    pool = ThreadPool(library, threads)
    scheme = None if form == "bfloat16" else parse_scheme(form)
    ops = NativeOps(library, pool, torch.bfloat16)
    if scheme is not None:
        ops = QuantizedOps(library, pool, torch.bfloat16, scheme)
    kernels, probe = ExpertsKernels(library, pool), Probe(library, pool)
    stack = layers_of(ops, routing, layers, hidden, inner)
    large: NativeLinear = LinearKernels(library, pool).pack(torch.ones(4096, 8192).to(torch.bfloat16))
    clock = time.thread_time if threads == 1 else time.perf_counter
    took: dict[str, list[float]] = {}
    hits: dict[int, list[float]] = {rows: [] for rows in ROWS}

    def timed(name: str, run: object) -> None:
        assert callable(run)
        start = clock()
        run()
        took.setdefault(name, []).append(clock() - start)

    for _ in range(rounds):
        timed("read", lambda: probe.read_weights([large]))
        for rows in ROWS:
            x = torch.randn(rows, hidden).to(torch.bfloat16)
            routed = [kernels.route(torch.randn(rows, routing.num_scores) * 2, experts) for experts in stack]

            def together(
                x: torch.Tensor = x, routed: list[tuple[torch.Tensor, torch.Tensor]] = routed
            ) -> None:
                for (chosen, weights), experts in zip(routed, stack, strict=True):
                    kernels.run(x, chosen, weights, experts)

            def apart(x: torch.Tensor = x, routed: list[tuple[torch.Tensor, torch.Tensor]] = routed) -> None:
                for (chosen, weights), experts in zip(routed, stack, strict=True):
                    for r in range(len(x)):
                        kernels.run(x[r : r + 1], chosen[r : r + 1], weights[r : r + 1], experts)

            timed(f"{rows}", together)
            timed(f"{rows} apart", apart)
            hit = 0
            for (chosen, _), experts in zip(routed, stack, strict=True):
                hit += sum(
                    sum(w.num_bytes for w in experts.layers[i]) for i in set(chosen.flatten().tolist())
                )
            hits[rows].append(hit / len(stack))
    bandwidth = large.bytes / statistics.median(took["read"])
    print(f"{form}, {threads} threads: read {bandwidth / 1e9:.1f} GB/s")
    for rows in ROWS:
        ms = statistics.median(took[f"{rows}"]) / len(stack) * 1e3
        each = statistics.median(took[f"{rows} apart"]) / len(stack) * 1e3
        size = statistics.median(hits[rows])
        floor = size / bandwidth * 1e3
        print(
            f"  {rows} rows: {ms:7.3f} ms a layer, {size / 1e6:6.1f} MB of {stack[0].num_bytes / 1e6:.0f} hit, "
            f"{ms / floor:.2f} x reading them; one by one {each / ms:.2f} x as long"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--forms", nargs="+", default=["bfloat16", "int8_dynamic", "int4_dynamic"])
    options = parser.parse_args()
    library = native_library()
    if library is None:
        raise SystemExit("the native library is not built")
    torch.manual_seed(0)
    routing = Routing(options.experts, options.top_k)
    for form in options.forms:
        measure(
            library,
            form,
            options.threads,
            options.rounds,
            routing,
            options.layers,
            options.hidden,
            options.inner,
        )


if __name__ == "__main__":
    main()

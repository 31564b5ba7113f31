"""Attention alone on a CPU: prompts against torch's scaled_dot_product_attention, rows at long contexts, windows,
and types of the cache.

    python benchmarks/attention.py [--threads 2] [--levels avx512 amx] [--rounds 15]

Variants take turns in one process; medians of wall time and their ratios are printed. With one thread it is that
thread's own time, so that other work on the machine counts for less. torch gets keys and values side by side, as it
wants them; ours read them from scattered blocks of 16.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.levels import settle_level
from draftwise.kernels.cpu.library import Isa, NativeLibrary, native_library
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kv.storage import LARGEST, quantized
from draftwise.types import AttentionBatch

HEADS, KV_HEADS = 32, 4
BLOCK = 16
PROMPTS = ((512, 0), (4096, 0), (512, 16384))
"""Rows, context."""
ROWS = ((1, 2048), (8, 2048), (1, 16384), (8, 16384))
WINDOW, WINDOW_CONTEXTS = 1024, (2048, 16384, 131072)

CACHES = (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
CACHE_CONTEXT = 8000

Case = Callable[[], object]
Clock = Callable[[], float]


def ours(
    attention: NativeAttention,
    rows: int,
    context: int,
    dim: int,
    window: int | None = None,
    cache: torch.dtype = torch.bfloat16,
) -> Case:
    """A call with one request in scattered blocks."""
    blocks = -(-(context + rows) // BLOCK)
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    batch = AttentionBatch(
        query_start_np=np.array([0, rows], np.int32),
        context_len_np=np.array([context], np.int32),
        is_tree_np=np.zeros(1, np.bool_),
        block_tables_np=order[None],
        ancestors_np=None,
        block_size=BLOCK,
    )
    q = torch.randn(rows, HEADS, dim).to(torch.bfloat16)
    entries = torch.randn(blocks * BLOCK, 2 * KV_HEADS, dim)
    kv = quantized(entries, cache) if cache in LARGEST else (entries.to(cache),)
    return lambda: attention.run(q, kv, batch, num_kv_heads=KV_HEADS, scale=dim**-0.5, window=window)


def torchs(rows: int, context: int, dim: int) -> Case:
    """The same with torch; behind a context with a mask, as its causal one begins at the first key."""
    q = torch.randn(1, HEADS, rows, dim).to(torch.bfloat16)
    k, v = (torch.randn(1, KV_HEADS, context + rows, dim).to(torch.bfloat16) for _ in range(2))
    mask = None
    if context:
        mask = torch.ones(rows, context + rows, dtype=torch.bool).tril(context)
    return lambda: scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=not context, enable_gqa=True
    )


def measure(cases: dict[str, Case], rounds: int, clock: Clock) -> dict[str, float]:
    """Medians in milliseconds; all cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            start = clock()
            case()
            if turn:
                times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def at_level(library: NativeLibrary, isa: Isa, case: Case) -> Case:
    def run() -> object:
        library.use_isa(isa)
        return case()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--levels", nargs="+", default=None, help="instruction sets (default: that of engines)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dim", type=int, default=64, help="size of a head")
    options = parser.parse_args()
    library = native_library()
    if library is None:
        parser.error("the native library is not built")
    names = options.levels or [settle_level(library).isa.name.lower()]
    unknown = sorted({name for name in names if name.upper() not in Isa.__members__})
    if unknown:
        parser.error(f"no such level: {', '.join(unknown)}")
    levels = [Isa[name.upper()] for name in names]
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    attention = NativeAttention(library, ThreadPool(library, options.threads))
    dim: int = options.dim
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{HEADS} heads, {KV_HEADS} of keys and values, of {dim}; bfloat16; {options.threads} threads\n")
    print(f"{'ms':24}" + "".join(f"{name:>10}" for name in names) + f"{'torch':>10}  torch / {names[-1]}")
    for rows, context in (*PROMPTS, *ROWS):
        call = ours(attention, rows, context, dim)
        cases = {isa.name: at_level(library, isa, call) for isa in levels}
        times = measure({**cases, "torch": torchs(rows, context, dim)}, options.rounds, clock)
        line = "".join(f"{taken:10.2f}" for taken in times.values())
        print(f"{rows:5} rows at {context:6}     {line}  {times['torch'] / times[levels[-1].name]:10.2f}")
    print(f"\nwindow of {WINDOW}, {names[-1]}: ms, and over that at {WINDOW_CONTEXTS[0]}")
    library.use_isa(levels[-1])
    for rows in (1, 8, 512):
        times = measure(
            {str(c): ours(attention, rows, c, dim, WINDOW) for c in WINDOW_CONTEXTS}, options.rounds, clock
        )
        base = times[str(WINDOW_CONTEXTS[0])]
        print(f"{rows:5} rows   " + "   ".join(f"{c}: {ms:.2f} ({ms / base:.2f})" for c, ms in times.items()))
    print(f"\ntypes of the cache, rows behind {CACHE_CONTEXT}: ms")
    print(f"{'':16}" + "".join(f"{str(cache).removeprefix('torch.'):>15}" for cache in CACHES))
    for isa in levels:
        library.use_isa(isa)
        for rows in (1, 5):
            times = measure(
                {str(c): ours(attention, rows, CACHE_CONTEXT, dim, cache=c) for c in CACHES},
                options.rounds,
                clock,
            )
            print(f"{isa.name.lower():10} {rows} rows" + "".join(f"{ms:15.2f}" for ms in times.values()))


if __name__ == "__main__":
    main()

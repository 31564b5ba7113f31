"""Compiles every Triton kernel for GPUs of compute capability 8.0 and 9.0; needs none. Run in a process of its own,
without TRITON_INTERPRET. Prints a line per kernel and capability. ``--language``: only as far as Triton's own language
goes, which takes seconds and finds what the interpreter lets pass; no machine code is made."""

from __future__ import annotations

import sys
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_kernel

from draftwise.kernels.triton.availability import LAUNCH
from draftwise.kernels.triton.device import (
    attention,
    draws,
    inputs,
    linear,
    lookup,
    low_rank,
    narrow,
    rates,
    rows,
    seats,
    split,
    verify,
)

CAPABILITIES = (80, 90)
READS_FP8 = 89
"""The lowest capability whose kernels take numbers of fp8 as such; others get bytes."""


def build(kernel: Any, signature: str, **constants: object) -> None:
    """``signature``: types of the arguments that are not constants, in order. Compiled twice: Triton makes constants of
    whole numbers that are 1, which then have no methods. A signature with numbers of fp8 is for those who read them."""
    names = kernel.arg_names
    given = dict(zip([name for name in names if name not in constants], signature.split(), strict=True))
    ones = {name: 1 for name, kind in given.items() if kind in ("i32", "i64")}
    for capability in CAPABILITIES:
        if "fp8" in signature and capability < READS_FP8:
            continue
        made = _compile(kernel, given, constants, capability)
        shared = "" if made is None else f"{made.metadata.shared} bytes shared"
        print(kernel.__name__, capability, constants, shared, flush=True)
        if ones:
            rest = {n: k for n, k in given.items() if n not in ones}
            _compile(kernel, rest, constants | ones, capability)


def _compile(kernel: Any, given: dict[str, str], constants: dict[str, object], capability: int) -> Any:
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: given.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", capability, 32)
    if "--language" not in sys.argv:
        return compile_kernel(source, target=target, options=dict(LAUNCH))
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(LAUNCH | source.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    return None


def main() -> None:
    for q, kv, scales, flags in (
        ("*bf16", "*bf16", "*bf16", (False, False, False)),
        ("*fp16", "*i8", "*fp32", (True, True, True)),
        ("*bf16", "*u8", "*fp32", (False, False, True)),
        ("*fp32", "*fp16", "*fp16", (False, True, False)),
    ):
        build(
            attention.partial_attention,
            f"{q} {kv} {scales} {'*i32 ' * 8} *fp32 *fp32 *fp32 i32 i32 i32 i32 fp32 fp32 i32",
            **dict(zip(("CAPPED", "WINDOWED", "CODES"), flags, strict=True)),
            FP8=kv == "*u8",
            PAGE=16,
            HEADS=32,
            KV_HEADS=8,
            DIM=128,
            DIM_PAD=128,
            ROWS=4,
            BLOCK_M=16,
            BLOCK_N=64,
            PARTITION=256,
            SLOTS=32,
            WIDE=False,
        )
        for block_m in (32, 64):
            build(
                split.split_attention,
                f"{q} {kv} {scales} {'*i32 ' * 7} *i64 *fp32 *fp32 *fp32 i32 i32 i32 i32 fp32 fp32 i32 i32",
                **dict(zip(("CAPPED", "WINDOWED", "CODES"), flags, strict=True)),
                FP8=kv == "*u8",
                PAGE=16,
                HEADS=32,
                KV_HEADS=8,
                DIM=128,
                DIM_PAD=128,
                ROWS=block_m // 4,
                BLOCK_M=block_m,
                BLOCK_N=64,
                WIDE=False,
            )
    for sinks in (False, True):
        build(
            attention.combine_partitions,
            "*fp32 *fp32 *fp32 *i32 *i32 *fp32 *bf16 i32 i32 i32",
            HEADS=32,
            DIM=128,
            DIM_PAD=128,
            PARTITION=256,
            SLOTS=32,
            SLOTS_PAD=32,
            WINDOWED=True,
            SINKS=sinks,
        )
    build(
        narrow.narrow_linear,
        "*bf16 *bf16 *fp32 i32 i32 i32 i32",
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_K=128,
        WIDE=False,
    )
    build(
        low_rank.low_rank_down,
        "*bf16 *bf16 *i32 *fp32 i32 i32 i32 i32 i32",
        TILES=1,
        PARTS=4,
        WIDE=False,
        BLOCK_M=16,
        BLOCK_R=16,
        BLOCK_K=128,
    )
    build(
        low_rank.low_rank_up,
        "*fp32 *bf16 *i32 *i32 *bf16 i32 i32 i32 i32",
        TILES=1,
        PARTS=4,
        WIDE=False,
        RANK=16,
        BLOCK_M=16,
        BLOCK_N=64,
    )
    build(attention.tree_rows, "*i64 *i32 *i32 *i32 *i32 *i32 *i32 *i32")
    build(rows.rms_norm, "*bf16 *bf16 *fp32 *bf16 i32 i32 i32 fp32", ADD=True, BLOCK=4096)
    build(rows.silu_mul, "*bf16 *bf16 i32 i32", BLOCK=1024)
    build(rows.gather_rows, "*bf16 *i64 *bf16 i32", BLOCK=1024)
    for kv, scales, largest in (("*bf16", "*bf16", 0.0), ("*i8", "*fp32", 127.0), ("*u8", "*fp32", 448.0)):
        build(
            rows.rope_write,
            f"*bf16 *fp32 *fp32 fp32 *fp32 fp32 *bf16 {kv} {scales} *i64 i32",
            HEADS=32,
            KV_HEADS=8,
            DIM=128,
            HALF_PAD=64,
            Q_NORM=True,
            K_NORM=True,
            LARGEST=largest,
            CLAMP=False,
        )
    build(rows.compact_paths, "*bf16 *i64 *i64 *i32 i32 i64 i32", NODES_PAD=64, BLOCK=256)
    for bits, weight, apart, group, numbers, more in (
        (16, "*bf16", True, 1, 0, "*bf16"),
        (16, "*bf16", False, 1, 0, "*bf16"),
        (8, "*i8", True, 1, 0, "*i8"),
        (8, "*fp8e4nv", False, 1, 0, "*fp8e4nv"),
        (8, "*u8", False, 1, 0, "*u8"),
        (8, "*i8", True, 32, 0, "*i8"),
        (8, "*fp8e4nv", False, 128, 0, "*fp8e4nv"),
        (4, "*u8", True, 32, 0, "*u8"),
        (4, "*u8", True, 128, 1, "*u8"),
        (4, "*u8", False, 16, 2, "*fp32"),
        (4, "*u8", True, 32, 3, "*fp32"),
    ):
        build(
            linear.linear,
            f"*bf16 *fp32 {weight} *fp32 {more} *bf16 *bf16 *fp32 i32 i32 i32 i32 i32 i32",
            PARTS=4,
            APART=apart,
            GROUP=group,
            BITS=bits,
            CODES=False,
            NUMBERS=numbers,
            HAS_BIAS=True,
            WIDE=False,
            BLOCK_M=64,
            BLOCK_N=64,
            BLOCK_K=64 if group in (1, 128) else 32,
        )
        if bits < 16:
            build(
                linear.widen,
                f"{weight} *fp32 {more} *bf16 i32 i32 i32 i32",
                GROUP=group,
                BITS=bits,
                NUMBERS=numbers,
                BLOCK_N=64,
                BLOCK_K=64 if group in (1, 128) else 32,
            )
    codes()
    verification()
    between_passes()
    seat_steps()


def codes() -> None:
    """Products of weights and rows that are both rounded."""
    for kind in ("*i8", "*u8"):
        build(linear.quantize_rows, f"*bf16 {kind} *fp32 i32 i32", FLOATS=kind == "*u8", BLOCK=4096)
    for kind, sums, floats in (("*i8", "*i32", False), ("*fp8e4nv", "*fp32", True), ("*u8", "*fp32", True)):
        build(
            linear.add_parts,
            f"{sums} *fp32 *fp32 *bf16 *bf16 i32 i32",
            PARTS=4,
            GROUP=1,
            BITS=8,
            CODES=True,
            HAS_BIAS=True,
            BLOCK=1024,
        )
        build(
            linear.linear,
            f"{kind} *fp32 {kind} *fp32 {kind} *bf16 *bf16 {sums} i32 i32 i32 i32 i32 i32",
            PARTS=4,
            APART=not floats,
            GROUP=1,
            BITS=8,
            CODES=True,
            NUMBERS=0,
            HAS_BIAS=True,
            WIDE=False,
            BLOCK_M=64,
            BLOCK_N=64,
            BLOCK_K=64,
        )


def verification() -> None:
    """The kernels of rules."""
    for noisy in (False, True):
        build(
            verify.wanted_parts,
            "*fp32 *i64 *i32 *fp32 *i32 i32 i64 i32",
            NOISY=noisy,
            PART=8192,
            BLOCK=2048,
        )
    build(verify.walk_trees, "*i64 *i32 *i32 *fp32 *i32 i32 i32", PARTS_PAD=16)
    build(verify.judge_chains, "*fp32 *i64 *i32 *i32 *i64 *fp64 i32 i32")
    build(verify.block_masses, "*fp32 *i64 *i32 *fp64 i32 i32", BLOCK=2048)
    build(verify.judge_blocks, "*fp32 *i64 *i32 *i32 *i64 *fp64 *fp64 i32 i32")
    build(verify.reject_trees, "*fp32 *i64 *i32 *i32 *i64 *fp64 *fp32 i32 i32", BLOCK=2048)
    build(draws.residual_masses, "*fp32 *fp32 *i64 *fp64 *fp64 i32", PART=8192, BLOCK=2048)
    build(draws.draw_last, "*fp32 *fp32 *i64 *fp64 *fp64 *i32 *i32 i32 i32 i32", PART=8192, BLOCK=2048)


def between_passes() -> None:
    """What makes the rows of a drafter's next pass."""
    build(inputs.next_rows, "*i64 *i64 *i32 *i64 *i64 *i32 i32 i32 i32 i32 i32 i32 i32", PAGE=16, BLOCK=64)
    build(
        inputs.part_of_softmax,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *fp64 i32 i64 i64",
        PART=4096,
        PARTS_PAD=32,
    )
    build(
        inputs.draw_sampled,
        "*fp32 *fp64 *fp64 *i64 *i64 i32 i64 i32 i32",
        MAPPED=True,
        PART=4096,
        PARTS_PAD=32,
    )
    for mapped in (False, True):
        build(inputs.add_biases, "*fp32 *i64 *i64 i32 i64 i32", MAPPED=mapped, LEAST=-1e4, PART=4096)
    for noisy, count in ((True, 1), (False, 10)):
        build(
            inputs.part_of_best,
            "*fp32 *fp32 *i64 *i64 *fp32 *i32 *fp32 i32 i64 i32",
            NOISY=noisy,
            MAPPED=noisy,
            SUMS=not noisy,
            K=count,
            K_PAD=16,
            PART=4096,
        )
        build(
            inputs.best_of_all,
            "*fp32 *i32 *fp32 *i64 *fp32 *i64 *fp32 i32",
            MAPPED=noisy,
            SUMS=not noisy,
            K=count,
            K_PAD=16,
            PARTS_PAD=32,
        )


def seat_steps() -> None:
    """What stands between the passes of a step that stays on the device."""
    build(
        seats.begin_rows,
        f"*i64 *i64 *i64 *i32 {'*i64 ' * 3} *i32 *i32 {'*i64 ' * 4} {'i32 ' * 6}",
        FRESH=3,
        FRESH_PAD=4,
        PAGE=16,
        BLOCK=8,
    )
    first = "*i64 *i64 *i64 *i32 *i64 i32 i32"
    shapes = (
        (0, 0, 0),
        (1, 1, 0),
        (2, 2, 0),
        (1, 0, 1),
        (2, 2, 1),
        (1, 1, 1),
        (2, 2, 2),
        (1, 1, 3),
        (2, 2, 3),
    )
    for drafter, kind, tree in shapes:
        build(
            seats.advance_rows,
            f"{first} *i32 {'*i64 ' * 3} *i32 *i32 {'*i64 ' * 8} {'i32 ' * 8}",
            DRAFTER=drafter,
            TREE=tree,
            KIND=kind,
            ROWS=2 if drafter == 1 else 6,
            PAGE=16,
            BLOCK=8,
        )
    build(lookup.join_found, f"{first} *i64 *i64", BLOCK=8)
    for wide in (False, True):
        build(
            lookup.look_up,
            f"{first} *i32 *i32 *i64 {'i32 ' * 6} fp32 fp32 fp32",
            PAST=wide,
            CUT=wide,
            JOINS=wide,
            TILE=1024,
            BLOCK=8,
        )
    for dynamic in (False, True):
        build(seats.keep_drafts, f"{first} *i64 *i64 *i64 i32 i32", DYNAMIC=dynamic, BLOCK=8)
    for sampled in (False, True):
        build(
            rates.keep_at_rates,
            "*i64 *i32 *i32 *i64 *fp64 *fp64 *fp32 *i32 i32 i32 i32",
            SAMPLED=sampled,
            PARTS_PAD=16,
        )
        build(
            rates.keep_typical,
            "*fp32 *i64 *i32 *i32 *i64 *fp64 *fp64 *fp32 *i32 i32 i32 i32",
            EPSILON=0.09,
            DELTA=0.3,
            SAMPLED=sampled,
            PARTS_PAD=16,
            BLOCK=8,
        )
    build(rates.entropies, "*fp32 *fp32 *i64 *i32 *fp64 i32 i32 i32", BLOCK=1024)


if __name__ == "__main__":
    main()

"""Digests of what the native kernels compute, for comparing libraries of two compilers:

    DRAFTWISE_CPU_LIBRARY=... python -m tests.fingerprints

prints {level: {case: digest}} as JSON. Inputs are finite: which of two NaNs survives a sum is the compiler's choice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kernels.cpu.attention import NativeAttention
from draftwise.kernels.cpu.library import Isa, NativeLibrary, native_library, why_not_native
from draftwise.kernels.cpu.linear import Epilogue, LinearKernels
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kv.storage import LARGEST, KVLayerSpec, KVStorage, quantized
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder
from draftwise.quantization.scheme import parse_scheme
from draftwise.types import ChainDraws, ChainKey
from draftwise.verify.batch import verify_batch
from draftwise.verify.native import NativeRules
from tests.fakes.attention_batches import Part, make_batch
from tests.fakes.tiny import save_llama
from tests.unit.test_cpu_verify import make_step

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
SCHEMES = ("int8_weight_only", "int8_dynamic", "int4_weight_only", "int4_weight_only_g32", "int4_dynamic")
PARTS = [
    Part(1, 1),
    Part(17, 9, (-1, -1, 0, 0, 1, 4, -1, 5)),
    Part(300, 5),
    Part(0, 33),
    Part(700, 3, (-1, 0), first=613),
]
Case = tuple[str, Callable[[], Tensor]]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_cases(library: NativeLibrary, pool: ThreadPool) -> Iterator[Case]:
    kernels = LinearKernels(library, pool)
    for dtype, (outputs, inputs), rows in itertools.product(DTYPES, ((90, 70), (64, 1030)), (1, 7, 33)):
        x, weight, bias = random(rows, inputs, dtype=dtype), random(outputs, inputs, seed=1), random(outputs)
        for scheme in (None, *(name for name in SCHEMES if dtype is torch.bfloat16 or "dynamic" in name)):
            packed = kernels.pack_as(
                weight.to(dtype), bias, None if scheme is None else parse_scheme(scheme), paired=True
            )
            name = f"linear {scheme or 'float'} {dtype} {rows}x{inputs}x{outputs}"
            yield name, partial(kernels.run, x, packed, dtype=torch.float32)
            yield f"{name} silu", partial(kernels.run, x, packed, None, Epilogue.SILU_MUL, dtype)


def attention_cases(library: NativeLibrary, pool: ThreadPool) -> Iterator[Case]:
    native = NativeAttention(library, pool)
    batch, slots = make_batch(PARTS)
    rows = int(batch.query_start_np[-1])
    for dtype, cache, (heads, kv_heads, dim) in itertools.product(DTYPES, CACHES, ((4, 2, 64), (6, 2, 12))):
        q, entries = random(rows, heads, dim, dtype=dtype), random(slots, 2 * kv_heads, dim, seed=1)
        kv = quantized(entries, cache) if cache in LARGEST else (entries.to(cache),)
        for window, softcap in ((None, None), (100, 2.5)):
            name = f"attention {dtype} {cache} {heads}/{kv_heads}x{dim} window {window} softcap {softcap}"
            run = partial(native.run, q, kv, batch, num_kv_heads=kv_heads, scale=0.3)
            yield name, partial(run, window=window, softcap=softcap)


def row_cases(library: NativeLibrary, pool: ThreadPool) -> Iterator[Case]:
    for dtype, width in itertools.product(DTYPES, (7, 256, 1030)):
        ops = NativeOps(library, pool, dtype)
        x, norm = random(17, width, dtype=dtype), ops.pack_norm(random(width, dtype=dtype, seed=1), 1e-5)
        yield f"rms_norm {dtype} {width}", partial(ops.rms_norm, x, norm)
        wide = random(17, 2 * width, dtype=dtype) * 4
        yield f"silu_mul {dtype} {width}", partial(ops.silu_mul, wide)
    for dtype, cache, dim in itertools.product(DTYPES, CACHES, (12, 64)):
        ops = NativeOps(library, pool, dtype)
        yield f"qkv_rope_write {dtype} {cache} {dim}", partial(rope_write, ops, cache, dim)


def rope_write(ops: NativeOps, cache: torch.dtype, dim: int) -> Tensor:
    """Queries and what was written to the cache, as bytes."""
    rows = 40
    qkv = random(rows, 10 * dim, dtype=ops.dtype) * torch.logspace(-9, 3, rows)[:, None].to(ops.dtype)
    storage = KVStorage((KVLayerSpec.dense(2, dim),), 90, 1, cache, CPU)
    table = ops.pack_rope(1.0 / 100 ** (torch.arange(0, dim, 2).float() / dim), 1.25, 200)
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:rows]
    norm = ops.pack_norm(random(dim, dtype=ops.dtype, seed=1), 1e-5)
    rotations = ops.rope_rows(table, torch.arange(100, 100 + rows))
    q = ops.qkv_rope_write(qkv, HeadShape(6, 2, dim), rotations, storage.layer(0), slots, norm, None)
    written = [as_bytes(part[slots]) for part in storage.layer(0)]
    return torch.cat([as_bytes(q), *written])


def sampling_cases(library: NativeLibrary, pool: ThreadPool, folder: str) -> Iterator[Case]:
    for vocab in (64, 4099):
        yield f"verify {vocab}", partial(decisions, library, pool, vocab)
    for dtype in DTYPES:
        for limit in (0, 5):
            yield f"chains {dtype} top_k {limit}", partial(chains, library, pool, folder, dtype, limit)


def decisions(library: NativeLibrary, pool: ThreadPool, vocab: int) -> Tensor:
    said = []
    for seed in range(3):
        logits, requests = make_step(vocab, seed)
        said.append(repr(verify_batch(logits, requests, kernels=NativeRules(library, pool))))
    return torch.frombuffer(bytearray("".join(said).encode()), dtype=torch.uint8)


def chains(library: NativeLibrary, pool: ThreadPool, folder: str, dtype: torch.dtype, limit: int) -> Tensor:
    """Tokens that a tiny model drafts, and the probabilities that they were drawn from."""
    model = load_model(folder, dtype=dtype, device=CPU, ops=NativeOps(library, pool, dtype))
    assert isinstance(model, RecordedDecoder)
    kv = KVStorage(model.kv_layout(), 64, 4, dtype, CPU)
    tables = torch.arange(3, 63, dtype=torch.int32).view(3, 20).numpy()
    first = build_step_input([RowInput([5 + r], 0, tables[r]) for r in range(3)], 4, CPU)
    keys = tuple(ChainKey(11 + r, 0, 40 + r, 2 * r, 1 / 0.7, -np.inf, limit, 0.9) for r in range(3))
    got = model.draft_chains(first, kv, None, 5, ChainDraws("draft", keys))
    assert got is not None and got[1] is not None
    return torch.cat([as_bytes(torch.as_tensor(got[0])), as_bytes(got[1])])


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()[:16]


@torch.inference_mode()
def fingerprints(library: NativeLibrary) -> dict[str, dict[str, str]]:
    pool = ThreadPool(library, 2)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = save_llama(Path(folder), seed=3)
        for isa in (*library.isas, Isa.EMULATED):
            library.use_isa(isa)
            cases = itertools.chain(
                linear_cases(library, pool),
                attention_cases(library, pool),
                row_cases(library, pool),
                sampling_cases(library, pool, model),
            )
            found[isa.name.lower()] = {name: digest(compute()) for name, compute in cases}
    return found


if __name__ == "__main__":
    loaded = native_library()
    assert loaded is not None, why_not_native()
    print(json.dumps(fingerprints(loaded), indent=1))

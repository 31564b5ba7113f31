"""Latent attention: keys that are their own values, a layer for each head, and a cache of the compressed size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.fakes.architectures import save, small
from tests.fakes.attention_batches import Part, make_batch, slots_of
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.attention.reference import ReferenceAttention
from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import LARGEST, quantized
from draftwise.models.loader import load_model

CPU = torch.device("cpu")
TREE = (-1, -1, 0, 0, 1, 4, -1, 5)
PARTS = [Part(0, 1), Part(17, 9, TREE), Part(300, 40), Part(700, 9, TREE, first=613), Part(1030, 1)]


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


def native(dtype: torch.dtype, threads: int = 2) -> NativeOps:
    return NativeOps(native_or_skip(), ThreadPool(native_or_skip(), threads), dtype)


def case(heads: int, dim: int, dtype: torch.dtype, cache: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Queries [T, Hq, D] and a cache whose slots that nobody may read hold NaN (in int8: something else)."""
    batch, slots = make_batch(PARTS)
    generator = torch.Generator().manual_seed(1)
    entries = torch.full((slots, 1, dim), torch.nan)
    for r, part in enumerate(PARTS):
        own = slots_of(batch, r, part.context + part.rows)
        entries[own] = torch.randn(len(own), 1, dim, generator=generator)
    q = torch.randn(int(batch.query_start_np[-1]), heads, dim, generator=generator).to(dtype)
    if cache in LARGEST:
        return q, quantized(entries.nan_to_num(3.0), cache)
    return q, (entries.to(cache),)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "cache"),
    [  # every two values of any two kinds together, on every instruction set; --all: every three
        pytest.param(
            *shape, dtype, cache, id=f"{shape[0]}-{shape[1]}-{dtype}-{cache}",
            marks=[] if (i + j + k) % 2 == 1 else pytest.mark.slow,
        )
        for i, shape in enumerate([(5, 24), (40, 36)])
        for j, dtype in enumerate([torch.float32, torch.bfloat16])
        for k, cache in enumerate([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
    ],
)  # fmt: skip
def test_attention(isa: Isa, heads: int, dim: int, dtype: torch.dtype, cache: torch.dtype) -> None:
    q, kv = case(heads, dim, dtype, cache)
    batch, _ = make_batch(PARTS)
    shape = HeadShape(heads, 1, dim)
    found = native(dtype).attention(q, kv, batch, shape, 0.3)
    doubled = tuple(part.expand(-1, 2, *part.shape[2:]) for part in kv)
    wanted = ReferenceAttention().run(q.float(), doubled, batch, num_kv_heads=1, scale=0.3)
    limit = 1e-4 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(found.float(), wanted, rtol=limit, atol=limit)
    again = native(dtype, threads=3).attention(q, kv, make_batch(PARTS)[0], shape, 0.3)
    assert torch.equal(again, found)
    plain = TorchOps(dtype, CPU).attention(q, kv, batch, shape, 0.3)
    torch.testing.assert_close(plain.float(), wanted, rtol=2 * limit, atol=2 * limit)


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_is_stored(isa: Isa, cache: torch.dtype) -> None:
    """Rotated queries, and one entry per row; as plain torch does it."""
    heads, dim, rows = HeadShape(3, 1, 24), 24, 7
    qkv = torch.randn(rows, 4 * dim, generator=torch.Generator().manual_seed(2))
    slots = torch.tensor([4, 9, 2, 0, 11, 3, 8])
    results = []
    for ops in (native(torch.float32), TorchOps(torch.float32, CPU)):
        rope = ops.rope_rows(ops.pack_rope(torch.linspace(0.1, 1, 12), 1.5, 40), torch.arange(rows) * 5)
        kv: tuple[Tensor, ...] = (torch.zeros((12, 1, dim), dtype=cache),)
        if cache in LARGEST:
            kv = (*kv, torch.zeros(12, 1))
        q = ops.qkv_rope_write(qkv.clone(), heads, rope, kv, slots)
        results.append((q.reshape(rows, -1), *(part.float() for part in kv)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0.01, atol={torch.int8: 1.0, torch.float8_e4m3fn: 32.0}.get(cache, 1e-5)
        )
    assert bool((results[0][1][[1, 5, 6, 7, 10]] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_for_each_head(isa: Isa, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 34, 18, generator=torch.Generator().manual_seed(3)).to(dtype)
    x = torch.randn(33, 5 * 18, generator=torch.Generator().manual_seed(4)).to(dtype)
    ops = native(dtype)
    handle = ops.pack_heads(weight)
    found = ops.heads(x, handle)
    wanted = torch.einsum("thi,hoi->tho", x.float().view(33, 5, 18), weight.float()).reshape(33, -1)
    torch.testing.assert_close(
        found.float(), wanted, rtol=0.02, atol=0.05 if dtype is torch.bfloat16 else 1e-4
    )
    for i in (0, 7, 32):
        assert torch.equal(ops.heads(x[i : i + 1], handle)[0], found[i])
    other = TorchOps(dtype, CPU)
    torch.testing.assert_close(other.heads(x, other.pack_heads(weight)), found, rtol=0.02, atol=0.05)


def test_bad_arguments_are_refused() -> None:
    ops = native(torch.float32)
    handle = ops.pack_heads(torch.randn(5, 34, 18))
    with pytest.raises(ValueError, match="heads"):
        ops.heads(torch.randn(3, 4 * 18), handle)
    q, kv = case(4, 24, torch.float32, torch.float32)
    batch, _ = make_batch(PARTS)
    with pytest.raises(ValueError, match="heads"):
        ops.attention(q, (torch.zeros(40, 3, 24),), batch, HeadShape(4, 1, 24), 0.3)
    with pytest.raises(ValueError, match="heads"):
        ops.attention(q, (kv[0][..., :12].contiguous(),), batch, HeadShape(4, 1, 24), 0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek") / "model"
    save(small("deepseek_v3"), made)
    return made


def test_the_cache_has_the_compressed_size(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32, device=CPU)
    config = model.config.raw
    for spec in model.kv_layout():
        assert spec.elements_per_token == config["kv_lora_rank"] + config["qk_rope_head_dim"]


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int8_weight_only"])
def test_one_text_in_every_format(folder: Path, quantization: str | None) -> None:
    native_or_skip()
    drafters = [
        {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3},
        {"method": "ngram"},
    ]
    prompts = [{"prompt_token_ids": [(7 + 5 * i * j) % 250 + 3 for j in range(6 + 11 * i)]} for i in range(3)]
    with LLM(
        str(folder), device="cpu", dtype="bfloat16", quantization=quantization, skip_tokenizer_init=True,
        num_kv_blocks=40, max_num_batched_tokens=24, speculative_config=drafters, speculation_control="static",
    ) as llm:  # fmt: skip
        assert llm.guarantees.same_bits
        texts = []
        for method in ("none", "draft_model", "ngram"):
            params = SamplingParams(
                temperature=0, max_tokens=20, ignore_eos=True, speculation={"method": method}
            )
            found = llm.generate(prompts, params, use_tqdm=False)
            texts.append([out.outputs[0].token_ids for out in found])
        assert texts[0] == texts[1] == texts[2]
        assert llm.stats().speculation.num_accepted_tokens > 20


def test_triton_says_that_it_cannot() -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    from draftwise.kernels.triton.ops import TritonOps

    with pytest.raises(ModelLoadError, match="latent attention"):
        TritonOps(torch.float32, CPU).pack_heads(torch.zeros(1, 2, 2))

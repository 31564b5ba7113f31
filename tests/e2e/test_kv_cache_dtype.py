"""The K/V cache in other types than the model's: the same text with and without speculation, and fewer bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError
from draftwise.kv.storage import KVStorage
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels
from tests.native import native_or_skip

TREE = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8", "fp8"])
def test_same_text_with_and_without_speculation(
    make_llm: Callable[..., LLM], tiny: TinyModels, cache: str, dtype: str
) -> None:
    """Chains and trees, whose accepted paths are moved with their scales; prefix hits; a cache so small that requests
    are preempted and computed again."""
    native_or_skip()
    prompts = random_prompts(6, seed=5)
    prompts += [dict(p) for p in prompts[:2]]
    texts = []
    for blocks in (512, 40):
        llm = make_llm(
            dtype=dtype,
            kv_cache_dtype=cache,
            num_kv_blocks=blocks,
            speculative_config={"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 4},
        )
        assert llm.guarantees.same_bits
        for speculation in ({"method": "none"}, {}, {"speculative_token_tree": TREE}, {"method": "ngram"}):
            params = [
                SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation=speculation)
                for _ in prompts
            ]
            texts.append(token_ids(llm.generate(prompts, params)))
    for text in texts[1:]:
        assert text == texts[0]


def test_a_cache_of_codes_holds_more_in_the_same_memory(make_llm: Callable[..., LLM]) -> None:
    sizes = {}
    for cache in ("auto", "float16", "int8", "fp8"):
        llm = make_llm(kv_cache_dtype=cache, kv_cache_memory=1 << 20)
        engine = llm._engine
        assert engine is not None
        dtype = {
            "auto": torch.float32, "float16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn,
        }[cache]  # fmt: skip
        per_block = KVStorage.bytes_per_block(engine.model.kv_layout(), 4, dtype)
        assert (1 << 20) - per_block < engine.kv_cache_bytes <= 1 << 20
        sizes[cache] = llm.stats().num_free_blocks
    # heads of 8 numbers: 8 + 4 bytes with their scale, 16 in float16, 32 in float32
    assert (
        sizes["fp8"] == sizes["int8"] > 2.6 * sizes["auto"] and 1.9 < sizes["float16"] / sizes["auto"] < 2.1
    )


def test_types_nobody_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*fp8"):
        LLM(device="cpu", kv_cache_dtype="fp8_e5m2")


def test_plain_torch_rounds_its_cache_too(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    """float16 models have no native kernels on a CPU."""
    prompts = random_prompts(3, seed=6)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for cache in ("int8", "fp8", "bfloat16"):
        llm = make_llm(dtype="float16", kv_cache_dtype=cache)
        assert all(len(ids) == 8 for ids in token_ids(llm.generate(prompts, params)))

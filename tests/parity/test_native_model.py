"""Whole models on the native kernels: like Transformers in value, and bit for bit the same in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.config.embedded import embedded_path
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.models.base import DecoderModel
from draftwise.models.loader import load_model
from tests.native import forced_isa, native_or_skip
from tests.parity.helpers import Driver, MakeModel, expected_logits, tokens_of

LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3Text", {"head_dim": 12, "sliding_window": 7, "layer_types": LAYER_TYPES}),
    "phi3": (
        "Phi3",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "layer_types": LAYER_TYPES,
        },
    ),
}


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value


def native(folder: Any, dtype: torch.dtype, threads: int = 2) -> DecoderModel:
    ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), threads), dtype)
    return load_model(folder, dtype=dtype, device=torch.device("cpu"), ops=ops)


def halves(part: int) -> list[Any]:
    """Every family on every other instruction set, in one of the two types; --all: on all, in both. What ``part`` 0
    leaves out is in 1: two tests of bits together have every family on every instruction set."""
    return [
        pytest.param(
            isa, dtype, family, id=f"{isa.name.lower()}-{str(dtype).removeprefix('torch.')}-{family}",
            marks=[] if (i + k) % 2 == part and (i + k) // 2 % 2 == j else pytest.mark.slow,
        )
        for i, isa in enumerate(Isa)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
        for k, family in enumerate(FAMILIES)
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(make_checkpoint: MakeModel, family: str) -> None:
    reference, folder = make_checkpoint(FAMILIES[family][0], **FAMILIES[family][1])
    tokens = tokens_of(3, 45)
    actual = Driver(native(folder, torch.float32)).whole(0, tokens)
    torch.testing.assert_close(actual, expected_logits(reference, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("isa", "dtype", "family"), halves(0), indirect=["isa", "dtype"])
def test_same_bits_for_any_chunking_batch_and_threads(
    make_checkpoint: MakeModel, family: str, dtype: torch.dtype
) -> None:
    _, folder = make_checkpoint(FAMILIES[family][0], **FAMILIES[family][1])
    driver = Driver(native(folder, dtype))
    tokens = tokens_of(3, 90)
    whole = driver.whole(0, tokens)
    for rid, chunk in enumerate((64, 16, 7, 2, 1), start=1):
        assert torch.equal(driver.whole(rid, tokens, chunk), whole), chunk
    other = Driver(native(folder, dtype, threads=3), scatter=False)
    assert torch.equal(other.whole(0, tokens, 13), whole)
    # beside others, each at its own place
    for rid in range(10, 18):
        driver.step([(rid, tokens[: 5 * (rid - 8)])])
    for i in range(3):
        rows = [(rid, tokens[(at := 5 * (rid - 8) + i) : at + 1]) for rid in range(10, 18)]
        for (rid, _), logits in zip(rows, driver.step(rows), strict=True):
            assert torch.equal(logits[0], whole[5 * (rid - 8) + i]), (rid, i)


@pytest.mark.parametrize(("isa", "dtype", "family"), halves(1), indirect=["isa", "dtype"])
def test_paths_of_a_tree_have_the_bits_of_plain_decoding(
    make_checkpoint: MakeModel, family: str, dtype: torch.dtype
) -> None:
    _, folder = make_checkpoint(FAMILIES[family][0], **FAMILIES[family][1])
    driver = Driver(native(folder, dtype))
    parents = (-1, -1, 0, 0, 1, 4, -1, 5)
    prompt, nodes = tokens_of(5, 21), tokens_of(6, len(parents))
    driver.step([(0, prompt[:-1])])
    (tree,) = driver.step([(0, [prompt[-1], *nodes])], trees={0: parents})
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.append(nodes[at])
            at = parents[at]
        sequence = prompt + path[::-1]
        alone = driver.whole(100 + node, sequence, 1)
        assert torch.equal(tree[node + 1], alone[-1]), node
        assert torch.equal(tree[0], alone[len(prompt) - 1])


PROMPTS = [
    "def parse_args(self, argv):\n",
    "import os\nimport sys\n\nclass ",
    "    def test_read(self):\n        ",
    'for name in names:\n    if name.startswith("_"):\n        ',
    "x = [",
]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, id="bfloat16"),
    ],
    indirect=True,
)
def test_greedy_text_is_the_same_with_and_without_speculation(isa: Isa, dtype: torch.dtype) -> None:
    """The embedded pair: every method, alone and in a batch, chunked prompts. Not a token differs."""
    if isa is not native_or_skip().best_isa:
        pytest.skip("once is enough, on the best instruction set")
    drafters = [
        {"method": "draft_model", "model": str(embedded_path("draft")), "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 5},
    ]
    name = str(dtype).removeprefix("torch.")
    with LLM(dtype=name, device="cpu", speculative_config=drafters, speculation_control="static") as llm:
        assert llm.guarantees.same_bits and llm.guarantees.same_seed_same_text

        def run(prompts: list[str], method: str) -> list[tuple[int, ...]]:
            params = SamplingParams(
                temperature=0, max_tokens=48, ignore_eos=True, speculation={"method": method}
            )
            return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]

        plain = [run([prompt], "none")[0] for prompt in PROMPTS]
        assert run(PROMPTS, "none") == plain
        for method in ("draft_model", "ngram"):
            assert run(PROMPTS, method) == plain, method
            assert [run([prompt], method)[0] for prompt in PROMPTS] == plain, method
        stats = llm.stats().speculation
        assert stats.num_accepted_tokens > 20 and stats.num_accepted_tokens < stats.num_draft_tokens


def test_the_torch_path_promises_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    with LLM(device="cpu", speculation_control="static") as llm:
        assert not llm.guarantees.same_bits
        assert any("torch" in reason for reason in llm.guarantees.reasons)

"""Every family against Transformers on tiny random checkpoints, in float32."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from draftwise.errors import ConfigError
from draftwise.models.inputs import RowInput, build_step_input
from tests.parity.helpers import Driver, MakeModel, expected_logits, load, tokens_of

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e3,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
DEEPSEEK = {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GLM4_MOE = {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama-rope-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            **EXPERTS,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma2-uncapped": (
        "Gemma2",
        {
            "head_dim": 16,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": 7, "layer_types": GEMMA3_LAYERS, "rope_parameters": GEMMA3_ROPE},
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-partial": ("Phi3", {"head_dim": 16, "rope_parameters": PARTIAL_ROPE}),
    "deepseek-v3": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "routed_scaling_factor": 2.0}),
    "glm4-moe": ("Glm4Moe", {**GLM4_MOE, "use_qk_norm": True, "n_group": 4, "topk_group": 2}),
    "glm4-moe-biases": (
        "Glm4Moe",
        {
            **GLM4_MOE,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 7}),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3}),
    "olmoe-normalised": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}


_ONE_OF_EACH = {
    "llama", "llama-biases", "llama-rope-dynamic", "mistral-window", "qwen2-window", "qwen3-biases-window",
    "qwen3-moe-window", "qwen2-moe", "gemma2", "gemma3", "phi3-partial", "deepseek-v3", "deepseek-v2",
    "deepseek-v3-halves", "glm4-moe", "gpt-oss", "mixtral-window", "olmoe",
}  # fmt: skip
"""Of each family the form with most in it. Logits are compared in all of them, whole and in chunks of all sizes."""
FORMS = [
    pytest.param(case, id=name, marks=[] if name in _ONE_OF_EACH else pytest.mark.slow)
    for name, case in CASES.items()
]


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def pair(request: pytest.FixtureRequest, make_checkpoint: MakeModel) -> tuple[Any, Driver]:
    family, settings = request.param
    reference, folder = make_checkpoint(family, **settings)
    return reference, Driver(load(folder))


def test_logits_equal_for_any_chunking(pair: tuple[Any, Driver]) -> None:
    reference, driver = pair
    tokens = tokens_of(3, 45)
    expected = expected_logits(reference, tokens)
    assert expected.std() > 0.3, "a flat model would pass anything"
    for rid, chunk in enumerate((None, 16, 7, 1)):
        actual = driver.whole(rid, tokens, chunk)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pair", FORMS, indirect=True)
def test_fifty_greedy_tokens_equal(pair: tuple[Any, Driver]) -> None:
    reference, driver = pair
    prompt = tokens_of(4, 12)
    found = driver.greedy(0, prompt, 50)
    # Who says the likeliest token behind every prefix says what greedy decoding says.
    likeliest = expected_logits(reference, [*prompt, *found]).argmax(-1).tolist()
    assert len(found) == 50 and found == likeliest[len(prompt) - 1 : -1]


@pytest.mark.parametrize("pair", FORMS, indirect=True)
def test_tree_paths_equal_chains(pair: tuple[Any, Driver]) -> None:
    """Each path of a tree gives the logits that the path gives as a chain; several trees and a chain at once."""
    reference, driver = pair
    prompts = {0: tokens_of(5, 21), 1: tokens_of(6, 3), 2: tokens_of(7, 33)}
    trees = {0: (-1, -1, 0, 0, 1, 4), 1: (-1, 0, 0, 0, 1, -1, 5, 5, 7), 2: (-1, -1, -1)}
    driver.step([(rid, prompt[:-1]) for rid, prompt in prompts.items()])
    driver.step([(3, tokens_of(8, 9))])
    nodes = {rid: tokens_of(20 + rid, len(parents)) for rid, parents in trees.items()}
    rows = [(rid, [prompts[rid][-1], *nodes[rid]]) for rid in trees]
    *actual, chain = driver.step([*rows, (3, tokens_of(9, 5))], trees=trees)
    alone = Driver(driver.model)
    for rid, parents in trees.items():
        alone.step([(rid, prompts[rid][:-1])])
        torch.testing.assert_close(
            alone.step([(rid, [prompts[rid][-1], *nodes[rid]])], trees={rid: parents})[0],
            actual[rid],
            atol=1e-5,
            rtol=1e-5,
        )
        for i in range(len(parents)):
            path, node = [], i
            while node >= 0:
                path.append(nodes[rid][node])
                node = parents[node]
            expected = expected_logits(reference, prompts[rid] + path[::-1])
            torch.testing.assert_close(actual[rid][i + 1], expected[-1], atol=1e-4, rtol=0)
            torch.testing.assert_close(actual[rid][0], expected[len(prompts[rid]) - 1], atol=1e-4, rtol=0)
    expected = expected_logits(reference, tokens_of(8, 9) + tokens_of(9, 5))
    torch.testing.assert_close(chain, expected[-5:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("pair", FORMS, indirect=True)
def test_mixed_batch_equals_one_at_a_time(pair: tuple[Any, Driver]) -> None:
    """16 requests of mixed lengths in one pass, chunks and decodes of all widths together."""
    _, driver = pair
    alone = Driver(driver.model, scatter=False)
    lengths = [1, 2, 3, 5, 8, 9, 12, 17, 20, 33, 40, 64, 70, 90, 130, 7]
    sequences = [tokens_of(100 + i, length) for i, length in enumerate(lengths)]
    expected = [alone.whole(i, tokens) for i, tokens in enumerate(sequences)]
    done = [0] * 16
    got: list[list[torch.Tensor]] = [[] for _ in sequences]
    widths = [1, 1, 2, 1, 5, 9, 12, 3, 1, 33, 6, 64, 1, 75, 130, 1]
    while any(done[i] < lengths[i] for i in range(16)):
        rows = [(i, sequences[i][done[i] : done[i] + widths[i]]) for i in range(16) if done[i] < lengths[i]]
        for (i, tokens), logits in zip(rows, driver.step(rows), strict=True):
            done[i] += len(tokens)
            got[i].append(logits)
    for i in range(16):
        torch.testing.assert_close(torch.cat(got[i]), expected[i], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral-window", "qwen2"])
def test_narrow_dtypes_are_close(case: str, dtype: torch.dtype, make_checkpoint: MakeModel) -> None:
    family, settings = CASES[case]
    reference, folder = make_checkpoint(family, **settings)
    driver = Driver(load(folder, dtype))
    tokens = tokens_of(3, 40)
    expected = expected_logits(reference, tokens)
    actual = driver.whole(0, tokens, 11)
    assert actual.dtype is torch.float32
    assert driver.model.dtype is dtype
    error = (actual - expected).pow(2).mean().sqrt() / expected.std()
    assert error < (0.05 if dtype is torch.bfloat16 else 0.01)


def test_captured_hidden_states_are_those_entering_each_layer(make_checkpoint: MakeModel) -> None:
    reference, folder = make_checkpoint("Llama")
    model = load(folder)
    driver = Driver(model)
    tokens = tokens_of(3, 10)
    with torch.no_grad():
        states = reference.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    batch = build_step_input([RowInput(tokens, 0, np.arange(3, dtype=np.int32))], 4, model.device)
    with torch.inference_mode():
        output = model.forward(batch, driver.kv, capture=(0, 2, 3))
    assert sorted(output.captured) == [0, 2, 3]
    for i in (0, 2):
        torch.testing.assert_close(output.captured[i], states[i][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.hidden, states[3][0], atol=1e-4, rtol=0)
    # what leaves the last layer is normalised to the final hidden states
    norm = reference.model.norm(output.captured[3].clone())
    torch.testing.assert_close(norm, states[3][0], atol=1e-4, rtol=0)


def test_dynamic_rope_beyond_the_trained_length(make_checkpoint: MakeModel) -> None:
    """A longer model length gives Transformers' logits for a sequence of exactly that length, in any chunking."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    reference, folder = make_checkpoint("Llama", rope_parameters=rope, max_position_embeddings=32)
    model = load(folder, max_model_len=80)
    assert model.config.max_model_len == 80
    tokens = tokens_of(11, 80)
    expected = expected_logits(reference, tokens)
    for rid, chunk in enumerate((None, 13)):
        torch.testing.assert_close(Driver(model).whole(rid, tokens, chunk), expected, atol=1e-4, rtol=0)


LONG_CASES = {
    "phi3": {"rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 1.0}},
    "phi4-mini": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 0.5},
    },
}


@pytest.mark.parametrize("case", LONG_CASES)
def test_longrope_takes_the_factors_of_the_model_length(make_checkpoint: MakeModel, case: str) -> None:
    """Up to 32 tokens the short ones, as Transformers for sequences that are no longer; else the long ones."""
    reference, folder = make_checkpoint("Phi3", original_max_position_embeddings=32, **LONG_CASES[case])
    tokens = tokens_of(11, 80)
    for length, count in ((32, 30), (None, 80)):
        model = load(folder, max_model_len=length)
        expected = expected_logits(reference, tokens[:count])
        for rid, chunk in enumerate((None, 13)):
            actual = Driver(model).whole(rid, tokens[:count], chunk)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_yarn_reaches_what_its_factor_says(make_checkpoint: MakeModel) -> None:
    """As Qwen's pages tell users: the config keeps its max_position_embeddings, the factor reaches further."""
    reference, folder = make_checkpoint("Llama", rope_parameters=YARN_ROPE, max_position_embeddings=80)
    assert load(folder).config.max_model_len == 80
    model = load(folder, max_model_len=256)
    tokens = tokens_of(11, 200)
    expected = expected_logits(reference, tokens)
    torch.testing.assert_close(Driver(model).whole(0, tokens, 33), expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="1 to 256"):
        load(folder, max_model_len=257)


def test_older_rope_spelling_gives_the_same_model(make_checkpoint: MakeModel) -> None:
    for case in ("linear", "llama3", "dynamic", "yarn"):
        family, settings = CASES[f"llama-rope-{case}"]
        _, folder = make_checkpoint(family, **settings)
        new = load(folder).config
        path = folder / "config.json"
        text = path.read_text()
        raw = json.loads(text)
        params = raw.pop("rope_parameters")
        raw["rope_theta"] = params.pop("rope_theta")
        params["type"] = params.pop("rope_type")
        raw["rope_scaling"] = params
        try:
            path.write_text(json.dumps(raw))
            assert load(folder).config.rope == new.rope
            assert new.rope.kind == case
        finally:
            path.write_text(text)

"""Fields that make another model of a checkpoint are read by its family, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise.errors import ModelLoadError
from draftwise.models.registry import resolve_model
from draftwise.models.unfollowed import Watched, refuse_unfollowed

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99,
    "sliding_window": 8, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def parse(architecture: str, **fields: Any) -> None:
    raw = Watched({"architectures": [architecture], **SIZES, **fields})
    _, cls = resolve_model(raw)
    cls.parse(raw, architecture)
    refuse_unfollowed(raw, architecture)


@pytest.mark.parametrize(("name", "value"), [
    ("embedding_multiplier", 12.0), ("residual_multiplier", 0.22), ("attention_multiplier", 0.0078),
    ("logits_scaling", 16.0), ("logit_scale", 0.0625), ("scale_emb", 12), ("no_rope_layers", [1, 0]),
    ("no_rope_layer_interval", 4), ("layer_types", ["full_attention", "sliding_attention"]), ("clip_qkv", 8.0),
    ("attention_chunk_size", 8192), ("use_qk_norm", True), ("parallel_attn", True), ("alibi", True),
    ("query_pre_attn_scalar", 224), ("num_local_experts", 8), ("final_logit_softcapping", 30.0),
    ("swiglu_limit", 7.0), ("rotary_pct", 0.25),
])  # fmt: skip
def test_a_field_that_llama_does_not_know_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=name):
        parse("LlamaForCausalLM", **{name: value})


@pytest.mark.parametrize("fields", [
    {"embedding_multiplier": 1.0, "logits_scaling": 1, "logit_scale": None}, {"no_rope_layers": [1, 1]},
    {"no_rope_layers": []}, {"layer_types": ["full_attention"] * 2}, {"use_qk_norm": False, "alibi": False},
    {"num_experts": 0, "clip_qkv": None, "final_logit_softcapping": None}, {"a_note_of_the_author": 7},
    {"attn_logit_softcapping": 30.0},  # every dense family follows it
])  # fmt: skip
def test_values_that_change_nothing_or_are_followed_are_not(fields: dict[str, Any]) -> None:
    parse("LlamaForCausalLM", **fields)


def test_what_a_family_reads_it_follows() -> None:
    parse("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    kinds = ["full_attention", "sliding_attention"]
    parse("Qwen2ForCausalLM", use_sliding_window=True, layer_types=kinds)
    with pytest.raises(ModelLoadError, match="layer_types"):  # without the switch Qwen2 does not look at them
        parse("Qwen2ForCausalLM", layer_types=kinds)
    parse("Gemma2ForCausalLM", query_pre_attn_scalar=16, layer_types=kinds, final_logit_softcapping=30.0)


MORE: dict[str, dict[str, Any]] = {
    "Phi3": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        "original_max_position_embeddings": 32,
    },
    "Gemma2": {},
    "Gemma3": {},
    "Glm4Moe": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4},
    "DeepseekV2": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("family", MORE)
def test_families_with_settings_of_their_own_do_not_follow_everything(family: str) -> None:
    parse(f"{family}ForCausalLM", **MORE[family])
    with pytest.raises(ModelLoadError, match="logits_scaling"):
        parse(f"{family}ForCausalLM", **MORE[family], logits_scaling=8.0)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("newer", "same"), [
    ({"rope_type": "default", "rope_theta": 1e6}, False), ({"rope_type": "yarn", "rope_theta": 1e6, **YARN}, True),
    ({"rope_type": "yarn", "rope_theta": 1e6, **YARN, "factor": 2.0}, False),
])  # fmt: skip
def test_a_rotation_that_is_said_twice_must_be_the_same(newer: dict[str, Any], same: bool) -> None:
    """Whoever adds ``rope_scaling`` to a file that Transformers 5 wrote means it."""
    fields = {"rope_parameters": newer, "rope_scaling": {"type": "yarn", **YARN}}
    if same:
        parse("LlamaForCausalLM", **fields)
        return
    with pytest.raises(ModelLoadError, match=r"rope_scaling.*something else"):
        parse("LlamaForCausalLM", **fields)


@pytest.mark.parametrize(
    ("family", "theta"),
    [("Mixtral", 1e6), ("Phi3", 1e4), ("Olmoe", 1e4), ("Glm4Moe", 1e4), ("GptOss", 150_000.0)],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str, theta: float) -> None:
    raw = {"architectures": [f"{family}ForCausalLM"], **SIZES}
    architecture, cls = resolve_model(raw)
    config = cls.parse(raw, architecture)
    assert (config.norm_eps, config.rope.theta) == (1e-5, theta)

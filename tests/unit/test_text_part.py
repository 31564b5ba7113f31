"""The text part of a model of more: its config as a text model would have it, its tensors under their own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwise.errors import ModelLoadError
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.text_part import PART_OF, text_config, text_tensors

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 99,
}


def entries(*names: str) -> dict[str, TensorEntry]:
    return {name: TensorEntry(Path("f"), (i,), "F32") for i, name in enumerate(names)}


def test_what_a_published_config_leaves_out_has_its_default() -> None:
    """LLaVA 1.5 says little more of its text part than the type."""
    raw = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "float16",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
        "vision_config": {"model_type": "clip_vision_model"}, "eos_token_id": 7,
    }  # fmt: skip
    text = text_config(raw)
    assert text["architectures"] == ["LlamaForCausalLM"] and text[PART_OF] == "LlavaForConditionalGeneration"
    assert (text["hidden_size"], text["num_hidden_layers"], text["vocab_size"]) == (4096, 32, 32064)
    assert (text["torch_dtype"], text["eos_token_id"], text["tie_word_embeddings"]) == ("float16", 7, False)


@pytest.mark.parametrize("rope", [
    {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}},
])  # fmt: skip
def test_m_rope_over_text_is_the_plain_rotation(rope: dict[str, Any]) -> None:
    """Qwen2-VL's fields stand beside those of its tower, not under a name of their own."""
    raw = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", **SIZES, **rope,
        "vision_config": {"embed_dim": 32}, "tie_word_embeddings": True, "num_key_value_heads": 2,
    }  # fmt: skip
    text = text_config(raw, lambda: ["model.embed_tokens.weight"])
    assert text["architectures"] == ["Qwen2ForCausalLM"] and text["hidden_size"] == 64
    assert text["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert text["tie_word_embeddings"] is True
    assert text_config(raw, lambda: ["lm_head.weight"])["tie_word_embeddings"] is False


@pytest.mark.parametrize("raw", [
    {"architectures": ["LlamaForCausalLM"], "text_config": {}},
    {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},  # no code of its own here
    {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
     "text_config": {"model_type": "gpt2"}},
    {"architectures": []}, {},
])  # fmt: skip
def test_everything_else_stays_as_it_is(raw: dict[str, Any]) -> None:
    assert text_config(raw) == raw


@pytest.mark.parametrize(("decoder", "head"), [
    ("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head."),
    ("model.text_model.", "lm_head."), ("model.", "lm_head."), ("thinker.model.", "thinker.lm_head."),
])  # fmt: skip
def test_tensors_of_the_text_part_go_by_their_own_names(decoder: str, head: str) -> None:
    own = [
        "embed_tokens.weight",
        "layers.0.mlp.up_proj.qweight",
        "layers.1.input_layernorm.weight",
        "norm.weight",
    ]
    others = [
        "vision_tower.layers.0.mlp.up_proj.weight",
        "visual.embed_tokens.weight",
        "audio.lm_head.weight",
    ]
    found = text_tensors(entries(*(decoder + name for name in own), head + "weight", *others))
    assert {name: entry.stored for name, entry in found.items()} == {
        **{"model." + name: decoder + name for name in own}, "lm_head.weight": head + "weight",
    }  # fmt: skip


@pytest.mark.parametrize("names", [
    ["vision.layers.0.weight"],
    ["a.embed_tokens.weight", "a.layers.0.x", "b.embed_tokens.weight", "b.layers.0.x"],
])  # fmt: skip
def test_a_text_part_that_is_not_told_apart_is_refused(names: list[str]) -> None:
    with pytest.raises(ModelLoadError, match="cannot be told from the others"):
        text_tensors(entries(*names))

"""`SpeculativeConfig`: every field converted, checked and resolved, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from draftwise.config import SpeculativeConfig, registry
from draftwise.config.methods import detect_method
from draftwise.config.registry import canonical_name
from draftwise.config.trees import DynamicTree
from draftwise.errors import ConfigError
from draftwise.names import DEFAULT_TREE_NODES


def refused(values: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig.from_dict(values)
    for word in words:
        assert word in str(error.value), str(error.value)
    return str(error.value)


def test_ngram_defaults() -> None:
    spec = SpeculativeConfig.from_dict({"method": "ngram"})
    assert (spec.num_speculative_tokens, spec.prompt_lookup_max, spec.prompt_lookup_min) == (5, 5, 2)
    assert spec.model is None and spec.rule is None and spec.notes == ()
    assert type(spec.num_speculative_tokens) is int


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (4, 2))],
)  # fmt: skip
def test_lookup_bounds(given: dict[str, int], expected: tuple[int, int]) -> None:
    spec = SpeculativeConfig.from_dict({"method": "ngram", **given})
    assert (spec.prompt_lookup_max, spec.prompt_lookup_min) == expected


def test_lookup_bounds_in_the_wrong_order() -> None:
    refused({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min: 3")


def test_from_json_text_and_string_values() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": "3", "disable_padded_drafter_batch": "False"}'
    spec = SpeculativeConfig.from_dict(text)
    assert spec.num_speculative_tokens == 3
    assert spec.disable_padded_drafter_batch is False


def test_none_means_not_given() -> None:
    nones = {f.name: None for f in dataclasses.fields(SpeculativeConfig)}
    assert SpeculativeConfig.from_dict({**nones, "method": "ngram"}) == SpeculativeConfig(method="ngram")
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=None).num_speculative_tokens == 5  # type: ignore[arg-type]


def test_is_frozen_pickles_and_replaces() -> None:
    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=7)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert dataclasses.replace(spec, num_speculative_tokens=2).num_speculative_tokens == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.method = "none"  # type: ignore[misc]


def test_unknown_field_names_the_closest() -> None:
    message = refused({"method": "ngram", "num_speculative_token": 3}, "num_speculative_token")
    assert "did you mean 'num_speculative_tokens'" in message


@pytest.mark.parametrize("value", [0, -1, 64, "many", True, 2.5, [3]])
def test_num_speculative_tokens_out_of_range(value: object) -> None:
    refused(
        {"method": "ngram", "num_speculative_tokens": value}, "num_speculative_tokens", "1..63", repr(value)
    )


@pytest.mark.parametrize(
    ("field", "value"), [("max_tree_depth", 1), ("max_tree_depth", 1025), ("max_cached_requests", -1)]
)
def test_suffix_settings_out_of_range(field: str, value: int) -> None:
    refused({"method": "suffix", f"suffix_decoding_{field}": value}, f"suffix_decoding_{field}", str(value))


def test_unknown_method_names_what_there_is() -> None:
    refused({"method": "ngrams"}, "ngrams")


def test_methods_to_come_are_refused_by_name() -> None:
    refused({"method": "hydra", "model": "x"}, "'hydra'", "not supported yet")


def test_old_method_name_is_an_alias() -> None:
    assert canonical_name("deepseek_mtp") == "mtp"
    assert SpeculativeConfig(method="[ngram]").method == "ngram"
    assert SpeculativeConfig(model="[ngram]").method == "ngram"
    assert SpeculativeConfig(model="ngram").model is None


def test_method_and_model_must_fit() -> None:
    refused({}, "needs a method or a model")
    refused({"method": "draft_model"}, "model", "needs a model")
    refused({"method": "ngram", "model": "some/model"}, "some/model", "uses no model")


def folder(path: Path, **config: Any) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_method_from_the_draft_folder(tmp_path: Path) -> None:
    causal = folder(tmp_path / "m", architectures=["LlamaForCausalLM"], model_type="llama")
    assert SpeculativeConfig(model=causal).method == "draft_model"
    assert SpeculativeConfig(model=causal).num_speculative_tokens == 4
    for config, method in [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"medusa_num_heads": 4}, "medusa"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "mtp"),
        (
            {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": 0, "num_nextn_predict_layers": 1},
            "mtp",
        ),
        (
            {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": 36, "num_nextn_predict_layers": 1},
            "draft_model",
        ),
    ]:
        assert detect_method(folder(tmp_path / "head", **config), None) == method


def test_method_from_a_hub_name() -> None:
    assert SpeculativeConfig(model="org/tiny-llama").method == "draft_model"
    assert detect_method("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", None) == "eagle3"


def test_unreadable_draft_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refused({"model": str(tmp_path)}, "unreadable config.json")


def test_unsupported_fields_are_refused_by_name() -> None:
    base = {"method": "draft_model", "model": "org/m"}
    refused({**base, "draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size")
    assert SpeculativeConfig.from_dict({**base, "draft_tensor_parallel_size": 1, "parallel_drafting": False})
    assert SpeculativeConfig.from_dict({**base, "parallel_drafting": "True", "use_heterogeneous_vocab": 1})


def test_fields_of_another_method_contradict() -> None:
    refused({"method": "draft_model", "model": "m", "prompt_lookup_max": 4}, "prompt_lookup_max", "'ngram'")
    refused(
        {"method": "ngram", "suffix_decoding_max_tree_depth": 4}, "suffix_decoding_max_tree_depth", "'suffix'"
    )
    refused({"method": "ngram", "draft_model_config": {}}, "draft_model_config")


def test_no_effect_is_noted() -> None:
    spec = SpeculativeConfig.from_dict(
        {"method": "ngram", "enforce_eager": True, "disable_padded_drafter_batch": "True"}
    )
    assert len(spec.notes) == 2
    assert any("enforce_eager" in note for note in spec.notes)
    assert not SpeculativeConfig(method="draft_model", model="M", enforce_eager=True).notes


def test_rules() -> None:
    assert SpeculativeConfig(method="ngram", rejection_sample_method="standard").rule == "rejection"
    for rule in ("block", "coupled", "typical", "rejection"):
        assert SpeculativeConfig(method="ngram", rejection_sample_method=rule).rule == rule
    refused(
        {"method": "ngram", "rejection_sample_method": "blok"},
        "rejection_sample_method",
        "did you mean 'block'",
    )
    refused({"method": "ngram", "draft_sample_method": "random"}, "draft_sample_method")


def synthetic(**more: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(
        {"method": "synthetic", "rejection_sample_method": "synthetic", **more}
    )


def test_synthetic_length_becomes_rates() -> None:
    assert synthetic(num_speculative_tokens=3, synthetic_acceptance_length=2.6).acceptance_rates == (
        1.0,
        0.6,
        0.0,
    )
    for k in (1, 3, 7):
        for length in (1.0, 1.25, k + 0.5, k + 1.0):
            rates = synthetic(num_speculative_tokens=k, synthetic_acceptance_length=length).acceptance_rates
            assert rates is not None and len(rates) == k
            assert sum(rates) == pytest.approx(length - 1)
            assert list(rates) == sorted(rates, reverse=True)


def test_synthetic_rates() -> None:
    spec = synthetic(synthetic_acceptance_rates=[0.9, 0.5])
    assert spec.num_speculative_tokens == 2 and spec.acceptance_rates == (0.9, 0.5)
    assert SpeculativeConfig(method="ngram").acceptance_rates is None


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"synthetic_acceptance_length": 0.5},
        {"synthetic_acceptance_length": 5.1, "num_speculative_tokens": 4},
        {"synthetic_acceptance_rates": [0.5, 0.6]},
        {"synthetic_acceptance_rates": [1.5]},
        {"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2},
        {"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5},
    ],
)
def test_synthetic_errors(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        synthetic(**more)


def test_synthetic_acceptance_without_the_rule() -> None:
    refused({"method": "ngram", "synthetic_acceptance_length": 2}, "synthetic_acceptance_length")


def test_table_by_batch_size() -> None:
    table = [[1, 4, 5], [5, 16, 2], (32, 64, 0)]
    spec = SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens_per_batch_size": table})
    assert spec.num_speculative_tokens == 5
    assert spec.num_speculative_tokens_per_batch_size == ((1, 4, 5), (5, 16, 2), (32, 64, 0))
    for bad in ([], [[1, 4]], [[4, 1, 2]], [[1, 4, 2], [4, 8, 1]], [[0, 4, 2]], [[1, 4, 64]], "x", [1, 4, 2]):
        refused({"method": "ngram", "num_speculative_tokens_per_batch_size": bad}, "per_batch_size")
    refused(
        {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": [[1, 2, 4]],
        },
        "largest K",
    )


def test_trees() -> None:
    tree = [[0], [1], [0, 0]]
    for given in (tree, str(tree), "[(0,), (1,), (0, 0)]"):
        spec = SpeculativeConfig.from_dict({"method": "synthetic", "speculative_token_tree": given})
        assert spec.speculative_token_tree == ((0,), (1,), (0, 0))
        assert spec.num_speculative_tokens == 3
    refused({"method": "ngram", "speculative_token_tree": tree}, "speculative_token_tree", "chains")
    refused(
        {"method": "synthetic", "speculative_token_tree": tree, "num_speculative_tokens": 5},
        "contradicts",
        "3 nodes",
    )
    refused({"method": "synthetic", "speculative_token_tree": [[0, 0]]})
    refused({"method": "synthetic", "speculative_token_tree": "import os"}, "list of paths")


def test_dynamic_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "likes_trees", "some.module:Class")
    for given, tree in ((True, DynamicTree()), ({"top_k": 4, "depth": 5}, DynamicTree(4, 5)), (False, None)):
        spec = SpeculativeConfig.from_dict({"method": "likes_trees", "speculative_dynamic_tree": given})
        assert spec.speculative_dynamic_tree == tree
        assert spec.num_speculative_tokens == (DEFAULT_TREE_NODES if tree is not None else 4)
    spec = SpeculativeConfig.from_dict(
        {"method": "likes_trees", "speculative_dynamic_tree": True, "num_speculative_tokens": 60}
    )
    assert spec.num_speculative_tokens == 60
    both = {"method": "likes_trees", "speculative_dynamic_tree": True, "speculative_token_tree": [[0]]}
    refused(both, "speculative_dynamic_tree", "contradicts speculative_token_tree")
    refused({"method": "ngram", "speculative_dynamic_tree": True}, "no dynamic trees")
    refused({"method": "likes_trees", "speculative_dynamic_tree": {"width": 3}}, "unknown field 'width'")


def test_quantization_of_the_draft_model() -> None:
    config = SpeculativeConfig.from_dict(
        {"method": "draft_model", "model": "m", "quantization": "INT4_dynamic_g64"}
    )
    assert config.quantization == "int4_dynamic_g64"
    refused({"method": "draft_model", "model": "m", "quantization": "fp6"}, "quantization", "'fp6'", "int8")
    refused({"method": "ngram", "quantization": "int8"}, "quantization", "draft_model")

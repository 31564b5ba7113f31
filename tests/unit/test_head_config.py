"""What a head's config.json settles, and what a folder named as the model to serve turns into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwise.config import SpeculativeConfig, resolve_engine_config
from draftwise.errors import ConfigError, ModelLoadError


def folder(path: Path, **config: Any) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def speculator(path: Path, kind: str, verifier: str | None, tokens: int = 6) -> str:
    settings: dict[str, Any] = {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    }
    if verifier is not None:
        settings["verifier"] = {"name_or_path": verifier}
    return folder(path, speculators_model_type=kind, speculators_config=settings, transformer_layer_config={})


@pytest.mark.parametrize(
    ("method", "config", "expected"),
    [
        ("eagle", {}, 4),
        ("eagle3", {}, 5),
        ("mtp", {}, 3),
        ("medusa", {}, 4),
        ("medusa", {"medusa_num_heads": 2}, 2),
        ("medusa", {"model_type": "medusa", "num_heads": 3}, 3),
        ("eagle3", {"num_lookahead_tokens": 7}, 7),
        ("eagle3", {"num_lookahead_tokens": "many"}, 5),
        ("medusa", {"medusa_num_heads": 200}, 63),
    ],
)
def test_number_of_drafts(tmp_path: Path, method: str, config: dict[str, Any], expected: int) -> None:
    path = folder(tmp_path, **config)
    assert SpeculativeConfig(method=method, model=path).num_speculative_tokens == expected
    assert SpeculativeConfig(method=method, model=path, num_speculative_tokens=2).num_speculative_tokens == 2


def test_number_of_drafts_of_a_speculator(tmp_path: Path) -> None:
    spec = SpeculativeConfig(model=speculator(tmp_path, "eagle3", "T"))
    assert (spec.method, spec.num_speculative_tokens) == ("eagle3", 6)


def test_choices_of_a_medusa_head(tmp_path: Path) -> None:
    path = folder(tmp_path, medusa_num_heads=3, medusa_choices=[[0], [0, 0], [1], [0, 1], [0, 0, 0]])
    spec = SpeculativeConfig(model=path)
    assert spec.speculative_token_tree == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert spec.num_speculative_tokens == 5 and spec.medusa_choices is None
    # whoever says something else has it
    assert SpeculativeConfig(model=path, num_speculative_tokens=2).speculative_token_tree is None
    dynamic = SpeculativeConfig(model=path, speculative_dynamic_tree=True)
    assert dynamic.speculative_token_tree is None
    own = SpeculativeConfig(model=path, medusa_choices="[[1], [0]]")  # type: ignore[arg-type]
    assert own.speculative_token_tree == ((0,), (1,))


@pytest.mark.parametrize("choices", [[], "x", [[]], [[0], ["a"]], [[0], [0]], [[0, 0]], [[0], [-1]], [0]])
def test_choices_that_are_none(tmp_path: Path, choices: Any) -> None:
    path = folder(tmp_path, medusa_num_heads=3)
    with pytest.raises(ConfigError, match="medusa_choices"):
        SpeculativeConfig(model=path, medusa_choices=choices)
    with pytest.raises(ConfigError, match="medusa_choices"):
        SpeculativeConfig(model=folder(tmp_path, medusa_num_heads=3, medusa_choices=choices))


def test_a_head_needs_a_model() -> None:
    for method in ("eagle", "eagle3", "medusa"):
        with pytest.raises(ConfigError, match=f"'{method}' needs a model"):
            SpeculativeConfig(method=method)
    assert SpeculativeConfig(method="mtp").model is None
    assert SpeculativeConfig(method="deepseek_mtp").method == "mtp"


def test_the_embedded_target_has_heads_of_its_own() -> None:
    with pytest.raises(ConfigError, match="'eagle' needs a model"):
        resolve_engine_config(speculative_config={"method": "eagle"})
    for method in ("eagle3", "medusa", "mtp"):
        try:
            (spec,) = resolve_engine_config(speculative_config={"method": method}).speculative
        except ModelLoadError as error:  # an installation without them
            assert f"embedded {method} model is not in this installation" in str(error)
        else:
            assert spec.model is not None and Path(spec.model).name == method


def test_a_speculator_as_the_model(tmp_path: Path) -> None:
    path = speculator(tmp_path / "head", "eagle3", "org/target")
    config = resolve_engine_config(model=path, device="cpu")
    (spec,) = config.speculative
    assert config.model == "org/target"
    assert (spec.method, spec.model, spec.num_speculative_tokens) == ("eagle3", path, 6)
    own = resolve_engine_config(model=path, speculative_config={"method": "suffix"}, device="cpu")
    assert own.model == "org/target" and own.default_method == "suffix"
    plain = resolve_engine_config(model=path, speculative_config={"method": "none"}, device="cpu")
    assert plain.model == "org/target" and plain.speculative == ()
    two = resolve_engine_config(model=path, num_speculative_tokens=2, device="cpu")
    assert two.speculative[0].num_speculative_tokens == 2


def test_a_verifier_beside_the_speculator(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", architectures=["LlamaForCausalLM"])
    path = speculator(tmp_path / "head", "eagle3", "../target")
    config = resolve_engine_config(model=path, device="cpu")
    assert config.model is not None and Path(config.model).resolve() == Path(target).resolve()


def test_a_speculator_without_a_verifier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no verifier"):
        resolve_engine_config(model=speculator(tmp_path, "eagle3", None), device="cpu")


def test_a_kind_of_speculator_that_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'hydra' is not supported yet"):
        resolve_engine_config(model=speculator(tmp_path, "hydra", "T"), device="cpu")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"speculators_model_type": "peagle", "mask_token_id": 3}, 5),
        ({"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 3, "num_depths": 8}, 8),
        (
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "parallel_drafting": True,
                "num_lookahead_tokens": 7,
            },
            7,
        ),
    ],
)
def test_heads_that_draft_in_parallel(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    path = folder(tmp_path, **config)
    spec = SpeculativeConfig(model=path)
    assert (spec.method, spec.parallel_drafting, spec.num_speculative_tokens) == ("eagle3", True, expected)
    with pytest.raises(ConfigError, match="speculative_token_tree: parallel_drafting drafts chains"):
        SpeculativeConfig(model=path, speculative_token_tree=((0,), (1,)))
    with pytest.raises(ConfigError, match="speculative_dynamic_tree: parallel_drafting drafts chains"):
        SpeculativeConfig(model=path, speculative_dynamic_tree=True)


def test_who_says_parallel_drafting(tmp_path: Path) -> None:
    path = folder(tmp_path, architectures=["LlamaForCausalLMEagle3"], ptd_token_id=3)
    assert not SpeculativeConfig(
        model=path
    ).parallel_drafting  # published configurations leave it to the user
    assert SpeculativeConfig(model=path, parallel_drafting=True).parallel_drafting
    with pytest.raises(ConfigError, match="only for method 'draft_model' or 'eagle3', not for 'medusa'"):
        SpeculativeConfig(model=folder(tmp_path / "m", medusa_num_heads=3), parallel_drafting=True)


def test_a_head_of_another_method(tmp_path: Path) -> None:
    medusa = folder(tmp_path / "medusa", medusa_num_heads=3)
    eagle3 = folder(tmp_path / "eagle3", architectures=["LlamaForCausalLMEagle3"])
    plain = folder(tmp_path / "plain", architectures=["LlamaForCausalLM"])  # as some EAGLE heads say
    for method, path, told in (
        ("eagle3", medusa, "medusa"),
        ("eagle", eagle3, "eagle3"),
        ("mtp", medusa, "medusa"),
    ):
        with pytest.raises(ConfigError, match=f"method: '{method}' contradicts .* a head for '{told}'"):
            SpeculativeConfig(method=method, model=path)
    assert SpeculativeConfig(method="eagle", model=plain).method == "eagle"


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_an_eagle_head_that_calls_itself_a_llama(tmp_path: Path, file: str) -> None:
    """The authors' folders name no method; what tells them from a draft model is ``fc``."""
    import torch
    from safetensors.torch import save_file

    path = folder(tmp_path, architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    assert SpeculativeConfig(model=path).method == "draft_model"
    for names, method in ((["layers.0.mlp.up_proj.weight"], "draft_model"), (["fc.weight"], "eagle")):
        tensors = {name: torch.zeros(2, 2) for name in names}
        if file.endswith("bin"):
            torch.save(tensors, tmp_path / file)
        else:
            save_file(tensors, tmp_path / file)
        assert SpeculativeConfig(model=path).method == method
    (tmp_path / file).write_bytes(b"damaged")
    assert SpeculativeConfig(model=path).method == "draft_model"
    assert SpeculativeConfig(method="eagle", model=path).method == "eagle"


@pytest.mark.parametrize("said", [2, 5])
def test_medusa_heads_are_counted(tmp_path: Path, said: int) -> None:
    import torch
    from safetensors.torch import save_file

    path = folder(tmp_path, medusa_num_heads=said, medusa_num_layers=1)
    tensors = {f"{i}.0.linear.weight": torch.zeros(2, 2) for i in range(12)}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    assert SpeculativeConfig(model=path).num_speculative_tokens == 12
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(
        {f"medusa_head.{i}.0.linear.weight": torch.zeros(2, 2) for i in range(3)},
        tmp_path / "medusa_lm_head.pt",
    )
    assert SpeculativeConfig(model=path).num_speculative_tokens == 3


def test_pard_is_known_by_its_token(tmp_path: Path) -> None:
    path = folder(tmp_path, architectures=["LlamaForCausalLM"], num_hidden_layers=4, pard_token=7)
    spec = SpeculativeConfig(model=path)
    assert (spec.method, spec.parallel_drafting) == ("draft_model", True)
    tree = SpeculativeConfig(model=path, speculative_token_tree=[[0], [1]])  # type: ignore[list-item, arg-type]
    assert not tree.parallel_drafting
    plain = folder(tmp_path / "plain", architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    assert not SpeculativeConfig(model=plain).parallel_drafting

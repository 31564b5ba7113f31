"""EAGLE folders as published: every naming and kind of file gives the same head; errors name what is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.head_target import TOKENS, Target, as_speculator
from tests.fakes.heads import HeadShape, ReferenceHead, Weights, random_weights, save_head
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.loading import load_eagle, load_eagle3
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.base import ProposerContext
from draftwise.types import TargetOutput

CPU = torch.device("cpu")
EAGLE = HeadShape("eagle", 32, 32, 61)
EAGLE3 = HeadShape("eagle3", 32, 32, 61, feature_layers=(0, 1, 2), draft_vocab=20)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    with torch.inference_mode():
        yield


@pytest.fixture
def target() -> Target:
    return Target(TorchOps(torch.float32, CPU), layers=5)


def states_of(target: Target, layers: int = 6) -> list[Tensor]:
    """Made-up hidden states entering each layer, then those after the final norm."""
    generator = torch.Generator().manual_seed(3)
    return [*(torch.randn(TOKENS, 32, generator=generator) for _ in range(layers)), target.hidden]


def check(head: HeadModel, target: Target, shape: HeadShape, weights: Weights, window: int = TOKENS) -> None:
    """The head computes what the paper says of these weights. ``window``: rows that a row sees."""
    reference = ReferenceHead(shape, weights, target.embedding, target.output)
    states = states_of(target)
    features = reference.combine(states)
    combined = head.combine(TargetOutput(states[-1], dict(enumerate(states[:-1]))), torch.arange(TOKENS))
    torch.testing.assert_close(combined, features, rtol=1e-4, atol=1e-4)
    rows = TOKENS - 1
    seen = torch.ones(rows, rows).tril().triu(1 - window).bool()
    wanted, given = reference.rows(torch.tensor(target.tokens[1:]), features[:-1], torch.arange(rows), seen)
    table = np.arange(8, dtype=np.int32)
    kv = KVStorage(head.kv_layout(), 8, 4, torch.float32, CPU)
    batch = build_step_input([RowInput(target.tokens[1:], 1, table, first_key=1)], 4, CPU, position_offset=-1)
    output, logits = head.forward_logits(batch, features[:-1], kv)
    torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(output.features, given, rtol=2e-4, atol=2e-4)
    if shape.draft_vocab is not None:
        assert head.target_ids is not None and head.target_ids.tolist() == reference.target_ids.tolist()


def rewrite(folder: str, change: Callable[[Weights], Weights], file: str = "model.safetensors") -> None:
    """Rename or replace tensors, and store them in another kind of file."""
    old = Path(folder) / "model.safetensors"
    tensors = change(load_file(old))
    old.unlink()
    if file.endswith(".safetensors"):
        save_file(tensors, Path(folder) / file)
    else:
        torch.save(tensors, Path(folder) / file)


@pytest.mark.parametrize("file", ["model.safetensors", "eagle.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle(tmp_path: Path, target: Target, file: str, prefix: str) -> None:
    weights = random_weights(EAGLE)
    folder = save_head(tmp_path, EAGLE, weights)
    rewrite(folder, lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}, file)
    check(load_eagle(target.context("eagle", folder)), target, EAGLE, weights)


def test_eagle_with_bias_embedding_and_two_layers(tmp_path: Path, target: Target) -> None:
    shape = replace(EAGLE, fc_bias=True, own_embedding=True, layers=2)
    weights = random_weights(shape)
    check(load_eagle(target.context("eagle", save_head(tmp_path, shape, weights))), target, shape, weights)


@pytest.mark.parametrize("first", ["midlayer.", "layers.0.", "model.layers.0."])
def test_eagle3(tmp_path: Path, target: Target, first: str) -> None:
    weights = random_weights(EAGLE3)
    folder = save_head(tmp_path, EAGLE3, weights)
    rewrite(folder, lambda tensors: {n.replace("midlayer.", first): tensor for n, tensor in tensors.items()})
    check(load_eagle3(target.context("eagle3", folder)), target, EAGLE3, weights)


LATENT = (12, 16, 8, 4, 6)


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [(LATENT, 1), ((None, *LATENT[1:]), 1), (LATENT, 2)],
    ids=["", "plain queries", "two layers"],
)
def test_eagle3_with_latent_attention(
    tmp_path: Path, target: Target, sizes: tuple[int | None, int, int, int, int], layers: int
) -> None:
    """Heads for DeepSeek and Kimi. What is stored is the latent and the shared key."""
    shape = replace(EAGLE3, latent=sizes, layers=layers)
    weights = random_weights(shape)
    head = load_eagle3(target.context("eagle3", save_head(tmp_path, shape, weights)))
    check(head, target, shape, weights)
    assert {spec.tensors for spec in head.kv_layout()} == {(("latent", (1, 20)),)}


def test_latent_attention_in_an_eagle_head_is_refused(tmp_path: Path, target: Target) -> None:
    shape = HeadShape("eagle", 32, 32, 61, latent=LATENT)
    folder = save_head(tmp_path, shape, random_weights(shape))
    refused(load_eagle, target.context("eagle", folder), "latent attention", "is not supported")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]}},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            }
        },
    ],
    ids=["type", "section", "newer"],
)
def test_rotations_of_several_positions_over_text_are_plain_ones(
    tmp_path: Path, target: Target, rope: dict[str, Any]
) -> None:
    """Heads for Qwen-VL."""
    shape = replace(EAGLE3, extra=rope)
    weights = random_weights(shape)
    check(load_eagle3(target.context("eagle3", save_head(tmp_path, shape, weights))), target, shape, weights)


def test_eagle3_architecture_names_and_default_layers(tmp_path: Path, target: Target) -> None:
    """Without a list of layers: those entering 2, L // 2 and L - 3."""
    shape = replace(EAGLE3, feature_layers=(1, 2, 3))  # of 6 layers: 2, 3, 3 is no rising list; of 5: 2, 2, 2
    deep = Target(TorchOps(torch.float32, CPU), layers=8)
    weights = random_weights(shape)
    folder = save_head(tmp_path, shape, weights)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    config["architectures"] = ["Eagle3LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = load_eagle3(deep.context("eagle3", folder))
    assert head.feature_layers == (2, 4, 5)


@pytest.mark.parametrize(
    ("ids", "expected", "said"),
    [
        ([1, 3, 5], (2, 4, 6), True),  # outputs of these layers: SpecForge's large models, nvidia
        ([5, 1, 3], (2, 4, 6), True),
        ([2, 4, 5], (2, 4, 5), False),  # what enters these
        ([0, 3, 5], (0, 3, 5), False),
        ([], (2, 4, 5), False),  # the defaults
        (None, (2, 4, 5), False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_numbers_of_layers(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    ids: list[int] | None,
    expected: tuple[int, ...],
    said: bool,
    nested: bool,
) -> None:
    """Ids that begin with 1 count outputs, and others inputs; nothing in a list means the defaults."""
    deep = Target(TorchOps(torch.float32, CPU), layers=8)
    shape = replace(EAGLE3, feature_layers=(1, 2, 3))
    folder = save_head(tmp_path, shape, random_weights(shape))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    place = config.setdefault("eagle_config", {}) if nested else config
    place["eagle_aux_hidden_state_layer_ids"] = ids
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "draftwise"):
        head = load_eagle3(deep.context("eagle3", folder))
    assert head.feature_layers == expected
    assert ("read as the outputs of these layers" in caplog.text) is said


def test_windows_of_a_speculator(tmp_path: Path, target: Target) -> None:
    """The current default of their trainer: the head's own attention slides."""
    shape = replace(EAGLE3, norm_before_residual=True)
    weights = random_weights(shape)
    folder = save_head(tmp_path, shape, weights)
    as_speculator(folder)
    whole = load_eagle3(target.context("eagle3", folder))
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = load_eagle3(target.context("eagle3", folder))
    check(whole, target, shape, weights)
    check(head, target, shape, weights, window=4)
    with pytest.raises(AssertionError):
        check(head, target, shape, weights)
    for change, words in (
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"sliding_window": None}, "'sliding_window'"),
    ):
        config["transformer_layer_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match=words):
            load_eagle3(target.context("eagle3", folder))
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 4}


def test_speculators_format(tmp_path: Path, target: Target) -> None:
    shape = replace(EAGLE3, norm_before_residual=True, own_embedding=True)
    weights = random_weights(shape)
    folder = save_head(tmp_path, shape, weights)
    as_speculator(folder)
    context = target.context("eagle3", folder)
    assert context.speculative.num_speculative_tokens == 3
    check(load_eagle3(context), target, shape, weights)


PEAGLE = replace(EAGLE3, mask_token=60, norm_before_fc=True, layers=2)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("shape", [PEAGLE, replace(PEAGLE, norm_before_fc=False, fc_norm=True, layers=1)])
def test_peagle(tmp_path: Path, target: Target, shape: HeadShape, dims: int) -> None:
    """Shapes of mask_hidden in use: [1, 3H], [1, 1, 3H]; [3H] is as clear."""
    weights = random_weights(shape)
    folder = save_head(tmp_path, shape, weights)
    stored = (*(1,) * (dims - 1), 96)
    rewrite(folder, lambda tensors: tensors | {"mask_hidden": tensors["mask_hidden"].reshape(stored)})
    head = load_eagle3(target.context("eagle3", folder))
    check(head, target, shape, weights)
    wanted = ReferenceHead(shape, weights, target.embedding, target.output).join(weights["mask_hidden"])
    assert head.mask_token == 60 and head.mask_feature is not None
    torch.testing.assert_close(head.mask_feature, wanted, rtol=1e-4, atol=1e-4)


def test_peagle_without_states_of_layers(tmp_path: Path, target: Target) -> None:
    shape = replace(EAGLE3, mask_token=3, feature_layers=None)
    weights = random_weights(shape)
    head = load_eagle3(target.context("eagle3", save_head(tmp_path, shape, weights)))
    assert head.mask_feature is not None and torch.equal(head.mask_feature, weights["mask_hidden"])


def test_peagle_in_speculators_format(tmp_path: Path, target: Target) -> None:
    weights = random_weights(PEAGLE)
    folder = save_head(tmp_path, PEAGLE, weights)
    as_speculator(folder, speculators_model_type="peagle", mask_token_id=59)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["norm_before_residual"]  # False, unlike in EAGLE-3 folders
    (tmp_path / "config.json").write_text(json.dumps(config))
    context = target.context("eagle3", folder)
    assert context.speculative.parallel_drafting and context.speculative.num_speculative_tokens == 3
    head = load_eagle3(context)
    check(head, target, PEAGLE, weights)
    assert head.mask_token == 59


def test_a_peagle_head_may_draft_token_by_token(tmp_path: Path, target: Target) -> None:
    shape = replace(PEAGLE, extra={"parallel_drafting": False})
    folder = save_head(tmp_path, shape, random_weights(shape))
    head = load_eagle3(target.context("eagle3", folder))
    assert head.mask_token is None and head.mask_feature is None
    assert load_eagle3(target.context("eagle3", folder, parallel=True)).mask_token == 60


@pytest.mark.parametrize(
    ("config", "mask", "message"),
    [
        ({"ptd_token_id": None}, (1, 96), "parallel_drafting: config.json names no mask token"),
        ({"ptd_token_id": 61}, (1, 96), "mask token 61 is not in the vocabulary of 61 tokens"),
        ({"ptd_token_id": -1}, (1, 96), "mask token -1 is not in the vocabulary"),
        ({}, None, "parallel_drafting: tensor mask_hidden is missing"),
        ({}, (1, 64), r"mask_hidden has shape \[1, 64\], expected \[1, 96\]"),
        ({}, (3, 32), r"mask_hidden has shape \[3, 32\], expected \[1, 96\]"),
    ],
)
def test_peagle_heads_that_do_not_fit(
    tmp_path: Path, target: Target, config: dict[str, Any], mask: tuple[int, ...] | None, message: str
) -> None:
    shape = replace(PEAGLE, extra=config)
    weights = random_weights(shape)
    del weights["mask_hidden"]
    if mask is not None:
        weights["mask_hidden"] = torch.zeros(mask)
    folder = save_head(tmp_path, shape, weights)
    with pytest.raises(ModelLoadError, match=message):
        load_eagle3(target.context("eagle3", folder))


def test_eagle3_of_another_size(tmp_path: Path, target: Target) -> None:
    shape = replace(EAGLE3, hidden=24, heads=3, kv_heads=1, own_embedding=True, norm_before_fc=True)
    weights = random_weights(shape)
    check(load_eagle3(target.context("eagle3", save_head(tmp_path, shape, weights))), target, shape, weights)


def test_unused_tensors_are_said_once(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_head(tmp_path, EAGLE3, random_weights(EAGLE3))
    rewrite(folder, lambda tensors: tensors | {"extra.weight": torch.zeros(2)})
    with caplog.at_level(logging.WARNING, "draftwise"):
        load_eagle3(target.context("eagle3", folder))
    assert "not used: extra.weight" in caplog.text and "t2d" not in caplog.text


def refused(load: Callable[[ProposerContext], HeadModel], context: ProposerContext, *words: str) -> None:
    with pytest.raises((ModelLoadError, ConfigError)) as error:
        load(context)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_head_for_another_target_is_refused_by_name(tmp_path: Path, target: Target) -> None:
    ops = TorchOps(torch.float32, CPU)
    eagle = save_head(tmp_path / "1", EAGLE, random_weights(EAGLE))
    eagle3 = save_head(tmp_path / "3", EAGLE3, random_weights(EAGLE3))
    wide, large = Target(ops, hidden=48), Target(ops, vocab=70)
    refused(load_eagle, wide.context("eagle", eagle), "hidden_size 32", "48")
    refused(load_eagle, large.context("eagle", eagle), "vocab_size 61", "70", "another target")
    refused(load_eagle3, wide.context("eagle3", eagle3), "target_hidden_size 32", "48", "another target")
    refused(load_eagle3, large.context("eagle3", eagle3), "vocab_size 61", "70")
    shallow = Target(ops, layers=1)
    refused(
        load_eagle3, shallow.context("eagle3", eagle3), "eagle_aux_hidden_state_layer_ids [0, 1, 2]", "0 to 1"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"midlayer.mlp.up_proj.weight": None}, ["missing", "layers.0.mlp.up_proj.weight"]),
        ({"norm.weight": torch.ones(33)}, ["norm.weight has shape [33], expected [32]"]),
        ({"lm_head.weight": torch.ones(21, 32)}, ["lm_head.weight has shape [21, 32], expected [20, 32]"]),
        ({"d2t": torch.full((20,), 60)}, ["d2t leads to tokens 60 to 79", "another target"]),
        ({"d2t": torch.zeros(19, dtype=torch.int64)}, ["d2t", "[19]", "20 draft tokens"]),
        ({"d2t": None}, ["vocabulary of 20 tokens", "61", "no d2t"]),
        ({"lm_head.weight": None}, ["draft_vocab_size 20 needs an lm_head"]),
        ({"fc.weight": torch.ones(32, 64)}, ["fc.weight has shape [32, 64], expected [32, 96]"]),
        ({"midlayer.mlp.experts.0.up_proj.weight": torch.ones(2)}, ["experts", "not supported"]),
        ({"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}, ["quantised", "fc.weight"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    tmp_path: Path, target: Target, change: dict[str, Tensor | None], words: list[str]
) -> None:
    folder = save_head(tmp_path, EAGLE3, random_weights(EAGLE3))
    rewrite(folder, lambda old: {n: t for n, t in (old | change).items() if t is not None})
    refused(load_eagle3, target.context("eagle3", folder), *words)


def test_settings_that_do_not_fit(tmp_path: Path, target: Target) -> None:
    folder = save_head(tmp_path, EAGLE3, random_weights(EAGLE3))
    as_speculator(folder, speculators_model_type="mtp")
    refused(load_eagle3, target.context("eagle3", folder), "'mtp' is not a head of method 'eagle3'")
    as_speculator(folder, transformer_layer_config=None)
    refused(load_eagle3, target.context("eagle3", folder), "no 'transformer_layer_config'")
    bad = replace(EAGLE3, extra={"eagle_aux_hidden_state_layer_ids": "0,1,2"})
    refused(
        load_eagle3, target.context("eagle3", save_head(tmp_path / "b", bad, {})), "list of layer numbers"
    )
    missing = replace(EAGLE3, extra={"intermediate_size": None})
    refused(
        load_eagle3, target.context("eagle3", save_head(tmp_path / "c", missing, {})), "intermediate_size"
    )
    refused(load_eagle3, target.context("eagle3", str(tmp_path / "nowhere")), "nowhere")


def test_a_damaged_file(tmp_path: Path, target: Target) -> None:
    folder = save_head(tmp_path, EAGLE3, random_weights(EAGLE3))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    refused(load_eagle3, target.context("eagle3", folder), "model.safetensors is truncated or damaged")

"""MTP layers against the paper's formulas in plain float32, in every published naming, read from their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.head_target import TOKENS, Target
from tests.fakes.mtp import MtpShape, ReferenceMtp, random_layers, save_mtp
from tests.native import native_or_skip
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.loading import load_mtp
from draftwise.models.heads.mtp_names import mtp_form, mtp_tensors
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.base import ProposerContext
from draftwise.types import TargetOutput

CPU = torch.device("cpu")
SHAPES = {
    "DeepSeek": MtpShape("deepseek"),
    "Qwen3-Next": MtpShape("qwen", qk_norm=True),
    "MiMo": MtpShape("mimo", qkv_bias=True),
    "speculators": MtpShape("speculators", qk_norm=True),
    "DeepSeek, 3 layers": MtpShape("deepseek", layers=3),
    "Qwen3-Next, 2 layers": MtpShape("qwen", layers=2),
}


def torch_ops() -> Ops:
    return TorchOps(torch.float32, CPU)


def native_ops() -> Ops:
    return NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 2), torch.float32)


@pytest.fixture(params=[torch_ops, native_ops], ids=["torch", "native"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ops:
    made: Ops = request.param()
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch" if isinstance(made, TorchOps) else "native")
    return made


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def step(tokens: Sequence[int], first: int, first_key: int = 1) -> Any:
    table = np.array([3, 1, 4, 2, 0, 5, 6, 7], np.int32)
    return build_step_input([RowInput(tokens, first, table, first_key=first_key)], 4, CPU, position_offset=-1)


def storage(head: HeadModel) -> KVStorage:
    kv = KVStorage(head.kv_layout(), 8, 4, torch.float32, CPU)
    for i in range(len(head.kv_layout())):
        kv.layer(i)[0].fill_(float("nan"))  # slots that nobody wrote must not be read
    return kv


@pytest.mark.parametrize("name", SHAPES)
def test_layers_compute_what_the_paper_says(name: str, tmp_path: Path, ops: Ops) -> None:
    shape = SHAPES[name]
    weights = random_layers(shape)
    target = Target(ops)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    head = load_mtp(target.context("mtp", save_mtp(tmp_path, shape, weights)))
    assert head.num_depths == shape.layers and head.target_ids is None
    combined = head.combine(TargetOutput(target.hidden), torch.arange(TOKENS))
    torch.testing.assert_close(combined, target.hidden)
    for sizes in ([TOKENS - 1], [1, 5, 1, 9, 2, TOKENS - 19]):
        kv = storage(head)
        features, first = target.hidden[:-1], 1
        for depth in range(shape.layers):
            fed = target.tokens[first:]
            wanted_logits, wanted = reference.rows(depth, torch.tensor(fed), features, first)
            logits, given, at = [], [], 0
            for size in (*sizes[:-1], len(fed) - sum(sizes[:-1])):
                batch = step(fed[at : at + size], first + at, 1 + depth)
                output, part = head.forward_logits(batch, features[at : at + size], kv, None, depth)
                logits.append(part)
                given.append(output.features)
                at += size
            torch.testing.assert_close(torch.cat(logits), wanted_logits, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(torch.cat(given), wanted, rtol=2e-4, atol=2e-4)
            features, first = wanted[:-1], first + 1


@pytest.mark.parametrize("name", ["DeepSeek", "Qwen3-Next", "MiMo"])
def test_drafts_go_on_from_the_layers_own_features(name: str, tmp_path: Path, ops: Ops) -> None:
    shape = SHAPES[name]
    weights = random_layers(shape)
    target = Target(ops)
    head = load_mtp(target.context("mtp", save_mtp(tmp_path, shape, weights)))
    known, count = TOKENS - 4, 5
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    wanted = reference.draft(target.tokens[:known], target.hidden[: known - 1], count)
    kv = storage(head)
    batch = step(target.tokens[1:known], 1)
    output, logits = head.forward_logits(batch, target.hidden[: known - 1], kv, [known - 2])
    feature, drafts = output.features[-1:], [int(logits.argmax())]
    while len(drafts) < count:
        batch = step([drafts[-1]], known + len(drafts) - 1)
        output, logits = head.forward_logits(batch, feature, kv)
        feature = output.features
        drafts.append(int(logits.argmax()))
    assert drafts == wanted
    # and all at once, where the kernels can, from the second row on
    kv = storage(head)
    head.forward(step(target.tokens[1:2], 1), target.hidden[:1], kv)
    chains = head.draft_chains(
        step(target.tokens[2:known], 2), target.hidden[1 : known - 1], kv, [known - 3], count
    )
    if isinstance(ops, NativeOps):
        assert chains is not None and chains[0].tolist() == [wanted]


def test_the_first_rows_token_counts_only_where_the_form_says_so(tmp_path: Path) -> None:
    """DeepSeek and MiMo count the embedding of token 1 as zero, Qwen3-Next does not."""
    for name, counts in (("DeepSeek", False), ("MiMo", False), ("Qwen3-Next", True)):
        target = Target(torch_ops())
        folder = save_mtp(tmp_path / name, SHAPES[name], random_layers(SHAPES[name]))
        head = load_mtp(target.context("mtp", folder))
        rows = []
        for token in (5, 9):
            rows.append(head.forward(step([token], 1), target.hidden[:1], storage(head)).hidden)
        assert torch.equal(rows[0], rows[1]) != counts


def test_own_embedding_and_output_layer(tmp_path: Path) -> None:
    shape = SHAPES["DeepSeek"]
    target = Target(torch_ops())
    folder = Path(save_mtp(tmp_path, shape, random_layers(shape)))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    own = torch.randn(2, 61, 32, generator=generator)
    tensors["model.layers.2.embed_tokens.weight"] = own[0].clone()
    tensors["model.layers.2.shared_head.head.weight"] = own[1].clone()
    save_file(tensors, folder / "model.safetensors")
    head = load_mtp(target.context("mtp", str(folder)))
    reference = ReferenceMtp(shape, random_layers(shape), own[0], own[1])
    wanted, _ = reference.rows(0, torch.tensor(target.tokens[1:]), target.hidden[:-1], 1)
    _, logits = head.forward_logits(step(target.tokens[1:], 1), target.hidden[:-1], storage(head))
    torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)


def refused(context: ProposerContext, *words: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        load_mtp(context)
    for word in words:
        assert word in str(error.value), str(error.value)


def change(folder: str, tensors: dict[str, Tensor | None]) -> None:
    path = Path(folder) / "model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, path)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    shape = SHAPES["DeepSeek"]
    target = Target(torch_ops())
    folder = save_mtp(tmp_path / "a", shape, random_layers(shape))
    refused(Target(torch_ops(), hidden=48).context("mtp", folder), "hidden_size 32", "48", "another target")
    refused(Target(torch_ops(), vocab=64).context("mtp", folder), "vocab_size 61", "64", "another target")
    change(folder, {"model.layers.2.enorm.weight": None, "model.layers.2.mlp.up_proj.weight": None})
    refused(target.context("mtp", folder), "missing: 0.enorm.weight, layers.0.mlp.up_proj.weight")
    folder = save_mtp(tmp_path / "b", shape, random_layers(shape))
    change(folder, {"model.layers.2.eh_proj.weight": torch.zeros(32, 65)})
    refused(
        target.context("mtp", folder), "model.layers.2.eh_proj.weight has shape [32, 65], expected [32, 64]"
    )
    folder = save_mtp(tmp_path / "c", shape, random_layers(shape))
    change(folder, {"model.layers.2.mlp.experts.0.up_proj.weight": torch.zeros(2)})
    refused(target.context("mtp", folder), "experts", "not supported")
    gated = MtpShape("qwen")
    folder = save_mtp(tmp_path / "e", gated, random_layers(gated))
    change(folder, {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(64, 32)})
    refused(
        target.context("mtp", folder),
        "an output gate",
        "mtp.layers.0.self_attn.q_proj.weight",
        "64 rows for 4 heads of 8",
    )
    two = MtpShape("deepseek", layers=2)
    folder = save_mtp(tmp_path / "d", two, random_layers(two))
    heads = {
        f"model.layers.{2 + i}.shared_head.head.weight": torch.full((61, 32), float(i)) for i in range(2)
    }
    change(folder, dict(heads))
    refused(target.context("mtp", folder), "model.layers.3.shared_head.head.weight differs")
    other = tmp_path / "none"
    other.mkdir()
    save_file({"model.embed_tokens.weight": torch.zeros(61, 32)}, other / "model.safetensors")
    (other / "config.json").write_text("{}")
    refused(target.context("mtp", str(other)), "has no MTP layers")
    refused(
        target.context("mtp", None, target_path=str(other)), "the target's own checkpoint has no MTP layers"
    )


def test_names() -> None:
    names = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"]
    assert mtp_form(names, False) is None and mtp_tensors(names) == set()
    names += [
        "model.layers.2.eh_proj.weight",
        "model.layers.2.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
    ]
    assert mtp_tensors(names) == {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"}


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_dynamic"])
def test_quantised_layers(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``quantization`` rounds the head's own layers, whatever the target's are."""
    monkeypatch.setenv("DRAFTWISE_KERNELS", "native")
    shape = MtpShape("deepseek", hidden=64, inner=128, head_dim=16)
    target = Target(native_ops(), hidden=64)
    folder = save_mtp(tmp_path, shape, random_layers(shape, scale=0.1))
    plain = target.context("mtp", folder)
    rounded = replace(plain, speculative=replace(plain.speculative, quantization=scheme))
    results = []
    for context in (plain, rounded):
        head = load_mtp(context)
        batch = step(target.tokens[1:], 1)
        results.append(head.forward_logits(batch, target.hidden[:-1], storage(head))[1])
    error = (results[0] - results[1]).abs().max() / results[0].abs().max()
    assert 0 < error < (0.1 if scheme == "int8_dynamic" else 0.5)

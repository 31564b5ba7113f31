"""Draft heads and MTP layers whose folders are quantised, against folders of the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.head_target import TOKENS, Target
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.mtp import MtpShape, random_layers, save_mtp
from tests.native import native_or_skip
from tests.unit.test_quantized_checkpoints import CASES, GROUP
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.loading import load_eagle, load_eagle3, load_mtp
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.types import TargetOutput

CPU = torch.device("cpu")
HIDDEN, INNER, VOCAB = 64, 96, 61
SIZES: dict[str, Any] = {"hidden": HIDDEN, "inner": INNER, "vocab": VOCAB, "head_dim": 16}
LOADERS = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}
KINDS = ("eagle", "eagle3", "deepseek", "qwen", "mimo", "speculators")
"""Heads, and MTP layers by whose names they go."""


def write(folder: Path, kind: str) -> str:
    """A float32 head's folder; returns its method."""
    if kind in ("eagle", "eagle3"):
        shape = HeadShape(kind, target_hidden=HIDDEN, **SIZES)
        save_head(folder, shape, random_weights(shape))
        return kind
    layers = MtpShape(kind, **SIZES)
    save_mtp(folder, layers, random_layers(layers))
    return "mtp"


def quantise(folder: Path, to: Path, form: str) -> Path:
    """Write the head of ``folder`` in a form of `CASES` to ``to``, and its numbers back to ``folder``. What is no
    linear layer of a layer stays as it is. Layers are drawn anew, by the form's own writer."""
    writer, description = CASES[form]
    plain = load_file(folder / "model.safetensors")
    quantised = dict(plain)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in plain.items():
        if tensor.ndim != 2 or "lm_head" in name:
            continue
        outputs, inputs = tensor.shape
        written, weight = writer(outputs, inputs, generator)
        base = name.removesuffix(".weight")
        del quantised[name]
        quantised |= {base + suffix: value for suffix, value in written.items() if suffix != ".bias"}
        plain[name] = weight.float().contiguous()
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": description}))
    save_file(quantised, to / "model.safetensors")
    save_file(plain, folder / "model.safetensors")
    return to


def torch_ops() -> Ops:
    return TorchOps(torch.float32, CPU)


def logits_of(head: HeadModel, target: Target) -> Tensor:
    """[T - 1, Vd] of a text, in two chunks, as a head sees it."""
    kv = KVStorage(head.kv_layout(), 8, 4, torch.float32, CPU)
    table = np.array([3, 1, 4, 2, 0, 5, 6, 7], np.int32)
    hidden = target.hidden
    features = head.combine(TargetOutput(hidden, (hidden,) * 3), torch.arange(TOKENS))[:-1]
    found = []
    for start, end in ((1, 9), (9, TOKENS)):
        rows = RowInput(target.tokens[start:end], start, table, first_key=1)
        batch = build_step_input([rows], 4, CPU, position_offset=-1)
        found.append(head.forward_logits(batch, features[start - 1 : end - 1], kv, None)[1].clone())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("form", "kind"),
    [  # every form with every second kind, and every kind with every second form; --all: together
        pytest.param(form, kind, marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, form in enumerate(CASES)
        for j, kind in enumerate(KINDS)
    ],
)
def test_a_head_computes_what_its_codes_stand_for(
    form: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    method = write(tmp_path / "plain", kind)
    folder = quantise(tmp_path / "plain", tmp_path / "quantised", form)
    target = Target(torch_ops(), hidden=HIDDEN)
    load = LOADERS[method]
    with torch.inference_mode():
        wanted = logits_of(load(target.context(method, str(tmp_path / "plain"))), target)
        found = logits_of(load(target.context(method, str(folder))), target)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "deepseek"])
@pytest.mark.parametrize("form", ["awq", "w4a16", "gptq 8 bits"])
def test_native_kernels_keep_the_codes(
    form: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes than floats have, and near the numbers that the codes stand for."""
    monkeypatch.setenv("DRAFTWISE_KERNELS", "native")
    native = native_or_skip()
    method = write(tmp_path / "plain", kind)
    folder = quantise(tmp_path / "plain", tmp_path / "quantised", form)
    target = Target(NativeOps(native, ThreadPool(native, 2), torch.float32), hidden=HIDDEN)
    load = LOADERS[method]
    with torch.inference_mode():
        plain = load(target.context(method, str(tmp_path / "plain")))
        codes = load(target.context(method, str(folder)))
        wanted, found = logits_of(plain, target), logits_of(codes, target)
    assert codes.weight_bytes() < plain.weight_bytes()
    assert float((found - wanted).abs().mean()) < 0.02 * float(wanted.std())


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    target = Target(torch_ops(), hidden=HIDDEN)

    def refused(folder: Path, *words: str, **more: Any) -> None:
        with pytest.raises(ModelLoadError) as error:
            load_eagle3(target.context("eagle3", str(folder), **more))
        for word in words:
            assert word in str(error.value), str(error.value)

    write(tmp_path / "plain", "eagle3")
    folder = quantise(tmp_path / "plain", tmp_path / "quantised", "awq")
    config = json.loads((folder / "config.json").read_text())

    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    refused(folder, "missing", "fc.weight")
    other = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": other}))
    refused(folder, str(folder), "hqq", "not supported")
    (folder / "config.json").write_text(json.dumps(config))

    tensors = load_file(folder / "model.safetensors")
    head, _ = CASES["awq"][0](64, HIDDEN, torch.Generator().manual_seed(1))
    del tensors["lm_head.weight"]  # it would borrow the target's, and the codes would be forgotten
    save_file(
        tensors | {"lm_head" + suffix: value for suffix, value in head.items()}, folder / "model.safetensors"
    )
    refused(folder, "lm_head.qweight", "floats only")


def test_a_float_head_beside_a_note_about_its_target_is_read(tmp_path: Path) -> None:
    """config.json copied from a quantised target says nothing of a head whose tensors are floats."""
    write(tmp_path / "head", "eagle3")
    path = tmp_path / "head" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "hqq"}})
    )
    target = Target(torch_ops(), hidden=HIDDEN)
    load_eagle3(target.context("eagle3", str(tmp_path / "head")))


def test_other_codes_than_the_folder_has_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "plain", "eagle3")
    folder = quantise(tmp_path / "plain", tmp_path / "quantised", "awq")
    from dataclasses import replace

    target = Target(torch_ops(), hidden=HIDDEN)
    context = target.context("eagle3", str(folder))
    spec = replace(context.speculative, quantization="int8")
    with pytest.raises(ModelLoadError, match="quantised already"):
        load_eagle3(replace(context, speculative=spec))


def test_groups_are_found_by_the_checkpoints_names(tmp_path: Path) -> None:
    """Patterns of config groups name modules as the checkpoint does: midlayer, not layers.0."""
    write(tmp_path / "plain", "eagle3")
    folder = quantise(tmp_path / "plain", tmp_path / "quantised", "w4a16")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    four = config["quantization_config"]["config_groups"]["group_0"]
    eight = {**four, "weights": {**four["weights"], "num_bits": 8}, "targets": ["re:layers\\..*"]}
    found = {"group_0": eight, "group_1": {**four, "targets": ["re:midlayer\\..*", "fc"]}}
    config["quantization_config"]["config_groups"] = found
    path.write_text(json.dumps(config))
    target = Target(torch_ops(), hidden=HIDDEN)
    with torch.inference_mode():
        wanted = logits_of(load_eagle3(target.context("eagle3", str(tmp_path / "plain"))), target)
        got = logits_of(load_eagle3(target.context("eagle3", str(folder))), target)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert four["weights"]["group_size"] == GROUP

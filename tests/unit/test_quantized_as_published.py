"""Quantised checkpoints as they are published: names that writers do not agree on, weights that nothing explains, and
devices other than the host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.fake_cuda import fake_cuda
from tests.unit.test_quantized_checkpoints import CASES, CPU, as_general, gptq, tensors_config, write
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.source import checkpoint_format
from draftwise.quantization.parsing import parse_checkpoint_format


def logits(folder: Path) -> Tensor:
    model = load_model(folder, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))
    kv = KVStorage(model.kv_layout(), 8, 4, torch.float32, CPU)
    rows = [RowInput([3, 9, 1, 7, 5], 0, torch.arange(8, dtype=torch.int32).numpy())]
    with torch.inference_mode():
        return model.forward_logits(build_step_input(rows, 4, CPU), kv)[1]


def renamed(folder: Path, old: str, new: str, **config: Any) -> None:
    tensors = {name.replace(old, new): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("general", [False, True])
def test_one_scale_goes_by_two_names(tmp_path: Path, general: bool) -> None:
    """Ministral 3 and Devstral 2 say ``weight_scale_inv``, and name no blocks."""
    quantized, plain = write(tmp_path, "fp8 tensor")
    renamed(quantized, ".weight_scale", ".weight_scale_inv", weight_block_size=None, dequantize=False)
    renamed(quantized, ".input_scale", ".activation_scale")
    if general:
        as_general(quantized), as_general(plain)
    torch.testing.assert_close(logits(quantized), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("fp8 tensor", "F8_E4M3"), ("w8a8", "I8")])
@pytest.mark.parametrize("general", [False, True])
def test_codes_that_nothing_explains_are_no_numbers(
    tmp_path: Path, name: str, kind: str, general: bool
) -> None:
    """Some tools say how weights are stored in a file of their own. Their scales would be passed over."""
    quantized = write(tmp_path, name)[0]
    raw = json.loads((quantized / "config.json").read_text())
    del raw["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(raw))
    if general:
        as_general(quantized)
    with pytest.raises(ModelLoadError, match=f"stored as {kind}" if general else "does not have: .*_scale"):
        logits(quantized)


def test_zero_points_that_writers_mean_differently_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act_order(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, weight = gptq(outputs, inputs, generator)
        tensors[".g_idx"] = tensors[".g_idx"].flip(0).contiguous()
        tensors[".qzeros"].fill_(-1)  # 15 in all of them: 16, or 0
        return tensors, weight

    monkeypatch.setitem(CASES, "act order", (act_order, CASES["gptq"][1]))
    with pytest.raises(ModelLoadError, match="zero point of 16"):
        logits(write(tmp_path, "act order")[0])


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        (["weight_input", "weight_output"], None),
        (["weight_input", "input"], "rotates more"),
        ([], None),
    ],
)
def test_rotations_that_are_not_in_the_weights_are_named(places: list[str], refused: str | None) -> None:
    turns = {
        "R": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": place} for place in places]}
    }
    description = tensors_config("pack-quantized") | {"transform_config": {"config_groups": turns}}
    if refused is None:
        assert parse_checkpoint_format(description).name == "compressed-tensors w4a16"
        return
    with pytest.raises(ModelLoadError, match=refused):
        parse_checkpoint_format(description)


def test_the_form_may_stand_in_the_text_part(tmp_path: Path) -> None:
    """As Kimi K2.5 has it."""
    raw = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"quantization_config": tensors_config("pack-quantized")},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = checkpoint_format(tmp_path)
    assert found is not None and found.name == "compressed-tensors w4a16"


@pytest.fixture
def device() -> Iterator[torch.device]:
    with fake_cuda():
        yield torch.device("cuda", 0)


@pytest.mark.parametrize(
    "name", ["awq", "gptq", "gptq desc_act", "w8a16", "w8a16 groups", "w8a8", "fp8 blocks", "nf4"]
)
def test_codes_come_to_a_device(tmp_path: Path, device: torch.device, name: str) -> None:
    quantized, _ = write(tmp_path, name)
    model = load_model(quantized, dtype=torch.bfloat16, device=device, ops=TorchOps(torch.bfloat16, device))
    assert model.device.type == "cuda"

"""Every kind of file a head's tensors may lie in, and what is wrong with those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.models.heads.tensors import HeadTensors, scan_head
from draftwise.models.weights import WeightPlan

A, B = torch.arange(12.0).view(3, 4), torch.arange(4, dtype=torch.bfloat16)


def same(found: HeadTensors) -> None:
    assert set(found) == {"a", "b"} and found["a"].shape == (3, 4)
    assert torch.equal(found.read("a"), A) and torch.equal(found.read("b"), B)
    targets = {"a": torch.empty(3, 4, dtype=torch.bfloat16), "b": torch.empty(4)}
    found.copy(targets)
    assert torch.equal(targets["a"], A.bfloat16()) and torch.equal(targets["b"], B.float())


def test_safetensors(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    same(scan_head(tmp_path))


def test_safetensors_of_another_name_or_several(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "head.safetensors")
    same(scan_head(tmp_path))
    save_file({"c": A}, tmp_path / "more.safetensors")
    with pytest.raises(ModelLoadError, match=r"several weight files and no index: head\.safetensors, more"):
        scan_head(tmp_path)
    same(scan_head(tmp_path, "none.safetensors", "head.safetensors"))


def test_indexed_safetensors(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "1.safetensors")
    save_file({"b": B}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    same(scan_head(tmp_path))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before 1.6"])
def test_pickles(tmp_path: Path, new: bool) -> None:
    torch.save({"a": A, "b": B}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    same(scan_head(tmp_path))


def test_indexed_pickles(tmp_path: Path) -> None:
    torch.save({"a": A}, tmp_path / "1.bin")
    index = {"weight_map": {"a": "1.bin", "b": "2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"names 2\.bin, which is missing"):
        scan_head(tmp_path)
    torch.save({"b": B}, tmp_path / "2.bin")
    same(scan_head(tmp_path))
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../1.bin"}}')
    with pytest.raises(ModelLoadError, match=r"not in its folder: \.\./1\.bin"):
        scan_head(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="no weight_map"):
        scan_head(tmp_path)


@pytest.mark.parametrize("content", [[A], {"a": {"b": B}}, {"a": 3}])
def test_pickles_of_something_else(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="must hold a mapping of names to tensors"):
        scan_head(tmp_path)


def test_a_truncated_pickle(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": A}, file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
        scan_head(tmp_path)


def plan_of(shapes: dict[str, tuple[int, ...]]) -> tuple[WeightPlan, dict[str, Tensor]]:
    plan = WeightPlan(torch.float32, torch.device("cpu"))
    return plan, {name: plan.tensor(name, shape) for name, shape in shapes.items()}


def test_fill(tmp_path: Path) -> None:
    save_file({"x.a": A, "x.b": B}, tmp_path / "model.safetensors")
    tensors = scan_head(tmp_path).renamed(lambda name: name.removeprefix("x."))
    plan, parameters = plan_of({"a": (3, 4)})
    tensors.fill(plan)
    assert torch.equal(parameters["a"], A)
    plan, _ = plan_of({"a": (3, 4), "c": (1,), "d": (1,)})
    with pytest.raises(ModelLoadError, match="tensors are missing: c, d"):
        tensors.fill(plan)
    plan, _ = plan_of({"a": (4, 4)})
    with pytest.raises(ModelLoadError, match=r"x\.a has shape \[3, 4\], expected \[4, 4\]"):
        tensors.fill(plan)
    with pytest.raises(ModelLoadError, match=r"x\.a and x\.b are two names of one tensor"):
        scan_head(tmp_path).renamed(lambda name: "a")
    assert set(scan_head(tmp_path).renamed(lambda name: None if name == "x.b" else name)) == {"x.a"}

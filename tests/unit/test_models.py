"""The registry of model classes, and promises every model keeps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_loader import write
from torch.utils._python_dispatch import TorchDispatchMode

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models import registry
from draftwise.models.config import ModelConfig, RawConfig, dense_config
from draftwise.models.dense import DenseDecoder
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_config, load_model
from draftwise.models.registry import register_model, resolve_model, supported_architectures

CPU = torch.device("cpu")


class ThirdModel(DenseDecoder):
    """A third party's family: one small class."""

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        return dense_config(raw, architecture=architecture, max_model_len=max_model_len)


@pytest.fixture(autouse=True)
def _registry_restored() -> Iterator[None]:
    before = dict(registry._MODELS)
    yield
    registry._MODELS.clear()
    registry._MODELS.update(before)


@pytest.mark.parametrize("model", [ThirdModel, f"{__name__}:ThirdModel"], ids=["class", "dotted"])
def test_a_third_party_model_is_served(model: Any, tmp_path: Path) -> None:
    register_model("ThirdForCausalLM", model)
    folder = write(tmp_path, architectures=["ThirdForCausalLM"])
    loaded = load_model(str(folder), dtype=None, device=CPU, ops=TorchOps(torch.float32, CPU))
    assert type(loaded).__name__ == "ThirdModel"
    assert loaded.config.architecture == "ThirdForCausalLM"
    assert "ThirdForCausalLM" in supported_architectures()


def test_a_third_party_may_serve_a_multimodal_architecture() -> None:
    raw = {"architectures": ["SeesForCausalLM"], "vision_config": {}}
    with pytest.raises(ModelLoadError, match="multimodal"):
        resolve_model(raw)
    register_model("SeesForCausalLM", ThirdModel)
    assert resolve_model(raw) == ("SeesForCausalLM", ThirdModel)


def test_the_first_known_architecture_is_taken() -> None:
    name, cls = resolve_model({"architectures": ["NewerForCausalLM", "LlamaForCausalLM"]})
    assert (name, cls.__name__) == ("LlamaForCausalLM", "LlamaModel")


@pytest.mark.parametrize("model", ["no.colon", "a:b:c", int, 3])
def test_what_is_no_model_is_not_registered(model: Any) -> None:
    with pytest.raises(ModelLoadError):
        register_model("X", model)


@pytest.mark.parametrize("place", ["no_such_module:Model", "draftwise.models.llama:Nothing", "pathlib:Path"])
def test_a_class_that_cannot_be_imported_is_named(place: str) -> None:
    register_model("X", place)
    with pytest.raises(ModelLoadError, match=place.split(":")[0]):
        resolve_model({"architectures": ["X"]})


def test_every_registered_class_is_importable() -> None:
    for name in supported_architectures():
        assert resolve_model({"architectures": [name]})[0] == name


class _InsideOps:
    """How deep the call stack is inside `Ops` methods."""

    depth = 0


class GuardedOps(TorchOps):
    """Marks the time spent inside its operations."""


def _guard(name: str) -> Any:
    inner = getattr(TorchOps, name)

    def call(self: TorchOps, *args: Any, **kwargs: Any) -> Any:
        _InsideOps.depth += 1
        try:
            return inner(self, *args, **kwargs)
        finally:
            _InsideOps.depth -= 1

    return call


for _name, _value in inspect.getmembers(Ops, inspect.isfunction):
    if not _name.startswith("_"):
        setattr(GuardedOps, _name, _guard(_name))


class NoneOutside(TorchDispatchMode):
    """Fails on a tensor operation that runs outside `Ops`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert _InsideOps.depth > 0, f"{func} runs outside Ops"
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_forward_is_made_of_ops_alone(tmp_path: Path) -> None:
    """So that other kernels, sharding or a recorded replay can stand behind any model."""
    model = load_model(str(write(tmp_path)), dtype=None, device=CPU, ops=GuardedOps(torch.float32, CPU))
    kv = KVStorage(model.kv_layout(), 8, 4, model.dtype, CPU)
    batch = build_step_input([RowInput([1, 2, 3], 0, np.arange(1, 3, dtype=np.int32))], 4, CPU)
    with NoneOutside() as mode:
        output = model.forward(batch, kv, capture=(0, 2))
        model.logits(output.hidden)
        assert mode.count > 20
        with pytest.raises(AssertionError, match="outside Ops"):
            torch.ones(1).add(1)


def test_the_layout_says_what_is_stored(tmp_path: Path) -> None:
    model = load_model(str(write(tmp_path)), dtype=None, device=CPU, ops=TorchOps(torch.float32, CPU))
    layout = model.kv_layout()
    assert len(layout) == 2
    # 2 tensors of 2 heads of 4 in float32
    assert KVStorage.bytes_per_block(layout, 1, torch.float32) == 2 * (2 * 2 * 4) * 4


def test_config_keeps_what_was_read(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 4, 50)
    assert config.raw["model_type"] == "llama"
    with pytest.raises(AttributeError):
        config.vocab_size = 3  # type: ignore[misc]

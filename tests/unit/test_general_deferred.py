"""Tensors that are read when somebody wants them, and mixtures of experts that are packed from these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.architectures import save, small
from tests.fakes.quantized import write_pair
from tests.native import native_or_skip
from torch import Tensor, nn

from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.general import expert_weights, loading, settling
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.deferred import Deferred, Source, deferred, numbers, part, rows_of
from draftwise.models.general.experts import PackedExperts
from draftwise.models.general.stored import FloatLayer
from draftwise.models.loader import load_model

CPU = torch.device("cpu")


class Checkpoint:
    """Tensors by number; ``read``: which were read, in order."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.values = [torch.randn(shape, generator=generator) for shape in shapes]
        self.read: list[int] = []
        self.layers = [
            FloatLayer(str(i), *value.shape[-2:], {}, torch.float32) for i, value in enumerate(self.values)
        ]

    def __getitem__(self, i: int) -> Tensor:
        value = self.values[i]
        part = (lambda e: Source(self._reading(i, value[e]))) if value.ndim == 3 else None
        return deferred(value.shape, value.dtype, Source(self._reading(i, value), self.layers[i], part))

    def _reading(self, i: int, value: Tensor) -> Callable[[], Tensor]:
        def read() -> Tensor:
            self.read.append(i)
            return value.clone()

        return read


def test_what_is_done_to_one_is_done_when_it_is_read() -> None:
    file = Checkpoint(*[(3, 4)] * 4)
    a, b, c, d = (file[i] for i in range(4))
    both = torch.cat((torch.stack((a, b)), torch.stack((c, d))), dim=1).to(device="cpu", dtype=torch.bfloat16)
    weight = nn.Parameter(both, requires_grad=False)
    assert isinstance(weight, Deferred) and weight.shape == (2, 6, 4) and not file.read
    wanted = torch.cat((torch.stack(file.values[:2]), torch.stack(file.values[2:])), dim=1).bfloat16()
    assert torch.equal(numbers(weight), wanted) and file.read == [0, 1, 2, 3]
    file.read.clear()
    assert torch.equal(numbers(part(weight, 1)), wanted[1]) and file.read == [1, 3]


def test_a_part_of_a_stack_is_read_alone() -> None:
    file = Checkpoint((2, 3, 4))
    turned = file[0].transpose(1, 2).contiguous()
    assert torch.equal(numbers(part(turned, 1)), file.values[0][1].t())
    assert torch.equal(numbers(turned.chunk(2, dim=1)[1]), file.values[0].transpose(1, 2)[:, 2:])


def test_one_that_is_turned_can_be_given_another_shape() -> None:
    """Rows that stand in turns in a checkpoint are parted by a turn between two changes of shape."""
    file = Checkpoint((2, 6, 4))
    parted = file[0].reshape(2, 3, 2, 4).transpose(1, 2).reshape(2, 6, 4).contiguous()
    assert isinstance(parted, Deferred) and not file.read
    value = file.values[0]
    assert torch.equal(numbers(parted), torch.cat((value[:, 0::2], value[:, 1::2]), dim=1))
    assert torch.equal(numbers(part(parted, 1)), torch.cat((value[1, 0::2], value[1, 1::2])))


def test_rows_of_layers_are_known_through_copies_and_two_turns() -> None:
    file = Checkpoint((3, 4), (5, 4), (4, 3))
    both = torch.cat((file[0], file[1].clone()), dim=0)
    assert rows_of(both) == [(file.layers[0], None), (file.layers[1], None)]
    assert rows_of(both.t().contiguous().t()) == rows_of(both)
    assert rows_of(both.t()) is None and rows_of(both[1:]) is None
    assert rows_of(torch.cat((file[0], file[2].t()))) is None
    assert not file.read


def test_what_nobody_wrote_down_is_computed_at_once() -> None:
    file = Checkpoint((3, 4))
    assert torch.equal(file[0] + 1, file.values[0] + 1)
    assert not isinstance(file[0] * 2, Deferred)


def _packed(model: Any) -> list[PackedExperts]:
    """The experts of a model on Transformers' code."""
    return [module for module in model._model.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize(
    ("kind", "form"),
    [("phimoe", "w4a16"), pytest.param("dots1", "nf4 nested", marks=pytest.mark.slow), ("dots1", "awq")],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_experts_of_a_quantised_checkpoint_keep_their_codes(kind: str, form: str, tmp_path: Path) -> None:
    native_or_skip()
    pair = write_pair(tmp_path, kind, form)
    plain, model = (load_model(f, dtype=torch.bfloat16, device=CPU) for f in (pair.plain, pair.quantized))
    tensors = load_file(pair.plain / "model.safetensors")
    experts = 2 * sum(value.numel() for name, value in tensors.items() if ".experts." in name)
    rest = 2 * sum(value.numel() for name, value in tensors.items() if ".experts." not in name)
    assert experts > rest / 3
    if kind == "phimoe":  # its routing is none that is known
        saved = [sum(e.num_bytes for e in _packed(each)) for each in (plain, model)]
        assert saved[1] < 0.5 * saved[0]
    else:
        assert isinstance(getattr(model, "inner", model), AssembledDecoder)
        assert plain.weight_bytes() - model.weight_bytes() > 0.5 * experts


@pytest.mark.filterwarnings("ignore")
def test_experts_are_never_in_memory_as_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small("dots1"), tmp_path / "model")
    read: list[tuple[int, ...]] = []
    real = settling.numbers
    monkeypatch.setattr(settling, "numbers", lambda of: read.append(tuple(of.shape)) or real(of))
    model = load_model(tmp_path / "model", dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))
    assert isinstance(model, AssembledDecoder) and read
    assert all(len(shape) < 3 for shape in read)


@pytest.mark.filterwarnings("ignore")
def test_experts_that_give_other_numbers_stay_on_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at load compares logits with Transformers' afterwards."""
    save(small("phimoe"), tmp_path / "model")
    real: Any = expert_weights.pack_stored
    monkeypatch.setattr(
        expert_weights,
        "pack_stored",
        lambda ops, rows, *args, **kwargs: real(ops, rows[::-1], *args, **kwargs),
    )
    with caplog.at_level(logging.WARNING, "draftwise"):
        model = load_model(
            tmp_path / "model", dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU)
        )
    assert "packed give other numbers than their module" in caplog.text
    assert _packed(model)  # packed later, from the module's own numbers


@pytest.mark.filterwarnings("ignore")
def test_experts_that_are_called_otherwise_are_loaded_again_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(small("phimoe"), tmp_path / "model")
    asked: list[bool] = []
    real = loading._loaded
    monkeypatch.setattr(loading, "_loaded", lambda *args: asked.append(args[-1]) or real(*args))
    monkeypatch.setattr(
        PackedExperts, "dtype", property(lambda _: torch.int8, lambda *_: None), raising=False
    )
    with caplog.at_level(logging.INFO, "draftwise"):
        load_model(tmp_path / "model", dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))
    assert asked == [True, False] and "keeps its experts as they are" in caplog.text

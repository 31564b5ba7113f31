"""Medusa heads: both published forms compute what the paper says; what does not fit is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.medusa import expected_logits, random_heads, save_heads, save_medusa, vllm_names
from tests.native import native_or_skip
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.heads.base import TargetLink
from draftwise.models.heads.loading import load_medusa
from draftwise.models.heads.medusa import MedusaHeads

HIDDEN, VOCAB = 16, 37


def make_link(ops: Ops, hidden: int = HIDDEN, vocab: int = VOCAB) -> TargetLink:
    generator = torch.Generator().manual_seed(9)
    table = torch.randn(vocab, hidden, generator=generator)
    return TargetLink(vocab, hidden, 4, 128, table, ops.pack_head(table.clone()))


def load(folder: str | Path, **target: int) -> MedusaHeads:
    ops = TorchOps(torch.float32, torch.device("cpu"))
    return load_medusa(Path(folder), make_link(ops, **target), ops)


def check(heads: MedusaHeads, tensors: dict[str, Tensor], layers: int = 1) -> None:
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    got = heads.logits(hidden, heads.num_heads)
    assert got.shape == (heads.num_heads, 5, VOCAB) and got.dtype == torch.float32
    for i in range(heads.num_heads):
        torch.testing.assert_close(got[i], expected_logits(tensors, hidden, i, layers), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(heads.logits(hidden, 1), got[:1])


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_authors_form(tmp_path: Path, file: str, layers: int) -> None:
    tensors = random_heads(HIDDEN, VOCAB, layers=layers)
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers}
    check(load(save_heads(tmp_path, tensors, config, file)), tensors, layers)


@pytest.mark.parametrize("layers", [1, 3])
def test_vllms_form(tmp_path: Path, layers: int) -> None:
    tensors = random_heads(HIDDEN, VOCAB, layers=layers, bias=False)
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": layers, "hidden_size": HIDDEN}
    check(
        load(save_heads(tmp_path, vllm_names(tensors, layers), config, "model.safetensors")), tensors, layers
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "shared"), [(1, False), (1, True), (3, False)])
def test_in_one_native_call(
    tmp_path: Path, layers: int, shared: bool, dtype: torch.dtype, threads: int
) -> None:
    """The same numbers, and the same bits for any number of heads and any rows beside them."""
    library = native_or_skip()
    ops = NativeOps(library, ThreadPool(library, threads), dtype)
    tensors = random_heads(HIDDEN, VOCAB, layers=layers)
    for i in range(3 if shared else 0):
        tensors[f"{i}.{layers}.weight"] = tensors[f"0.{layers}.weight"].clone()
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "original_lm_head": shared}
    heads = load_medusa(
        Path(save_heads(tmp_path, tensors, config, "model.safetensors")), make_link(ops, HIDDEN, VOCAB), ops
    )
    assert heads.native is not None
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = heads.logits(hidden, 3)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.06}
    for i in range(3):
        torch.testing.assert_close(got[i], expected_logits(tensors, hidden, i, layers), **close)
    torch.testing.assert_close(heads.logits(hidden[2:3], 2), got[:2, 2:3], rtol=0, atol=0)


def test_prefix_of_the_name(tmp_path: Path) -> None:
    tensors = random_heads(HIDDEN, VOCAB)
    named = {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}
    check(load(save_heads(tmp_path, named, {"medusa_num_heads": 3}, "model.safetensors")), tensors)


@pytest.mark.parametrize("said", [2, 5])
def test_heads_are_counted_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, said: int) -> None:
    """Published folders say 2 and have 5."""
    tensors = random_heads(HIDDEN, VOCAB)
    with caplog.at_level(logging.INFO, "draftwise"):
        heads = load(save_medusa(tmp_path, tensors, heads=said))
    check(heads, tensors)
    assert heads.num_heads == 3
    assert f"config.json says {said} Medusa heads, the file has 3" in caplog.text


def test_one_output_layer_for_all(tmp_path: Path) -> None:
    """vLLM's ``original_lm_head``: the first head's output layer, or one without number, serves all."""
    tensors = random_heads(HIDDEN, VOCAB, bias=False)
    for i in (1, 2):
        tensors[f"{i}.1.weight"] = tensors["0.1.weight"]
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "original_lm_head": True}
    named = vllm_names(tensors)
    for i in (1, 2):
        del named[f"lm_heads.{i}.weight"]
    check(load(save_heads(tmp_path / "a", named, config, "model.safetensors")), tensors)
    named["lm_head.weight"] = named.pop("lm_heads.0.weight")
    check(load(save_heads(tmp_path / "b", named, config, "model.safetensors")), tensors)


def test_without_output_layers_the_targets_is_used(tmp_path: Path) -> None:
    tensors = random_heads(HIDDEN, VOCAB)
    table = make_link(TorchOps(torch.float32, torch.device("cpu"))).embedding
    for i in range(3):
        tensors[f"{i}.1.weight"] = table
    own = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    check(load(save_heads(tmp_path, own, {"medusa_num_heads": 3}, "medusa_lm_head.pt")), tensors)


def test_draft_vocabulary(tmp_path: Path) -> None:
    tensors = random_heads(HIDDEN, VOCAB, bias=False)
    ids = torch.tensor([3, 0, 36, 11])
    few = {name: tensor[ids] if name.endswith(".1.weight") else tensor for name, tensor in tensors.items()}
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "truncated_vocab_size": 4}
    named = vllm_names(few) | {"token_map": ids}
    heads = load(save_heads(tmp_path / "few", named, config, "model.safetensors"))
    assert heads.target_ids is not None and heads.target_ids.tolist() == ids.tolist()
    hidden = torch.randn(2, HIDDEN)
    assert heads.logits(hidden, 3).shape == (3, 2, 4)
    # whoever stores all rows and a map of some has no use for the map
    whole = load(
        save_heads(tmp_path / "all", vllm_names(tensors) | {"token_map": ids}, config, "model.safetensors")
    )
    assert whole.target_ids is None
    check(whole, tensors)


def refused(folder: str | Path, *words: str, **target: int) -> None:
    with pytest.raises(ModelLoadError) as error:
        load(folder, **target)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_heads_for_another_target(tmp_path: Path) -> None:
    folder = save_medusa(tmp_path, random_heads(HIDDEN, VOCAB), heads=3)
    refused(folder, "hidden size 16", "has 32", hidden=32)
    refused(folder, "vocabulary of 37", "of 40", "token_map", vocab=40)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([0, 1, 99], ["0 to 99", "another target"]), ([0, 1, 1], ["twice"]), ([0, 1], ["shape [2]", "3 draft"])],
)
def test_a_vocabulary_map_that_does_not_fit(tmp_path: Path, ids: list[int], words: list[str]) -> None:
    tensors = vllm_names(random_heads(HIDDEN, 3, bias=False)) | {"token_map": torch.tensor(ids)}
    refused(save_heads(tmp_path, tensors, {"num_heads": 3}, "model.safetensors"), *words)


def test_missing_and_wrong_tensors(tmp_path: Path) -> None:
    tensors = random_heads(HIDDEN, VOCAB)
    wrong = tensors | {"1.1.weight": torch.zeros(VOCAB, HIDDEN + 1)}
    refused(
        save_medusa(tmp_path / "wrong", wrong, heads=3), "1.1.weight has shape [37, 17], expected [37, 16]"
    )
    refused(save_medusa(tmp_path / "none", {"x": torch.zeros(1)}, heads=3), "no Medusa heads")
    refused(save_medusa(tmp_path / "odd", tensors, heads=0), "positive integer")
    codes = tensors | {"1.1.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)}
    refused(save_medusa(tmp_path / "codes", codes, heads=3), "quantised", "1.1.weight")
    twice = tensors | {"medusa_heads.0.1.weight": tensors["0.1.weight"]}
    refused(save_medusa(tmp_path / "twice", twice, heads=3), "two names of one tensor")


def test_what_is_no_head(tmp_path: Path) -> None:
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    refused(tmp_path, "no weights")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not a pickle")
    refused(tmp_path, "medusa_lm_head.pt")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


def test_a_pickle_with_more_than_tensors_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": _Evil()}, tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "medusa_lm_head.pt")
    assert "unpickled" not in capsys.readouterr().out

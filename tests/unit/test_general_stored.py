"""Linear layers of Transformers' models whose weights stay in the checkpoint until kernels pack them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.architectures import save, small
from tests.fakes.quantized import write_pair
from tests.native import native_or_skip
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.general import filling, loading
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.exchanging import restore_read
from draftwise.models.general.stored import FloatLayer, StoredLinear
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.source import scan

CPU = torch.device("cpu")
TOKENS = [9, 100, 31, 7, 200, 64, 12]


def ops() -> TorchOps:
    return TorchOps(torch.float32, CPU)


def logits(model: DecoderModel) -> Tensor:
    kv = KVStorage(model.kv_layout(), 4, 4, model.dtype, CPU)
    rows = build_step_input([RowInput(TOKENS, 0, torch.arange(4, dtype=torch.int32).numpy())], 4, CPU)
    with torch.inference_mode():
        found: Tensor = model.forward_logits(rows, kv)[1].clone()
    return found


def test_no_float_of_a_quantised_layer_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is packed as part of the whole, and behind it."""
    native_or_skip()
    pair = write_pair(tmp_path, "granite", "w4a16 with zeros")
    seen: list[tuple[int, int]] = []  # floats of linear layers, stored layers
    real = loading._prepared

    def counted(model: Any, *args: Any, **kwargs: Any) -> Any:
        floats = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
        seen.append((floats, sum(isinstance(module, StoredLinear) for module in model.modules())))
        return real(model, *args, **kwargs)

    monkeypatch.setattr(loading, "_prepared", counted)
    model = load_model(pair.quantized, dtype=torch.bfloat16, device=CPU)
    assert seen == [(0, 3 * 7)]
    assert isinstance(getattr(model, "inner", model), AssembledDecoder)
    plain = load_model(pair.plain, dtype=torch.bfloat16, device=CPU)
    linear = 2 * sum(
        t.numel() for name, t in load_file(pair.plain / "model.safetensors").items() if "proj" in name
    )
    # four bits, and scales and zero points of groups of 32 as kernels keep them
    assert plain.weight_bytes() - model.weight_bytes() > 0.6 * linear


def test_parts_in_several_forms_are_layers_of_their_own(tmp_path: Path) -> None:
    """q in eight bits, k and v in four; up in eight and gate in four."""
    pair = write_pair(tmp_path, "granite", "w4a16")
    other = write_pair(tmp_path / "other", "granite", "w8a16")
    mixed, plain = (load_file(folder / "model.safetensors") for folder in (pair.quantized, pair.plain))
    for target, source in ((mixed, other.quantized), (plain, other.plain)):
        tensors = load_file(source / "model.safetensors")
        for name in list(target):
            if "q_proj" in name or "up_proj" in name:
                del target[name]
        target.update({n: t for n, t in tensors.items() if "q_proj" in n or "up_proj" in n})
    save_file(mixed, pair.quantized / "model.safetensors")
    save_file(plain, pair.plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((pair.quantized / "config.json").read_text())
    eight = json.loads((other.quantized / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {**eight, "targets": ["re:.*(q|up)_proj$"]}
    (pair.quantized / "config.json").write_text(json.dumps(config))
    model = load_model(pair.quantized, dtype=torch.float32, device=CPU, ops=ops())
    assert isinstance(getattr(model, "inner", model), AssembledDecoder)
    torch.testing.assert_close(logits(model), pair.reference(TOKENS), rtol=1e-4, atol=1e-4)


def test_what_transformers_stacks_is_read_as_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not tell: the model is built again, with these layers read later."""
    pair = write_pair(tmp_path, "granitemoe", "gptq")
    counts: list[int] = []
    real = filling._state

    def counted(*args: Any) -> Any:
        counts.append(len(args[2]))
        return real(*args)

    monkeypatch.setattr(filling, "_state", counted)
    model = load_model(pair.quantized, dtype=torch.float32, device=CPU, ops=ops())
    torch.testing.assert_close(logits(model), pair.reference(TOKENS), rtol=1e-4, atol=1e-4)
    assert counts[0] == 0 or len(counts) == 1


def test_a_module_whose_weight_is_read_gets_it_back(tmp_path: Path) -> None:
    weight = torch.randn(6, 8)
    save_file({"a.weight": weight, "b.weight": weight + 1}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    entries = scan(tmp_path)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a: Any = StoredLinear(ops(), FloatLayer("a", 6, 8, entries, torch.float32), torch.ones(6))
            self.b: Any = StoredLinear(ops(), FloatLayer("b", 6, 8, entries, torch.float32), None)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(x) + nn.functional.linear(x, self.a.weight, self.a.bias)

    model, x = Reading(), torch.randn(3, 8)
    wanted = x @ (2 * weight + 1).t() + 1
    torch.testing.assert_close(model(x), wanted)
    restore_read(model)
    assert type(model.a) is nn.Linear and isinstance(model.b, StoredLinear)
    torch.testing.assert_close(model(x), wanted)


def test_a_bias_that_says_something_is_not_dropped(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "granite", "gptq")
    tensors = load_file(pair.quantized / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.bias"
    tensors[name] = torch.zeros(64)
    save_file(tensors, pair.quantized / "model.safetensors")
    load_model(pair.quantized, dtype=torch.float32, device=CPU, ops=ops())
    tensors[name][3] = 1
    save_file(tensors, pair.quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not have: model\.layers\.0\.self_attn\.o_proj\.bias"):
        load_model(pair.quantized, dtype=torch.float32, device=CPU, ops=ops())


@pytest.mark.parametrize("kind", ["granite", "gpt_neox", "cohere", "olmo2", "opt"])
def test_the_first_layers_are_the_model_with_so_many(kind: str, tmp_path: Path) -> None:
    made = small(kind, initializer_range=0.2)
    save(made, tmp_path / "model")
    model = load_model(tmp_path / "model", dtype=torch.float32, device=CPU, ops=ops())
    assert isinstance(getattr(model, "inner", model), AssembledDecoder)
    whole = logits(model)
    for count in (1, 2, 3):
        cut = small(kind, initializer_range=0.2, num_hidden_layers=count)
        assert cut.model is not None and made.model is not None
        cut.model.load_state_dict(made.model.state_dict(), strict=False)
        with torch.inference_mode():
            wanted = cut.model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
        part = model.first_layers(count)
        assert len(part.kv_layout()) == part.config.num_layers == count
        torch.testing.assert_close(logits(part), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model), whole)


def test_scales_and_caps_are_lent_with_the_output_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind, tail in {
        "granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.25}, "gemma2": {"final_logit_softcapping": 7.0},
        "bloom": {},
    }.items():  # fmt: skip
        settings: dict[str, Any] = dict(tail)
        save(small(kind, **settings), tmp_path / kind)
        with caplog.at_level(logging.INFO, logger="draftwise"):
            model = load_model(tmp_path / kind, dtype=torch.float32, device=CPU, ops=ops())
        what = "softcap" if kind == "gemma2" else "scale"
        shared = model.shared_weights()
        assert shared.tail == (
            ((what, pytest.approx(0.25 if what == "scale" else 7.0, rel=1e-5)),) if tail else ()
        )
        assert shared.embedding.shape == (256, 64)

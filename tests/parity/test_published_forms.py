"""Checkpoints as they are published, where Transformers writes them in another form: mxfp4 experts, older configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVStorage
from draftwise.models import gpt_oss
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_config, load_model
from draftwise.models.rope import RopeConfig
from draftwise.quantization.fp4 import mxfp4_codes
from tests.fakes.architectures import save, small
from tests.native import native_or_skip
from tests.parity.helpers import Driver, MakeModel, expected_logits, load, tokens_of

GPT_OSS = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "num_hidden_layers": 2,
}


def as_mxfp4(folder: Path, target: Path) -> dict[str, Tensor]:
    """The checkpoint with random experts in mxfp4, as OpenAI published it. Returns what they mean, in Transformers'
    names and form."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    meant, stored = {}, {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value
            continue
        count, inputs, outputs = value.shape
        blocks = torch.randint(
            0, 256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(
            122, 126, (count, outputs, inputs // 32), generator=generator, dtype=torch.uint8
        )
        stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
        experts = [mxfp4_codes(*each).dequantize() for each in zip(blocks, scales, strict=True)]
        meant[name] = torch.stack(experts).transpose(1, 2)
    save_file(stored, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    return meant


def test_gpt_oss_as_published(
    make_checkpoint: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, folder = make_checkpoint("GptOss", **GPT_OSS)
    meant = as_mxfp4(folder, tmp_path)
    assert len(meant) == 4
    before = {name: value.clone() for name, value in reference.state_dict().items() if name in meant}
    try:
        reference.load_state_dict(meant, strict=False)
        tokens = tokens_of(3, 45)
        expected = expected_logits(reference, tokens)
    finally:
        reference.load_state_dict(before, strict=False)
    gpt_oss._say_widened.cache_clear()
    found = Driver(load(tmp_path)).whole(0, tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert "mxfp4" in caplog.text and "float32" in caplog.text
    native_or_skip()
    caplog.clear()
    gpt_oss._say_widened.cache_clear()
    cpu, sizes = torch.device("cpu"), []
    for place, quantization in ((tmp_path, None), (tmp_path, "int8"), (folder, None)):
        model = load_model(place, dtype=torch.bfloat16, device=cpu, quantization=quantization)
        sizes.append(model.weight_bytes())
        if place == tmp_path:
            logits = Driver(model).whole(0, tokens)
            assert float((logits - expected).abs().mean()) < 0.15 * float(expected.std())
    assert "mxfp4" not in caplog.text
    stored = sum(value.numel() for value in meant.values())
    saved = sizes[2] - sizes[0]
    assert saved > 1.2 * stored  # of the two bytes of a number, little more than half of one is left


def edited(folder: Path, target: Path, change: Mapping[str, Any], without: tuple[str, ...] = ()) -> Path:
    """The checkpoint with another config."""
    raw = json.loads((folder / "config.json").read_text()) | change
    (target / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in without}))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


def test_gemma_3_in_its_older_spelling(make_checkpoint: MakeModel, tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    _, folder = make_checkpoint(
        "Gemma3Text", head_dim=16, sliding_window=7, layer_types=types, rope_parameters=rope
    )
    old = {
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_local_base_freq": 100.0,
        "sliding_window_pattern": 3,
    }
    older = load_config(edited(folder, tmp_path, old, ("rope_parameters", "layer_types")))
    newer = load_config(folder)
    assert (older.rope, older.local_rope, older.sliding_window) == (
        newer.rope,
        newer.local_rope,
        (7, 7, None),
    )


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("Gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping"),
        ("Gemma2", {"layer_types": ["odd"]}, "layer_types has 1 entries for 3 layers, unknown: \\['odd'\\]"),
        ("Gemma2", {"layer_types": "odd"}, "layer_types must be a list"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3Text", {"rope_parameters": {"full_attention": {}, "odd": {}}}, "unknown layers: odd"),
        ("Phi3", {"rope_parameters": {"rope_type": "longrope"}}, "'short_factor' must be a list of 4"),
        (
            "Phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}},
            "even head_dim, not 3",
        ),
        (
            "Phi3",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2.0}},
            "partial_rotary_factor 2",
        ),
        ("Phi3", {"hidden_act": "gelu"}, "gelu"),
        ("GptOss", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_named(
    make_checkpoint: MakeModel, tmp_path: Path, family: str, change: dict[str, Any], words: str
) -> None:
    settings = {"GptOss": GPT_OSS, "Phi3": {}}.get(family, {"head_dim": 16})
    _, folder = make_checkpoint(family, **settings)
    with pytest.raises(ModelLoadError, match=words):
        load_config(edited(folder, tmp_path, change))


def test_mxfp4_of_another_family_is_refused(make_checkpoint: MakeModel, tmp_path: Path) -> None:
    _, folder = make_checkpoint("Llama")
    other = edited(folder, tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(ModelLoadError, match="mxfp4"):
        load(other)


def test_orders_of_dimensions() -> None:
    plain = RopeConfig("default", 1e4, 8)
    assert plain.order(8) is None
    half = RopeConfig("default", 1e4, 4)
    assert half.order(8) == (0, 1, 4, 5, 2, 3, 6, 7)
    neighbours = RopeConfig("default", 1e4, 4, interleaved=True)
    assert neighbours.order(8) == (0, 2, 4, 5, 1, 3, 6, 7)
    assert neighbours.order(4) == (0, 2, 1, 3)


def test_kimi_k2_as_published(tmp_path: Path) -> None:
    """DeepSeek-V3's layers under another ``model_type``, with code of its own that is never run."""
    made = small("deepseek_v3")
    save(made, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    code = "DeepseekV3ForCausalLM"
    config |= {
        "model_type": "kimi_k2", "architectures": [code], "rope_theta": theta, "rope_scaling": None,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config",
                     "AutoModelForCausalLM": f"modeling_deepseek.{code}"},
        "num_nextn_predict_layers": 0, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, dtype=torch.float32, device=torch.device("cpu"), ops=None)
    assert model.config.architecture == code and model.config.latent is not None
    tokens = [9, 100, 31, 7, 200, 64, 12]
    kv = KVStorage(model.kv_layout(), 4, 4, torch.float32, torch.device("cpu"))
    table = torch.arange(4, dtype=torch.int32).numpy()
    rows = build_step_input([RowInput(tokens, 0, table)], 4, torch.device("cpu"))
    assert made.model is not None
    with torch.inference_mode():
        found = model.forward_logits(rows, kv)[1]
        wanted = made.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

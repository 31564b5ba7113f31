"""Checkpoints that are quantised already, divided among ranks: each reads its own words, scales and zero points."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.fakes.ranks import on_ranks
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.ranks import Ranks
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model

GROUP, HIDDEN, INNER, VOCAB = 32, 128, 256, 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
Writer = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
"""Codes [out, in] and zero points [out, groups] of four bits, scales [out, groups] -> tensors by suffix."""


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[..., 8 n] of four bits -> [..., n] int32, number ``order[i]`` in place i."""
    eights = values.long().unflatten(-1, (-1, 8))
    packed = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).contiguous()


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        ".qweight": words(codes.t(), order),
        ".qzeros": words(zeros.t(), order),
        ".scales": scales.t().contiguous(),
    }


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        ".qweight": words(codes).t().contiguous(),
        ".qzeros": words(zeros.t() - 1),
        ".scales": scales.t().contiguous(),
        ".g_idx": (torch.arange(codes.shape[1]) // GROUP).to(torch.int32),
    }


def gptq_in_any_order(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    order = torch.randperm(codes.shape[1], generator=torch.Generator().manual_seed(3))
    return gptq(codes, zeros, scales) | {".g_idx": (order // GROUP).to(torch.int32)}


def packed(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {".weight_packed": words(codes), ".weight_scale": scales}


def int_8(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {".weight": (codes * 16 - 128).to(torch.int8), ".weight_scale": scales[:, :1].float() / 16}


def tensors_config(layout: str, rows: object, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
PACKED = tensors_config(
    "pack-quantized", None, type="int", num_bits=4, symmetric=True, strategy="group", group_size=GROUP
)
ROWS = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
INT8 = tensors_config("int-quantized", ROWS, type="int", num_bits=8, symmetric=True, strategy="channel")
CASES: dict[str, tuple[Writer, dict[str, object]]] = {
    "awq": (awq, AWQ),
    "gptq": (gptq, GPTQ),
    "w4a16": (packed, PACKED),
    "w8a8": (int_8, INT8),
}


def write(folder: Path, writer: Writer, description: dict[str, object]) -> Path:
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN)
        for linear, (outputs, inputs) in LINEARS.items():
            codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
            zeros = torch.randint(1, 16, (outputs, inputs // GROUP), generator=generator)
            scales = (torch.rand(outputs, inputs // GROUP, generator=generator) * 0.02 + 0.01).half()
            found = writer(codes, zeros, scales)
            tensors |= {f"model.layers.{i}.{linear}{suffix}": t for suffix, t in found.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": description}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits_of(model: DecoderModel) -> Tensor:
    tokens = np.arange(12, dtype=np.int32) * 7 % VOCAB
    with torch.inference_mode():
        kv = KVStorage(model.kv_layout(), 4, 8, model.dtype, model.device)
        row = RowInput(tokens, 0, np.array([1, 2], np.int32))
        return model.forward_logits(build_step_input([row], 8, model.inputs_on), kv)[1]


def loaded(folder: Path, ranks: Ranks | None = None) -> DecoderModel:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"), ranks=ranks)


@pytest.mark.parametrize("name", CASES)
def test_codes_are_divided_as_they_are(tmp_path: Path, name: str) -> None:
    """The weights are exactly those that the whole has. Rows that are rounded to int8 are rounded in parts."""
    folder = write(tmp_path / name, *CASES[name])
    expected = logits_of(loaded(folder))
    for size in (2, 4):
        answers = on_ranks(size, lambda ranks: logits_of(loaded(folder, ranks)))
        for logits in answers:
            assert torch.equal(logits, answers[0])
        worst = float((answers[0] - expected).abs().max() / expected.abs().max())
        assert worst < (0.1 if name == "w8a8" else 2e-5), (size, worst)


def test_groups_that_a_rank_cannot_have_whole_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "awq", *CASES["awq"])
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="groups of 128 do not divide 64 inputs"):
        on_ranks(2, lambda ranks: loaded(folder, ranks))


def test_inputs_in_any_order_are_not_divided(tmp_path: Path) -> None:
    """Inputs of one rank then belong to groups of all: there is no part of the scales to read."""
    folder = write(tmp_path / "gptq", gptq_in_any_order, GPTQ | {"desc_act": True})
    loaded(folder)
    with pytest.raises(ModelLoadError, match=r"groups .* of inputs, of which there are"):
        on_ranks(2, lambda ranks: loaded(folder, ranks))

"""Quantised checkpoints, written as their tools write them, load to exactly the weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.native import native_or_skip
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.cpu.library import Isa, native_library
from draftwise.kernels.cpu.linear import _say_slow
from draftwise.kernels.ranks import Part
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.cuts import BY_INPUTS, Run, Split
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.llama import LlamaModel
from draftwise.models.loader import load_model
from draftwise.models.weights import WeightPlan
from draftwise.quantization.parsing import parse_checkpoint_format

CPU = torch.device("cpu")
HIDDEN, INNER, KV, VOCAB, GROUP = 64, 96, 32, 48, 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}

Writer = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""(outputs, inputs, generator) -> tensors by suffix, and the weight they stand for."""


def pack_words(values: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """[..., n * k] integers -> [..., n] int32, ``order[i]`` in place i. Spelt out, as a check of the unpacking."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // per_word, dtype=torch.int64)
    for word in range(words.shape[-1]):
        for place, column in enumerate(order):
            words[..., word] |= (values[..., word * per_word + column].long() & (2**bits - 1)) << (
                bits * place
            )
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def draw(outputs: int, inputs: int, groups: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in] and zero points [out, groups] of four bits, scales [out, groups]."""
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, 16, (outputs, groups), generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) * 0.02 + 0.01).half()
    return codes, zeros, scales


def awq(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales = draw(outputs, inputs, inputs // GROUP, generator)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": pack_words(codes.t(), order=order),
        ".qzeros": pack_words(zeros.t(), order=order),
        ".scales": scales.t().contiguous(),
    }
    return tensors, (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)


def awq_gemv(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of zero points and scales filled up to 4 words of 8, with what nobody may read."""
    groups = inputs // GROUP
    assert GROUP == 32
    codes, zeros, scales = draw(outputs, inputs, groups, generator)
    width = -(-groups // 32) * 32
    tensors = {
        ".qweight": pack_words(codes),
        ".qzeros": pack_words(torch.nn.functional.pad(zeros, (0, width - groups), value=5)),
        ".scales": torch.nn.functional.pad(scales, (0, width - groups), value=9.0),
    }
    return tensors, (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)


def gptq(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales = draw(outputs, inputs, inputs // GROUP, generator)
    tensors = {
        ".qweight": pack_words(codes).t().contiguous(),
        ".qzeros": pack_words(zeros.t() - 1),
        ".scales": scales.t().contiguous(),
        ".g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }
    return tensors, (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)


def packed_4(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, _, scales = draw(outputs, inputs, inputs // GROUP, generator)
    tensors = {
        ".weight_packed": pack_words(codes),
        ".weight_scale": scales.to(torch.bfloat16),
        ".weight_shape": torch.tensor([outputs, inputs]),
    }
    return tensors, (codes - 8) * scales.to(torch.bfloat16).float().repeat_interleave(GROUP, 1)


def packed_4_zeros(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales = draw(outputs, inputs, inputs // GROUP, generator)
    tensors = {
        ".weight_packed": pack_words(codes),
        ".weight_scale": scales,
        ".weight_zero_point": pack_words(zeros.t()).t().contiguous(),
        ".weight_shape": torch.tensor([outputs, inputs]),
    }
    return tensors, (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)


def packed_8(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-127, 128, (outputs, inputs), generator=generator)
    scales = (torch.rand(outputs, 1, generator=generator) * 0.001 + 0.001).to(torch.bfloat16)
    return {
        ".weight_packed": pack_words(codes + 128, bits=8),
        ".weight_scale": scales,
    }, codes * scales.float()


def int_8(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator)
    scales = torch.rand(outputs, 1, generator=generator) * 0.001 + 0.001
    return {".weight": codes.to(torch.int8), ".weight_scale": scales}, codes * scales


def fp_8(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs, 1, generator=generator) * 0.0004 + 0.0004
    return {".weight": codes, ".weight_scale": scales.bfloat16()}, codes.float() * scales.bfloat16().float()


def scattered_groups(inputs: int, generator: torch.Generator) -> Tensor:
    """Each input's group, as many inputs in each as ever."""
    return (torch.randperm(inputs, generator=generator) // GROUP).to(torch.int32)


def gptq_as(bits: int, *, act_order: bool) -> Writer:
    def write(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = draw(outputs, inputs, inputs // GROUP, generator)
        if bits == 8:
            codes = torch.randint(0, 256, (outputs, inputs), generator=generator)
            zeros = torch.full_like(zeros, 128)
            scales = scales / 16
        groups = (
            scattered_groups(inputs, generator)
            if act_order
            else torch.arange(inputs, dtype=torch.int32) // GROUP
        )
        tensors = {
            ".qweight": pack_words(codes.t().contiguous().t(), bits).t().contiguous(),
            ".qzeros": pack_words((zeros - 1).t().contiguous(), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": groups,
            ".bias": torch.zeros(outputs, dtype=torch.float16),  # beside layers that have none
        }
        return tensors, (codes - zeros[:, groups.long()]) * scales.float()[:, groups.long()]

    return write


def packed_4_scattered(
    outputs: int, inputs: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    codes, _, scales = draw(outputs, inputs, inputs // GROUP, generator)
    groups = scattered_groups(inputs, generator)
    tensors = {".weight_packed": pack_words(codes), ".weight_scale": scales, ".weight_g_idx": groups}
    return tensors, (codes - 8) * scales.float()[:, groups.long()]


def packed_8_groups(
    outputs: int, inputs: int, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-128, 128, (outputs, inputs), generator=generator)
    scales = (torch.rand(outputs, inputs // GROUP, generator=generator) * 0.001 + 0.001).half()
    tensors = {".weight_packed": pack_words(codes + 128, bits=8), ".weight_scale": scales}
    return tensors, codes * scales.float().repeat_interleave(GROUP, 1)


def fp8_blocks(suffix: str) -> Writer:
    """Blocks of 32 x 48, none of which divides every layer."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = (
            (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        )
        scales = torch.rand(-(-outputs // 32), -(-inputs // 48), generator=generator) * 0.0004 + 0.0004
        spread = scales.repeat_interleave(32, 0)[:outputs].repeat_interleave(48, 1)[:, :inputs]
        return {".weight": codes, suffix: scales}, codes.float() * spread

    return write


def fp8_tensor(shape: tuple[int, ...]) -> Writer:
    def write(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = (
            (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        )
        scale = torch.rand((), generator=generator) * 0.0004 + 0.0004
        tensors = {".weight": codes, ".weight_scale": scale.view(shape), ".input_scale": torch.ones(shape)}
        return tensors, codes.float() * scale

    return write


_NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
_FP4 = torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12


def bnb_4(kind: str, *, block: int = 64, nested: bool = False) -> Writer:
    """As bitsandbytes writes it: blocks run through the rows, two codes in a byte, the first one above."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        numbers = outputs * inputs
        codes = torch.randint(0, 16, (numbers,), generator=generator)
        blocks = -(-numbers // block)
        absmax = torch.rand(blocks, generator=generator) * 0.1 + 0.05
        table = _NF4.clone() if kind == "nf4" else torch.cat((_FP4, -_FP4))
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
        tensors = {
            ".weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            ".weight.quant_map": table,
            ".weight.absmax": absmax,
        }
        if nested:
            outer, offset = torch.rand(-(-blocks // 256), generator=generator) * 0.02 + 0.01, 0.1
            steps = torch.linspace(-1, 1, 256)
            inner = torch.randint(0, 256, (blocks,), generator=generator)
            absmax = steps[inner] * outer[torch.arange(blocks) // 256] + offset
            tensors |= {
                ".weight.absmax": inner.to(torch.uint8),
                ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": steps,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = text
        values = table[codes] * absmax.repeat_interleave(block)[:numbers]
        return tensors, values.view(outputs, inputs)

    return write


def bnb_8(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-127, 128, (outputs, inputs), generator=generator)
    largest = torch.rand(outputs, generator=generator) * 0.2 + 0.1
    format_ = torch.tensor(0, dtype=torch.uint8)
    tensors = {".weight": codes.to(torch.int8), ".SCB": largest, ".weight_format": format_}
    return tensors, codes * (largest / 127)[:, None]


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat((_E2M1, -_E2M1))


def fp_4(kind: str, codes_name: str, whole_name: str | None = None) -> Writer:
    """Floats of four bits, the first of two in a byte below: in groups of 32 with an exponent, or of 16 with a number
    of fp8 and a float for the layer, by which compressed-tensors divides."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
        tensors = {codes_name: (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        group = 32 if kind == "mxfp4" else 16
        if kind == "mxfp4":
            exponents = torch.randint(119, 123, (outputs, inputs // group), generator=generator)
            tensors[".weight_scale"] = exponents.to(torch.uint8)
            scales = 2.0 ** (exponents - 127)
        else:
            assert whole_name is not None
            of_groups = torch.rand(outputs, inputs // group, generator=generator) * 400 + 40
            of_groups = of_groups.to(torch.float8_e4m3fn)
            divides = whole_name == ".weight_global_scale"
            whole = torch.rand((), generator=generator) * 0.0001 + 0.0001
            whole = 1 / whole if divides else whole
            tensors |= {".weight_scale": of_groups, whole_name: whole.view(1) if divides else whole}
            tensors[".input_global_scale" if divides else ".input_scale"] = torch.ones(1)
            scales = of_groups.float() / whole if divides else of_groups.float() * whole
        return tensors, _E2M1[codes] * scales.repeat_interleave(group, 1)

    return write


def mxfp_8(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponents = torch.randint(114, 117, (outputs, inputs // 32), generator=generator)
    tensors = {".weight": codes, ".weight_scale": exponents.to(torch.uint8)}
    return tensors, codes.float() * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)


def fp_8_flat(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Scales [out]."""
    tensors, weight = fp_8(outputs, inputs, generator)
    return {**tensors, ".weight_scale": tensors[".weight_scale"].view(-1)}, weight


def fp_8_spread(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 128 x 128, whose scales have two dimensions more."""
    codes = (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 128), 1, -(-inputs // 128), 1, generator=generator) * 0.0004 + 0.0004
    spread = scales.view(scales.shape[0], -1).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * spread[:outputs, :inputs]


def fp_8_cached(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """One scale, and beside k and v those of a cache that nobody reads."""
    tensors, weight = fp8_tensor(())(outputs, inputs, generator)
    if outputs == KV:
        tensors |= {".k_scale": torch.ones(()), ".output_scale": torch.ones(())}
    return tensors, weight


def mixed(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Layers over 96 inputs (down) in fp8, the others in NVFP4."""
    writer = fp8_tensor(()) if inputs == INNER else fp_4("nvfp4", ".weight", ".weight_scale_2")
    return writer(outputs, inputs, generator)


def two_forms(outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Layers over 96 inputs (down) in eight bits, the others in four."""
    return packed_8(outputs, inputs, generator) if inputs == INNER else packed_4(outputs, inputs, generator)


def tensors_config(layout: str, rows: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    defaults = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    scheme = {"targets": ["Linear"], "weights": {**defaults, **weights}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def quark_config(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weights, "input_tensors": {"dtype": "fp8_e4m3"}},
        "layer_quant_config": {"*k_proj": {"weight": weights, "output_tensors": {"dtype": "fp8_e4m3"}}},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": ["*k_proj"], "pack_method": "reorder"},
    }


PER_TOKEN = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
FP8_ROWS = {**PER_TOKEN, "type": "float"}
FP4_ROWS = {"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16}
CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    ),
    "awq gemv": (
        awq_gemv,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemv"},
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "w4a16": (packed_4, tensors_config("pack-quantized")),
    "w4a16 with zeros": (packed_4_zeros, tensors_config("pack-quantized", symmetric=False)),
    "w8a16": (packed_8, tensors_config("pack-quantized", num_bits=8, strategy="channel", group_size=None)),
    "w8a8": (
        int_8,
        tensors_config("int-quantized", PER_TOKEN, num_bits=8, strategy="channel", group_size=None),
    ),
    "gptq desc_act": (
        gptq_as(4, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "gptq desc_act in order": (
        gptq_as(4, act_order=False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "gptq 8 bits": (gptq_as(8, act_order=False), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq 8 bits desc_act": (
        gptq_as(8, act_order=True),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
    ),
    "w4a16 actorder": (packed_4_scattered, tensors_config("pack-quantized", actorder="group")),
    "w8a16 groups": (packed_8_groups, tensors_config("pack-quantized", num_bits=8)),
    "fp8 blocks": (fp8_blocks(".weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [32, 48]}),
    "fp8 block": (
        fp8_blocks(".weight_scale"),
        tensors_config(
            "float-quantized", FP8_ROWS, type="float", num_bits=8, strategy="block", block_structure=[32, 48]
        ),
    ),
    "fp8 tensor": (fp8_tensor(()), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 tensor [1]": (
        fp8_tensor((1,)),
        tensors_config("float-quantized", FP8_ROWS, type="float", num_bits=8, strategy="tensor"),
    ),
    "two forms": (
        two_forms,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*down_proj$"],
                    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                },
                "group_1": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                    },
                },
            },
        },
    ),
    "nf4": (
        bnb_4("nf4"),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "nf4 nested": (
        bnb_4("nf4", nested=True),
        {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    ),
    "nf4 long blocks": (bnb_4("nf4", block=256), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "fp4": (
        bnb_4("fp4"),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    ),
    "bnb 8": (bnb_8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nvfp4": (
        fp_4("nvfp4", ".weight_packed", ".weight_global_scale"),
        tensors_config("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
    ),
    "nvfp4 w4a4": (
        fp_4("nvfp4", ".weight_packed", ".weight_global_scale"),
        tensors_config(
            "nvfp4-pack-quantized", FP4_ROWS, type="float", strategy="tensor_group", group_size=16
        ),
    ),
    "mxfp4": (fp_4("mxfp4", ".weight_packed"), tensors_config("mxfp4-pack-quantized", type="float")),
    "mxfp4 w4a4": (
        fp_4("mxfp4", ".weight_packed"),
        tensors_config("mxfp4-pack-quantized", {**FP4_ROWS, "group_size": 32}, type="float"),
    ),
    "mxfp8": (mxfp_8, tensors_config("mxfp8-quantized", type="float", num_bits=8)),
    "modelopt nvfp4": (
        fp_4("nvfp4", ".weight", ".weight_scale_2"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "modelopt fp8": (
        fp_8_cached,
        {
            "quant_method": "modelopt",
            "quant_algo": "fp8",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
    ),
    "modelopt fp8 by output": (
        fp_8_flat,
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "modelopt fp8 blocks": (fp_8_spread, {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}),
    "modelopt mxfp8": (mxfp_8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "modelopt mixed": (
        mixed,
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
    ),
    "quark fp8": (fp_8_cached, quark_config(dtype="fp8_e4m3", qscheme="per_tensor")),
    "quark fp8 by output": (fp_8_flat, quark_config(dtype="fp8_e4m3", qscheme="per_channel")),
    "quark mxfp4": (
        fp_4("mxfp4", ".weight"),
        quark_config(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
    ),
    "fp8": (
        fp_8,
        tensors_config("float-quantized", FP8_ROWS, type="float", num_bits=8, strategy="channel"),
    ),
}


def write(folder: Path, name: str) -> tuple[Path, Path]:
    """A quantised checkpoint, and a float32 one of the weights it stands for."""
    writer, description = CASES[name]
    generator = torch.Generator().manual_seed(7)
    floats = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator) * 0.1,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    quantized, plain = dict(floats), dict(floats)
    for i in range(CONFIG["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            quantized[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN)
            plain[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN)
        for linear, (outputs, inputs) in LINEARS.items():
            tensors, weight = writer(outputs, inputs, generator)
            base = f"model.layers.{i}.{linear}"
            quantized |= {base + suffix: tensor for suffix, tensor in tensors.items()}
            plain[base + ".weight"] = weight.float().contiguous()
    folders = []
    for kind, tensors in (("quantized", quantized), ("plain", plain)):
        target = folder / kind
        target.mkdir()
        config = CONFIG if kind == "plain" else {**CONFIG, "quantization_config": description}
        (target / "config.json").write_text(json.dumps(config))
        save_file(tensors, target / "model.safetensors")
        folders.append(target)
    return folders[0], folders[1]


@pytest.mark.parametrize("name", CASES)
def test_the_weights_are_exactly_those_meant(tmp_path: Path, name: str) -> None:
    quantized, plain = write(tmp_path, name)
    ops = TorchOps(torch.float32, CPU)
    found = load_model(quantized, dtype=torch.float32, device=CPU, ops=ops)
    wanted = load_model(plain, dtype=torch.float32, device=CPU, ops=ops)
    eye = {64: torch.eye(64), 96: torch.eye(96)}
    for got, want in zip(found._layers, wanted._layers, strict=True):  # type: ignore[attr-defined]
        for linear, inputs in (("qkv", 64), ("o", 64), ("mlp.gate_up", 64), ("mlp.down", 96)):
            a, b = (ops.linear(eye[inputs], attrgetter(linear)(layer)) for layer in (got, want))
            assert torch.equal(a, b), linear


@pytest.mark.parametrize("name", CASES)
def test_native_kernels_run_it_and_agree(tmp_path: Path, name: str) -> None:
    native_or_skip()
    quantized, plain = write(tmp_path, name)
    prompts = [{"prompt_token_ids": [3 + (5 * i + j * j) % 40 for j in range(20)]} for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, prompt_logprobs=0)
    results = {}
    for folder, dtype in ((quantized, "auto"), (plain, "float32")):
        with LLM(str(folder), dtype=dtype, skip_tokenizer_init=True) as llm:
            results[folder] = llm.generate(prompts, params, use_tqdm=False)
            if folder == quantized:
                assert llm.guarantees.same_bits
                drafted = llm.generate(
                    prompts, params.replace(speculation={"method": "ngram"}), use_tqdm=False
                )
    for a, b in zip(results[quantized], drafted, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    scores = {
        folder: torch.tensor(
            [
                position[token].logprob
                for out in outs
                for token, position in zip(out.prompt_token_ids, out.prompt_logprobs or (), strict=True)
                if position is not None
            ]
        )
        for folder, outs in results.items()
    }
    assert float((scores[quantized] - scores[plain]).abs().mean()) < 0.1


@pytest.mark.parametrize(
    ("description", "part"),
    [
        ({"quant_method": "awq", "bits": 3}, "bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "gptq", "bits": 3}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (tensors_config("float-quantized", type="float", num_bits=8), "type float with 8 bits by group"),
        (tensors_config("float-quantized", type="float", num_bits=8, strategy="channel"), "fp8 per token"),
        (tensors_config("pack-quantized", actorder="odd"), "actorder"),
        (tensors_config("pack-quantized", num_bits=8, symmetric=False), "8-bit weights by group"),
        (tensors_config("int-quantized", None, num_bits=8, strategy="channel"), "activations"),
        (tensors_config("pack-quantized", group_size=None), "not understood"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}}, "not understood"),
        ("gptq", "not an object"),
        (tensors_config("nvfp4-pack-quantized", type="float"), "type float with 4 bits by group of 32"),
        (tensors_config("mxfp4-pack-quantized", type="float", symmetric=False), "zero points"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "MXFP8"}},
            },
            "in one model",
        ),
        (quark_config(dtype="int4", qscheme="per_group"), "type int4 with per_group"),
        ({"quant_method": "quark"}, "without quantised weights"),
    ],
)
def test_what_is_not_supported_is_named(description: Any, part: str) -> None:
    with pytest.raises(ModelLoadError, match=part):
        parse_checkpoint_format(description)


def test_gemv_of_groups_that_no_writer_has_and_of_ranks_that_cut_what_is_filled_up() -> None:
    odd = parse_checkpoint_format({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 16})
    with pytest.raises(ModelLoadError, match="groups of 16 in layout gemv"):
        odd.tensors(8, 64)
    layout = parse_checkpoint_format({"quant_method": "awq", "bits": 4, "version": "GEMV", "group_size": 64})
    assert {n: t.shape for n, t in layout.tensors(8, 1088).items()} == {
        ".qweight": (8, 136), ".qzeros": (8, 4), ".scales": (8, 32),  # 17 groups: 3 words, an even number
    }  # fmt: skip
    assert layout.pads(1088) and not layout.pads(1024)
    names = {"o.qweight", "o.qzeros", "o.scales"}
    for inputs, refused in (
        (544, True),
        (512, True),
        (1024, False),
    ):  # of two ranks: 8.5, 8 and 16 groups each
        plan = WeightPlan(torch.float32, CPU, layout, names, Part(1, 2))
        if refused:
            with pytest.raises(ModelLoadError, match=r"o: awq, 4 bits, gemv fills up|groups of 64"):
                plan.linear([("o.weight", 8)], inputs, BY_INPUTS)
        else:
            plan.linear([("o.weight", 8)], inputs, BY_INPUTS)
            assert plan.cuts["o.scales"].ranges == (((0, 8),), ((16, 32),))


def test_errors_of_a_folder_name_it(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gptq")
    for name in ("int8", "int4_g32", "fp8"):
        with pytest.raises(
            ModelLoadError, match=f"quantised already, as int4: quantization '{name}' is not for it"
        ):
            load_model(quantized, dtype=torch.bfloat16, device=CPU, quantization=name)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["group_size"] = 48
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"quantized: groups of 48 do not divide 64"):
        load_model(quantized, dtype=torch.bfloat16, device=CPU, ops=TorchOps(torch.bfloat16, CPU))


def _logits_in_floats(model: DecoderModel) -> Tensor:
    return _logits_of(model, torch.float32)


def _logits_of(model: DecoderModel, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    kv = KVStorage(model.kv_layout(), 8, 4, dtype, CPU)
    table = torch.arange(8, dtype=torch.int32).numpy()
    with torch.inference_mode():
        return model.forward_logits(build_step_input([RowInput([3, 9, 1, 7, 5], 0, table)], 4, CPU), kv)[1]


@pytest.mark.parametrize(
    ("kind", "fast", "slow"),
    [
        ("gptq", "int4", "int4_weight_only"),
        ("w8a16", "int8", None),
        ("nvfp4", "int4", "int8_weight_only"),
        ("mxfp4", "int8", "int4_weight_only"),
    ],
)
def test_rows_may_be_rounded_over_weights_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, fast: str, slow: str | None
) -> None:
    """A weight-only checkpoint in its fast form: codes as they are, rows and the output layer in eight bits."""
    native_or_skip()
    quantized, _ = write(tmp_path, kind)
    _say_slow.cache_clear()
    with caplog.at_level("WARNING", "draftwise"):
        logits = {
            name: _logits_of(load_model(quantized, dtype=torch.bfloat16, device=CPU, quantization=name))
            for name in (None, fast, *([slow] if slow else []))
        }
    said = [r.message for r in caplog.records if "weight only" in r.message]
    library = native_library()
    assert library is not None
    assert len(said) == (library.isa is not Isa.AMX)  # tiles are quick with it
    assert all("quantization=" in message for message in said)
    scale = float(logits[None].abs().max())
    for name in logits.keys() - {None}:
        assert 0 < float((logits[name] - logits[None]).abs().max()) < 0.1 * scale


def test_rows_of_checkpoints_for_activations_of_four_bits_are_rounded() -> None:
    def rounds(description: dict[str, Any]) -> bool:
        return parse_checkpoint_format(description).dynamic

    for name in ("nvfp4 w4a4", "mxfp4 w4a4", "modelopt nvfp4", "quark mxfp4"):
        assert rounds(CASES[name][1]), name
    assert not rounds(CASES["nvfp4"][1]) and not rounds(CASES["mxfp4"][1])
    assert not rounds({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
    weights_only = CASES["quark mxfp4"][1]["global_quant_config"] | {"input_tensors": None}
    assert not rounds({"quant_method": "quark", "global_quant_config": weights_only})
    names = ("NVFP4", "W4A16_NVFP4", "FP8")
    layers = {f"layers.{i}": {"quant_algo": name} for i, name in enumerate(names)}
    mixed = parse_checkpoint_format(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    assert not any(mixed.of([f"layers.{i}"], {f"layers.{i}.weight_scale_2"}).dynamic for i in (0, 1))


@pytest.mark.parametrize("name", ["nvfp4 w4a4", "mxfp4 w4a4"])
def test_the_user_has_the_last_word_on_rows(tmp_path: Path, name: str) -> None:
    native_or_skip()
    quantized, plain = write(tmp_path, name)
    found = {
        asked: _logits_of(load_model(quantized, dtype=torch.bfloat16, device=CPU, quantization=asked))
        for asked in (None, "int4", "int8_weight_only")
    }
    exact = _logits_of(load_model(plain, dtype=torch.bfloat16, device=CPU))
    error = {
        asked: float((logits - exact).abs().mean() / exact.abs().mean()) for asked, logits in found.items()
    }
    assert error["int8_weight_only"] < 0.03 and error[None] < 0.06 and error["int4"] < 0.06
    assert not torch.equal(found[None], found["int8_weight_only"])
    with pytest.raises(ConfigError, match="leave its numbers as they are"):
        load_model(quantized, dtype=torch.bfloat16, device=CPU, quantization="fp8")


GENERAL = {
    **CONFIG, "architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip


def as_general(folder: Path, **changes: Any) -> Path:
    """A folder's model as one of a family without code of ours, whose tensors have the same names."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **GENERAL, **changes}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "awq", "gptq desc_act", "w8a8", "fp8 blocks", "two forms", "nvfp4", "mxfp4",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("awq gemv", "w4a16 with zeros", "modelopt mixed", "modelopt fp8")
        ),
    ],
)  # fmt: skip
def test_models_of_transformers_take_the_same_numbers(tmp_path: Path, name: str) -> None:
    quantized, plain = (as_general(folder) for folder in write(tmp_path, name))
    ops = TorchOps(torch.float32, CPU)
    tokens = [RowInput([3, 9, 1, 7, 5], 0, torch.arange(8, dtype=torch.int32).numpy())]
    found = []
    for folder in (quantized, plain):
        model = load_model(folder, dtype=torch.float32, device=CPU, ops=ops)
        assert type(model).__name__ == "GeneralDecoder" or not isinstance(model, LlamaModel)
        kv = KVStorage(model.kv_layout(), 8, 4, torch.float32, CPU)
        with torch.inference_mode():
            found.append(model.forward_logits(build_step_input(tokens, 4, CPU), kv)[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_models_of_transformers_name_what_is_wrong(tmp_path: Path) -> None:
    quantized = as_general(write(tmp_path, "gptq")[0])
    tensors = load_file(quantized / "model.safetensors")
    broken = dict(tensors)
    del broken["model.layers.0.mlp.up_proj.scales"]
    save_file(broken, quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"tensors are missing: model\.layers\.0\.mlp\.up_proj\.scales"):
        load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))
    broken = {**tensors, "model.layers.0.mlp.up_proj.scales": torch.ones(2, 2)}
    save_file(broken, quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"up_proj\.scales has shape \[2, 2\], expected \[2, 96\]"):
        load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def test_groups_that_there_are_not(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gptq")
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.g_idx"][0] = 99
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match="groups 0 to 99 of inputs, of which there are 3"):
        load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def test_a_bias_that_says_something_is_not_dropped(tmp_path: Path) -> None:
    """Zeros beside a layer without bias are let go; anything else is a tensor that the model does not have."""
    quantized, _ = write(tmp_path, "gptq desc_act in order")
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"][3] = 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not have: model\.layers\.0\.self_attn\.o_proj\.bias"):
        load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def test_eight_bits_with_zero_points_are_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gptq 8 bits")
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.qzeros"][0, 0] += 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ModelLoadError, match="asymmetric"):
        load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def test_parts_of_one_layer_in_two_forms_are_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "two forms")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*(down|up)_proj$"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="in different forms"):
        load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def test_the_output_layer_is_packed_before_the_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is the largest matrix, and in memory twice while it is packed: then little else should be."""
    _, plain = write(tmp_path, "w4a16")
    order: list[tuple[int, ...]] = []

    class Noting(TorchOps):
        def pack_head(self, weight: Tensor) -> Any:
            order.append(tuple(weight.shape))
            return super().pack_head(weight)

        def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
            order.append(tuple(weight.shape))
            return super().pack_linear(weight, bias)

    load_model(plain, dtype=torch.float32, device=CPU, ops=Noting(torch.float32, CPU))
    assert order[0] == (VOCAB, HIDDEN) and len(order) > 4


def test_layers_of_bitsandbytes_that_make_no_sense_are_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "nf4 nested")
    file = quantized / "model.safetensors"
    tensors, base = load_file(file), "model.layers.1.mlp.up_proj.weight"
    broken: dict[str, tuple[dict[str, Tensor | None], str]] = {
        "no magnitudes": ({".absmax": None}, "absmax"),
        "magnitudes of other blocks": ({".absmax": tensors[f"{base}.absmax"][:-1]}, "expected 96 numbers"),
        "no table of the magnitudes": ({".nested_quant_map": None}, "nested_quant_map"),
        "codes in another type": ({"": tensors[base].view(torch.int8)}, "stored as I8"),
        "a state that is no JSON": (
            {".quant_state.bitsandbytes__nf4": torch.ones(9, dtype=torch.uint8)}, "says nothing of a layer",
        ),
    }  # fmt: skip
    for changes, words in broken.values():
        changed = dict(tensors)
        for part, value in changes.items():
            changed.pop(base + part)
            if value is not None:
                changed[base + part] = value
        save_file(changed, file)
        with pytest.raises(ModelLoadError, match=words):
            load_model(quantized, dtype=torch.float32, device=CPU, ops=TorchOps(torch.float32, CPU))


def test_layers_of_bitsandbytes_keep_their_codes_or_are_rounded(tmp_path: Path) -> None:
    native_or_skip()
    quantized, plain = write(tmp_path, "nf4")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU}
    kept, floats = load_model(quantized, **options), load_model(plain, **options)
    rounded = load_model(quantized, **options, quantization="int8")
    assert kept.weight_bytes() < rounded.weight_bytes() < floats.weight_bytes()
    with pytest.raises(ConfigError, match="fp8"):
        load_model(quantized, **options, quantization="fp8")


@pytest.mark.parametrize("name", ["nvfp4", "modelopt nvfp4", "mxfp4"])
def test_floats_of_four_bits_keep_their_codes(tmp_path: Path, name: str) -> None:
    native_or_skip()
    quantized, plain = write(tmp_path, name)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": CPU}
    kept, floats = load_model(quantized, **options), load_model(plain, **options)
    asked = load_model(quantized, **options, quantization="int8")  # rounds the output layer alone
    assert asked.weight_bytes() < kept.weight_bytes() < floats.weight_bytes()
    logits = [_logits_of(model) for model in (kept, floats)]
    # scales of NVFP4 have eleven digits in the kernel, numbers of bfloat16 eight; rows are rounded in the second case
    limit = 0.06 if name == "modelopt nvfp4" else 0.02
    assert float((logits[0] - logits[1]).abs().max()) < limit * float(logits[1].abs().max())
    with pytest.raises(ConfigError, match="fp8"):
        load_model(quantized, **options, quantization="fp8")


def test_a_form_that_is_said_in_a_file_of_its_own(tmp_path: Path) -> None:
    """ModelOpt's older folders: config.json says nothing."""
    quantized, plain = write(tmp_path, "modelopt nvfp4")
    ops = TorchOps(torch.float32, CPU)
    config = json.loads((quantized / "config.json").read_text())
    form = config.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(config))
    beside = quantized / "hf_quant_config.json"
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "ops": ops}
    beside.write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": form["quant_algo"]}})
    )
    eye = torch.eye(HIDDEN)
    found, wanted = (
        ops.linear(eye, load_model(folder, **options)._layers[0].o)  # type: ignore[attr-defined]
        for folder in (quantized, plain)
    )
    assert torch.equal(found, wanted)
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}}))
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json has no object named quantization"):
        load_model(quantized, **options)


@pytest.mark.parametrize(
    "form",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_scales_of_keys_and_values_alone(
    tmp_path: Path, form: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A float checkpoint with scales for a cache of fp8 is the float checkpoint, and says so."""
    _, plain = write(tmp_path, "mxfp8")
    config = json.loads((plain / "config.json").read_text())
    ops = TorchOps(torch.float32, CPU)
    wanted = _logits_in_floats(load_model(plain, dtype=torch.float32, device=CPU, ops=ops))
    tensors = load_file(plain / "model.safetensors")
    for i in range(CONFIG["num_hidden_layers"]):
        for name in ("k_scale", "v_scale", "k_proj.output_scale"):
            tensors[f"model.layers.{i}.self_attn.{name}"] = torch.full((2, 1, 1), 0.5)
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(ModelLoadError, match="does not have"):
        load_model(plain, dtype=torch.float32, device=CPU, ops=ops)
    (plain / "config.json").write_text(json.dumps({**config, "quantization_config": form}))
    with caplog.at_level("INFO", "draftwise"):
        model = load_model(plain, dtype=torch.float32, device=CPU, ops=ops)
    assert torch.equal(_logits_in_floats(model), wanted)
    assert sum("kv_cache_dtype fp8 or int8" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "name", ["nvfp4", "modelopt nvfp4", "mxfp4", "modelopt fp8 by output", "modelopt mxfp8"]
)
def test_ranks_read_their_parts(name: str) -> None:
    layout = parse_checkpoint_format(CASES[name][1])
    whole = CASES[name][0](8, 128, torch.Generator().manual_seed(3))
    names = {f"o{suffix}" for suffix in whole[0]}
    for split in (BY_INPUTS, Split(((Run(4),),))):
        parts = []
        for rank in range(2):
            plan = WeightPlan(torch.float32, CPU, layout, names, Part(rank, 2))
            outputs, inputs = (8, 64) if split is BY_INPUTS else (4, 128)
            linear = plan.linear([("o.weight", outputs)], inputs, split)
            assert not isinstance(linear, Tensor)

            def read(targets: Any, plan: WeightPlan = plan) -> None:
                for target, dest in targets.items():
                    value = whole[0][target.removeprefix("o")]
                    cut = plan.cuts.get(target)
                    if cut is not None:
                        value = value[tuple(slice(*ranges[0]) for ranges in cut.ranges)]
                    dest.copy_(value.view(dest.shape))

            plan.fill_with(read)
            parts.append(linear.weight().dequantize())
        assert torch.equal(torch.cat(parts, 1 if split is BY_INPUTS else 0), whole[1])

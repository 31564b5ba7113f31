"""Which tensor of a GGUF file is which of a Hugging Face checkpoint, and what its writer did to it.

Source: llama.cpp's ``convert_hf_to_gguf.py`` (names: ``gguf/constants.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from draftwise.errors import ModelLoadError
from draftwise.models.gguf.reader import GgufFile, GgufTensor

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA2 = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MOE = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_PER_ARCHITECTURE = {
    "llama": _LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER,
    "qwen3moe": _LAYER | _MOE,
    "gemma": _LAYER,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "phi3": _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": _LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
ARCHITECTURES = tuple(_PER_ARCHITECTURE)
_PERMUTED = ("attn_q", "attn_k")
_ASIDE = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Not weights but settings; see `gguf.config`."""
_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor of a checkpoint, made of one of a file."""

    name: str
    tensor: GgufTensor
    heads: int | None = None  # q and k of "llama": in this many heads, rows of pairs lie side by side
    shift: float = 0.0  # added to the numbers: "gemma" stores norms as 1 + w
    expert: int | None = None  # which matrix of a stack

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


def mapped(file: GgufFile) -> Iterator[Mapped]:
    """Every tensor of a file under its name in a checkpoint; of experts, each by itself.

    Raises:
        ModelLoadError: a family that is not read, or a tensor that it does not have.
    """
    architecture = file.architecture
    layer = _PER_ARCHITECTURE.get(architecture)
    if layer is None:
        raise ModelLoadError(
            f"{file.path}: GGUF files of architecture {architecture!r} are not supported (supported: "
            f"{', '.join(ARCHITECTURES)})"
        )
    heads = {
        "attn_q": file.metadata.get(f"{architecture}.attention.head_count"),
        "attn_k": file.metadata.get(f"{architecture}.attention.head_count_kv"),
    }
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    norms_are_shifted = architecture.startswith("gemma")
    for name, tensor in file.tensors.items():
        if name in _ASIDE:
            continue
        shift = -1.0 if norms_are_shifted and name.endswith("norm.weight") else 0.0
        if name in _OUTER:
            yield Mapped(_OUTER[name], tensor, shift=shift)
            continue
        found = _BLOCK.match(name)
        part = None if found is None else found.group(2)
        if found is not None and part in _EXPERTS and architecture == "qwen3moe":
            for expert in range(tensor.shape[0]):
                base = f"model.layers.{found.group(1)}.mlp.experts.{expert}.{_EXPERTS[part]}"
                yield Mapped(f"{base}.weight", tensor, expert=expert)
            continue
        if found is None or part is None or part not in layer:
            raise ModelLoadError(f"{file.path}: tensor {name} is not one of {architecture!r}")
        full = f"model.layers.{found.group(1)}.{layer[part]}.{found.group(3)}"
        count = heads.get(part) if architecture == "llama" and part in _PERMUTED else None
        if count is not None and (not isinstance(count, int) or count < 1 or tensor.shape[0] % (2 * count)):
            raise ModelLoadError(f"{file.path}: {name} has {tensor.shape[0]} rows for {count!r} heads")
        yield Mapped(full, tensor, heads=count, shift=shift)

"""Random Medusa heads in both published forms, and what they compute, written out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def random_heads(
    hidden: int, vocab: int, *, heads: int = 3, layers: int = 1, bias: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Tensors under the names of the method's authors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    out: dict[str, Tensor] = {}
    for i in range(heads):
        for j in range(layers):
            out[f"{i}.{j}.linear.weight"] = normal(hidden, hidden)
            if bias:
                out[f"{i}.{j}.linear.bias"] = normal(hidden)
        out[f"{i}.{layers}.weight"] = normal(vocab, hidden)
    return out


def expected_logits(tensors: dict[str, Tensor], hidden: Tensor, head: int, layers: int = 1) -> Tensor:
    """Head ``head`` of ``hidden`` [R, H] -> [R, V], in plain float32, as the paper has it."""
    x = hidden.float()
    for j in range(layers):
        y = x @ tensors[f"{head}.{j}.linear.weight"].T
        if f"{head}.{j}.linear.bias" in tensors:
            y = y + tensors[f"{head}.{j}.linear.bias"]
        x = x + y * torch.sigmoid(y)
    return x @ tensors[f"{head}.{layers}.weight"].T


def vllm_names(tensors: dict[str, Tensor], layers: int = 1) -> dict[str, Tensor]:
    """The same tensors under vLLM's names."""
    out = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[2] == "linear":
            out[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = tensor
        else:
            out[f"lm_heads.{parts[0]}.weight"] = tensor
    return out


def save_heads(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str) -> str:
    """Write a head's folder; ``file`` ends in .safetensors, .pt or .bin."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def save_medusa(
    folder: Path, tensors: dict[str, Tensor], heads: int, choices: Sequence[Any] | None = None
) -> str:
    config: dict[str, Any] = {
        "medusa_num_heads": heads,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "x",
    }
    if choices is not None:
        config["medusa_choices"] = choices
    return save_heads(folder, tensors, config, "medusa_lm_head.pt")

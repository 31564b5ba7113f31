"""Adapters as PEFT writes them, with random low-rank parts, and the checkpoint into which one is merged."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def weights_of(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping


def save_adapter(
    target: Path,
    model: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: tuple[str, ...] = ALL,
    size: float = 0.2,
    turned: bool = False,
    **more: Any,
) -> str:
    """An adapter for the linear layers of a folder's model whose names end with ``modules``. ``turned``: weights are
    [inputs, outputs]."""
    generator = torch.Generator().manual_seed(seed)
    config: dict[str, Any] = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none",
        "use_rslora": False, "use_dora": False, "modules_to_save": None, "fan_in_fan_out": False,
        "rank_pattern": {}, "alpha_pattern": {}, **more,
    }  # fmt: skip
    tensors = {}
    for name, weight in weights_of(model).items():
        module = name.removesuffix(".weight")
        if not module.endswith(modules) or weight.ndim != 2:
            continue
        outputs, inputs = weight.shape[::-1] if turned else weight.shape
        found = [r for key, r in config["rank_pattern"].items() if re.match(rf"(.*\.)?({key})$", module)]
        r = found[0] if found else rank
        base = f"base_model.model.{module}"
        tensors[f"{base}.lora_A.weight"] = torch.randn(r, inputs, generator=generator) * size
        tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, r, generator=generator) * size
    target.mkdir(parents=True, exist_ok=True)
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors")
    return str(target)


def merge(model: Path, adapter: Path, target: Path) -> str:
    """The model with an adapter's products added to its weights."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as handle:
        parts = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
    merged = {}
    for name, weight in weights_of(model).items():
        module = name.removesuffix(".weight")
        a = parts.get(f"base_model.model.{module}.lora_A.weight")
        if a is not None:
            b = parts[f"base_model.model.{module}.lora_B.weight"]
            alpha = config["lora_alpha"]
            for key, value in config["alpha_pattern"].items():
                if re.match(rf"(.*\.)?({key})$", module):
                    alpha = value
            scale = alpha / (math.sqrt(len(a)) if config["use_rslora"] else len(a))
            added = scale * (b @ a)
            weight = weight + (added.t() if config["fan_in_fan_out"] else added)
        merged[name] = weight
    target.mkdir()
    shutil.copy(model / "config.json", target)
    save_file(merged, target / "model.safetensors")
    return str(target)

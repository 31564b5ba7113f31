"""A small model of any kind in any form of quantised checkpoint, beside one of the floats that it stands for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from draftwise.quantization.scheme import parse_scheme
from draftwise.quantization.weights import quantize
from tests.fakes.architectures import Small, save, small
from tests.unit.test_quantized_checkpoints import CASES

_EXPERT = re.compile(r"\.experts\.\d+\.[^.]+\.weight$")
_KEPT = re.compile(r"(\.gate|router|shared_expert_gate)\.weight$")  # what chooses experts: no tool rounds it
SIZES: dict[str, Any] = {"q_lora_rank": 32, "kv_lora_rank": 32, "initializer_range": 0.1}
"""Groups of 32 inputs divide every layer."""


@dataclass(frozen=True)
class Pair:
    """``plain``: a float32 checkpoint of the numbers that ``quantized`` stands for."""

    architecture: str
    quantized: Path
    plain: Path
    count: int  # numbers in quantised layers

    def reference(self, tokens: list[int]) -> Tensor:
        """Transformers' logits of the plain one [T, V] float32."""
        import transformers

        cls: Any = getattr(transformers, self.architecture)
        model = cls.from_pretrained(self.plain, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            found: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        return found


def linear_names(made: Small, tensors: dict[str, Tensor]) -> dict[str, bool]:
    """Names of a saved model's linear layers, without the output layer and routers, and whether they are [in, out]."""
    model = made.model
    assert model is not None
    head = model.get_output_embeddings()
    found = {
        f"{name}.weight": isinstance(module, Conv1D)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    found |= {name: False for name in tensors if _EXPERT.search(name)}
    return {n: t for n, t in found.items() if n in tensors and tensors[n].ndim == 2 and not _KEPT.search(n)}


def write_pair(folder: Path, kind: str, form: str, **sizes: Any) -> Pair:
    """``form``: of `CASES`. Weights are drawn anew, as the form's own writer does it. ``sizes``: of `small`."""
    made = small(kind, **SIZES, **sizes)
    save(made, folder / "plain")
    tensors = _tensors(folder / "plain")
    writer, description = CASES[form]
    generator = torch.Generator().manual_seed(11)
    quantized, plain = dict(tensors), dict(tensors)
    count = 0
    for name, turned in linear_names(made, tensors).items():
        count += tensors[name].numel()
        shape = tensors[name].shape
        outputs, inputs = (shape[1], shape[0]) if turned else shape
        written, weight = writer(outputs, inputs, generator)
        del quantized[name]
        base = name.removesuffix(".weight")
        quantized |= {base + suffix: value for suffix, value in written.items() if suffix != ".bias"}
        plain[name] = (weight.t() if turned else weight).float().contiguous()
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "quantized").mkdir()
    (folder / "quantized" / "config.json").write_text(
        json.dumps({**config, "quantization_config": description})
    )
    save_file(quantized, folder / "quantized" / "model.safetensors")
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return Pair(made.architecture, folder / "quantized", folder / "plain", count)


def write_rounded(folder: Path, kind: str, scheme: str) -> Pair:
    """``quantized``: a float checkpoint; ``plain``: its linear layers rounded as ``quantization=scheme`` does it."""
    made = small(kind, **SIZES)
    save(made, folder / "float")
    save(made, folder / "plain")
    tensors = _tensors(folder / "float")
    count = 0
    for name, turned in linear_names(made, tensors).items():
        count += tensors[name].numel()
        weight = tensors[name].t().contiguous() if turned else tensors[name]
        rounded = quantize(weight, parse_scheme(scheme)).dequantize()
        tensors[name] = (rounded.t() if turned else rounded).contiguous()
    save_file(tensors, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return Pair(made.architecture, folder / "float", folder / "plain", count)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}

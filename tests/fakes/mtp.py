"""MTP layers written out in plain float32 torch, and folders of them in the three published namings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.heads import rms_norm, rotate

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class MtpShape:
    """``form``: "deepseek", "qwen", "mimo" or "speculators" (MiMo's names, the token first)."""

    form: str
    hidden: int = 32
    vocab: int = 61
    inner: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 1
    theta: float = 10000.0
    eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def shared(self) -> bool:
        return self.form == "qwen"


def random_layers(shape: MtpShape, seed: int = 0, scale: float = 0.25) -> Weights:
    """``{i}.{enorm, hnorm, proj, norm}.weight`` and ``layers.{i}.*``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    h, d = shape.hidden, shape.head_dim
    out: Weights = {}
    for i in range(1 if shape.shared else shape.layers):
        out[f"{i}.proj.weight"] = normal(h, 2 * h)
        for part in ("enorm", "hnorm", "norm"):
            out[f"{i}.{part}.weight"] = norm(h)
    for i in range(shape.layers):
        at = f"layers.{i}."
        for part, rows in (("q", shape.heads * d), ("k", shape.kv_heads * d), ("v", shape.kv_heads * d)):
            out[at + f"self_attn.{part}_proj.weight"] = normal(rows, h)
            if shape.qkv_bias:
                out[at + f"self_attn.{part}_proj.bias"] = normal(rows)
        if shape.qk_norm:
            out[at + "self_attn.q_norm.weight"] = norm(d)
            out[at + "self_attn.k_norm.weight"] = norm(d)
        out[at + "self_attn.o_proj.weight"] = normal(h, shape.heads * d)
        out[at + "mlp.gate_proj.weight"] = normal(shape.inner, h)
        out[at + "mlp.up_proj.weight"] = normal(shape.inner, h)
        out[at + "mlp.down_proj.weight"] = normal(h, shape.inner)
        out[at + "input_layernorm.weight"] = norm(h)
        out[at + "post_attention_layernorm.weight"] = norm(h)
    return out


_PARTS = {
    "deepseek": {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"},
    "mimo": {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "proj": "input_proj",
        "norm": "final_layernorm",
    },
    "qwen": {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "proj": "fc", "norm": "norm"},
}


def published(shape: MtpShape, weights: Weights, target_layers: int) -> Weights:
    """The same tensors under published names."""
    form = "mimo" if shape.form == "speculators" else shape.form
    out: Weights = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        layer = parts[0] == "layers"
        i = int(parts[1] if layer else parts[0])
        rest = ".".join(parts[2:]) if layer else f"{_PARTS[form][parts[1]]}.weight"
        if form == "deepseek":
            new = f"model.layers.{target_layers + i}.{rest}"
        elif form == "mimo":
            new = f"{'model.' if shape.form == 'mimo' else ''}mtp_layers.{i}.{rest}"
        else:
            new = f"mtp.layers.{i}.{rest}" if layer else f"mtp.{rest}"
        out[new] = tensor
    return out


def config_of(shape: MtpShape, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_mtp",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": 192,
        "torch_dtype": "float32",
    } | more


def save_mtp(folder: Path, shape: MtpShape, weights: Weights, target_layers: int = 2) -> str:
    """A folder of nothing but MTP layers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    if shape.form == "speculators":
        config = {
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": shape.layers,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 2}], "verifier": {}},
            "transformer_layer_config": config_of(shape, model_type="qwen3"),
        }
    (folder / "config.json").write_text(json.dumps(config))
    named = published(shape, weights, target_layers)
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
    return str(folder)


def add_to_target(folder: Path, target: str, shape: MtpShape, weights: Weights, **config: Any) -> str:
    """A copy of a target's folder whose checkpoint has MTP layers, too."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads((Path(target) / "config.json").read_text())
    raw |= {"num_nextn_predict_layers": shape.layers} | config
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(Path(target) / "model.safetensors")
    tensors |= published(shape, weights, raw["num_hidden_layers"])
    if shape.form == "deepseek":  # as published: copies of the target's
        n = raw["num_hidden_layers"]
        tensors[f"model.layers.{n}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{n}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


class ReferenceMtp:
    """MTP layers over whole texts. Row s is made from token s and the feature of token s - 1, at position s - 1."""

    def __init__(self, shape: MtpShape, weights: Weights, embedding: Tensor, output: Tensor) -> None:
        self.shape, self.w, self.embedding, self.output = shape, weights, embedding, output

    def rows(self, depth: int, tokens: Tensor, features: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Rows ``first ..`` of layer ``depth``: logits [T, V] and next features [T, H]."""
        shape, w = self.shape, self.w
        part = 0 if shape.shared else depth
        positions = torch.arange(first - 1, first - 1 + len(tokens))
        token = self.embedding[tokens]
        if shape.form in ("deepseek", "mimo"):
            token = token * (positions > 0)[:, None]
        token = rms_norm(token, w[f"{part}.enorm.weight"], shape.eps)
        feature = rms_norm(features, w[f"{part}.hnorm.weight"], shape.eps)
        both = (feature, token) if shape.form == "mimo" else (token, feature)
        x = torch.cat(both, dim=-1) @ w[f"{part}.proj.weight"].T
        at = f"layers.{depth}."
        x = x + self._attention(at, rms_norm(x, w[at + "input_layernorm.weight"], shape.eps), positions)
        y = rms_norm(x, w[at + "post_attention_layernorm.weight"], shape.eps)
        gate = F.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + gate @ w[at + "mlp.down_proj.weight"].T
        normed = rms_norm(x, w[f"{part}.norm.weight"], shape.eps)
        return normed @ self.output.T, x if shape.form == "deepseek" else normed

    def _attention(self, at: str, x: Tensor, positions: Tensor) -> Tensor:
        shape = self.shape
        count, d = x.shape[0], shape.head_dim
        parts = []
        for part in ("q", "k", "v"):
            y = x @ self.w[at + f"self_attn.{part}_proj.weight"].T
            if shape.qkv_bias:
                y = y + self.w[at + f"self_attn.{part}_proj.bias"]
            y = y.view(count, -1, d)
            if shape.qk_norm and part != "v":
                y = rms_norm(y, self.w[at + f"self_attn.{part}_norm.weight"], shape.eps)
            parts.append(y if part == "v" else rotate(y, positions, shape.theta))
        q, k, v = parts
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        seen = torch.ones(count, count).tril().bool()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        return out @ self.w[at + "self_attn.o_proj.weight"].T

    def draft(self, tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]:
        """Greedy drafts behind known ``tokens`` [n], from the target's ``hidden`` [n - 1, H] after its final norm."""
        drafts: list[int] = []
        self._follow(tokens, hidden, count, drafts)
        return drafts

    def next_logits(self, tokens: Sequence[int], hidden: Tensor, drafts: Sequence[int]) -> Tensor:
        """Logits [V] behind known ``tokens`` and these drafts."""
        return self._follow(tokens, hidden, len(drafts) + 1, list(drafts))

    def _follow(self, tokens: Sequence[int], hidden: Tensor, count: int, drafts: list[int]) -> Tensor:
        """``count`` passes: logits of the last one. ``drafts`` are taken as they are and go on with the best ones."""
        features, first, depth = hidden, 1, 0  # of tokens first - 1 ..
        logits = torch.empty(0)
        for step in range(count):
            fed = torch.tensor([*tokens, *drafts[:step]][first:])
            rows, given = self.rows(depth, fed, features, first)
            logits = rows[-1]
            if len(drafts) == step:
                drafts.append(int(logits.argmax()))
            if depth + 1 < self.shape.layers:
                depth, first, features = depth + 1, first + 1, given
            else:  # the last layer again, on its own output
                features = torch.cat([features, given[-1:]])
        return logits

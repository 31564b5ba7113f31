"""EAGLE heads written out in plain float32 torch, from the papers: what the engine's heads have to compute, a way to
train small ones, and folders of them in the published form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class HeadShape:
    """Everything that config.json says of a head."""

    kind: str  # "eagle" or "eagle3"
    hidden: int
    target_hidden: int
    vocab: int
    inner: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 1
    theta: float = 10000.0
    eps: float = 1e-5
    positions: int = 192
    feature_layers: tuple[int, ...] | None = (0, 1, 2)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = True
    draft_vocab: int | None = None
    mask_token: int | None = None  # a P-EAGLE head
    latent: tuple[int | None, int, int, int, int] | None = None
    """Latent attention, as in DeepSeek: sizes of the queries' latent, of the stored one, of a head's key, plain and
    rotated, and of its value."""
    extra: dict[str, Any] = field(default_factory=dict)  # more of config.json

    @property
    def features(self) -> int:
        """Width of what is combined from the target."""
        layers = self.feature_layers
        return (
            self.target_hidden if self.kind == "eagle" or layers is None else self.target_hidden * len(layers)
        )


def random_weights(shape: HeadShape, seed: int = 0, scale: float = 0.25) -> Weights:
    """Tensors under published names: ``midlayer.`` for EAGLE-3 of one layer, else ``layers.{i}.``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    h, d = shape.hidden, shape.head_dim
    out: Weights = {}
    eagle3 = shape.kind == "eagle3"
    if eagle3:
        if shape.feature_layers is not None:
            out["fc.weight"] = normal(h, shape.features)
        if shape.norm_before_fc:
            out["input_norm.weight"] = norm(shape.features)
        if shape.fc_norm:
            for i in range(len(shape.feature_layers or ())):
                out[f"fc_norm.{i}.weight"] = norm(shape.target_hidden)
        out["norm.weight"] = norm(h)
        if shape.own_head:
            out["lm_head.weight"] = normal(shape.draft_vocab or shape.vocab, h)
    else:
        out["fc.weight"] = normal(h, 2 * h)
    if shape.fc_bias:
        out["fc.bias"] = normal(h)
    if shape.own_embedding:
        out["embed_tokens.weight"] = normal(shape.vocab, h) * 4
    for i in range(shape.layers):
        at = "midlayer." if eagle3 and shape.layers == 1 else f"layers.{i}."
        inputs = 2 * h if eagle3 and i == 0 else h
        if shape.latent is None:
            out[at + "self_attn.q_proj.weight"] = normal(shape.heads * d, inputs)
            out[at + "self_attn.k_proj.weight"] = normal(shape.kv_heads * d, inputs)
            out[at + "self_attn.v_proj.weight"] = normal(shape.kv_heads * d, inputs)
            out[at + "self_attn.o_proj.weight"] = normal(h, shape.heads * d)
        else:
            queries, stored, plain, rotated, value = shape.latent
            width = shape.heads * (plain + rotated)
            if queries is None:
                out[at + "self_attn.q_proj.weight"] = normal(width, inputs)
            else:
                out[at + "self_attn.q_a_proj.weight"] = normal(queries, inputs)
                out[at + "self_attn.q_a_layernorm.weight"] = norm(queries)
                out[at + "self_attn.q_b_proj.weight"] = normal(width, queries)
            out[at + "self_attn.kv_a_proj_with_mqa.weight"] = normal(stored + rotated, inputs)
            out[at + "self_attn.kv_a_layernorm.weight"] = norm(stored)
            out[at + "self_attn.kv_b_proj.weight"] = normal(shape.heads * (plain + value), stored)
            out[at + "self_attn.o_proj.weight"] = normal(h, shape.heads * value)
        out[at + "mlp.gate_proj.weight"] = normal(shape.inner, h)
        out[at + "mlp.up_proj.weight"] = normal(shape.inner, h)
        out[at + "mlp.down_proj.weight"] = normal(h, shape.inner)
        out[at + "post_attention_layernorm.weight"] = norm(h)
        if eagle3 or i:
            out[at + "input_layernorm.weight"] = norm(h)
        if eagle3 and i == 0:
            out[at + "hidden_norm.weight"] = norm(h)
    if shape.mask_token is not None:
        out["mask_hidden"] = normal(1, shape.features) * 4
    if shape.draft_vocab is not None:
        chosen = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
        out["d2t"] = chosen - torch.arange(shape.draft_vocab)
        t2d = torch.zeros(shape.vocab, dtype=torch.bool)
        t2d[chosen] = True
        out["t2d"] = t2d
    return out


def save_head(folder: Path, shape: HeadShape, weights: Weights) -> str:
    """Write the head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if shape.kind == "eagle3" else "EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if shape.kind == "eagle3":
        config |= {
            "draft_vocab_size": shape.draft_vocab or shape.vocab,
            "target_hidden_size": shape.target_hidden,
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": shape.norm_before_fc,
            "fc_norm": shape.fc_norm,
            "norm_output": shape.norm_output,
        }
        if shape.feature_layers is None:
            config["eagle_config"] = {"use_aux_hidden_state": False}
        else:
            config["eagle_aux_hidden_state_layer_ids"] = list(shape.feature_layers)
    if shape.latent is not None:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        config |= dict(zip(names, shape.latent, strict=True))
        config["num_key_value_heads"] = shape.heads
        del config["head_dim"]
    if shape.mask_token is not None:
        config |= {"ptd_token_id": shape.mask_token, "parallel_drafting": True}
    (folder / "config.json").write_text(json.dumps(config | shape.extra))
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    return str(folder)


# --------------------------------------------------------------------------------------- what they compute


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """``x`` [T, heads, D]: pairs (i, i + D/2) turn by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class ReferenceHead:
    """A head over whole texts. Row s is made from token s and the feature of token s - 1, at position s - 1."""

    def __init__(self, shape: HeadShape, weights: Weights, embedding: Tensor, output: Tensor) -> None:
        """``embedding``, ``output``: the target's [V, H]."""
        self.shape = shape
        self.w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.output = self.w.get("lm_head.weight", output)
        self.target_ids = torch.arange(shape.vocab)
        if "d2t" in self.w:
            self.target_ids = self.w["d2t"] + torch.arange(len(self.w["d2t"]))

    def combine(self, states: list[Tensor]) -> Tensor:
        """``states``: hidden states entering each layer, then those after the final norm; [n, H] each."""
        layers = self.shape.feature_layers
        if self.shape.kind == "eagle" or layers is None:
            return states[-1]
        return self.join(torch.cat([states[layer] for layer in layers], dim=-1))

    def join(self, x: Tensor) -> Tensor:
        """``x`` [n, layers * H], states side by side."""
        shape, w = self.shape, self.w
        if shape.norm_before_fc:
            x = rms_norm(x, w["input_norm.weight"], shape.eps)
        if shape.fc_norm:
            chunks = x.chunk(len(shape.feature_layers or ()), dim=-1)
            x = torch.cat(
                [rms_norm(c, w[f"fc_norm.{i}.weight"], shape.eps) for i, c in enumerate(chunks)], dim=-1
            )
        x = x @ w["fc.weight"].T
        return x + w["fc.bias"] if shape.fc_bias else x

    def rows(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``mask`` [T, T] bool, True: row i sees row j. Returns logits [T, Vd] and features [T, H]."""
        shape, w = self.shape, self.w
        embedded = self.embedding[tokens]
        if shape.kind == "eagle":
            x = torch.cat((embedded, features), dim=-1) @ w["fc.weight"].T
            residual = x + w["fc.bias"] if shape.fc_bias else x
        else:
            normed = rms_norm(features, w["layers.0.hidden_norm.weight"], shape.eps)
            residual = normed if shape.norm_before_residual else features
            first = rms_norm(embedded, w["layers.0.input_layernorm.weight"], shape.eps)
        for i in range(shape.layers):
            if i:
                x = rms_norm(residual, w[f"layers.{i}.input_layernorm.weight"], shape.eps)
            else:
                x = residual if shape.kind == "eagle" else torch.cat((first, normed), dim=-1)
            residual = residual + self._attention(i, x, positions, mask)
            x = rms_norm(residual, w[f"layers.{i}.post_attention_layernorm.weight"], shape.eps)
            gate = x @ w[f"layers.{i}.mlp.gate_proj.weight"].T
            up = x @ w[f"layers.{i}.mlp.up_proj.weight"].T
            residual = residual + (F.silu(gate) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
        if shape.kind == "eagle":
            return residual @ self.output.T, residual
        normed = rms_norm(residual, w["norm.weight"], shape.eps)
        return normed @ self.output.T, normed if shape.norm_output else residual

    def _attention(self, i: int, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        if self.shape.latent is not None:
            return self._latent_attention(i, x, positions, mask)
        shape, at = self.shape, f"layers.{i}.self_attn."
        count, d = x.shape[0], shape.head_dim
        q = rotate((x @ self.w[at + "q_proj.weight"].T).view(count, -1, d), positions, shape.theta)
        k = rotate((x @ self.w[at + "k_proj.weight"].T).view(count, -1, d), positions, shape.theta)
        v = (x @ self.w[at + "v_proj.weight"].T).view(count, -1, d)
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ self.w[at + "o_proj.weight"].T

    def _latent_attention(self, i: int, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Keys and values of every head are made of the latent; neighbours are rotated."""
        assert self.shape.latent is not None
        shape, at = self.shape, f"layers.{i}.self_attn."
        queries, stored, plain, rotated, _ = shape.latent
        count = x.shape[0]

        def turned(part: Tensor) -> Tensor:
            return rotate(torch.cat((part[..., 0::2], part[..., 1::2]), -1), positions, shape.theta)

        if queries is None:
            q = x @ self.w[at + "q_proj.weight"].T
        else:
            latent = rms_norm(x @ self.w[at + "q_a_proj.weight"].T, self.w[at + "q_a_layernorm.weight"], 1e-6)
            q = latent @ self.w[at + "q_b_proj.weight"].T
        q = q.view(count, shape.heads, -1)
        q = torch.cat((q[..., :plain], turned(q[..., plain:])), -1)
        down = x @ self.w[at + "kv_a_proj_with_mqa.weight"].T
        latent = rms_norm(down[:, :stored], self.w[at + "kv_a_layernorm.weight"], 1e-6)
        up = (latent @ self.w[at + "kv_b_proj.weight"].T).view(count, shape.heads, -1)
        common = turned(down[:, None, stored:]).expand(count, shape.heads, rotated)
        k, v = torch.cat((up[..., :plain], common), -1), up[..., plain:]
        scores = torch.einsum("qhd,khd->hqk", q, k) * (plain + rotated) ** -0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ self.w[at + "o_proj.weight"].T

    def next_logits(self, tokens: list[int], features: Tensor, drafts: list[int], first: int = 1) -> Tensor:
        """Logits [Vd] behind known ``tokens`` [n] and ``drafts``, from the target's ``features`` [n - 1, H]; everything
        from the beginning. ``first``: rows before it do not exist."""
        known = torch.tensor(tokens)
        own: list[Tensor] = []
        for step in range(len(drafts) + 1):
            ids = torch.cat((known[first:], torch.tensor(drafts[:step], dtype=torch.int64)))
            fed = torch.cat([features[first - 1 :], *own]) if own else features[first - 1 :]
            positions = torch.arange(first - 1, first - 1 + len(ids))
            logits, given = self.rows(ids, fed, positions, torch.ones(len(ids), len(ids)).tril().bool())
            own.append(given[-1:])
        return logits[-1]

    def masked_logits(self, tokens: list[int], features: Tensor, count: int, first: int = 1) -> Tensor:
        """P-EAGLE: logits [count, Vd] of the last known row and of ``count`` - 1 rows of masks behind it."""
        assert self.shape.mask_token is not None
        masks = count - 1
        mask_hidden = self.w["mask_hidden"].reshape(1, -1)
        mask = mask_hidden if self.shape.feature_layers is None else self.join(mask_hidden)
        ids = torch.tensor([*tokens[first:], *[self.shape.mask_token] * masks])
        fed = torch.cat([features[first - 1 :], mask.expand(masks, -1)])
        positions = torch.arange(first - 1, first - 1 + len(ids))
        logits, _ = self.rows(ids, fed, positions, torch.ones(len(ids), len(ids)).tril().bool())
        return logits[-count:]

    def draft(self, tokens: list[int], features: Tensor, count: int, first: int = 1) -> list[int]:
        """Greedy drafts behind known ``tokens``."""
        if self.shape.mask_token is not None:
            best = self.masked_logits(tokens, features, count, first).argmax(dim=-1)
            return [int(token) for token in self.target_ids[best]]
        drafts: list[int] = []
        for _ in range(count):
            logits = self.next_logits(tokens, features, drafts, first)
            drafts.append(int(self.target_ids[logits.argmax()]))
        return drafts


# ----------------------------------------------------------------------------------------------- training


def unroll_mask(rows: int, unroll: int) -> Tensor:
    """Bool [(unroll + 1) * rows, same]: which rows see which when a head is trained on its own outputs.

    Block v is unroll v. Row i of block u sees rows 0..i - u of block 0, whose features are the target's, then one row
    each of blocks 1..u, on the way to itself: those that a draft of u tokens would have left.

    Example: 3 rows, row 2 of block 1 sees rows 0 and 1 of block 0 and itself.
    """
    size = (unroll + 1) * rows
    mask = torch.zeros(size, size, dtype=torch.bool)
    for u in range(unroll + 1):
        for i in range(rows):
            at = u * rows + i
            mask[at, at] = True
            mask[at, : max(i - u + 1, 0)] = True
            for v in range(1, u):
                if i - u + v >= 0:
                    mask[at, v * rows + i - u + v] = True
    return mask


def memorise(
    head: ReferenceHead,
    texts: list[tuple[Tensor, list[Tensor]]],
    *,
    unrolls: int,
    steps: int,
    lr: float = 4e-3,
) -> Weights:
    """Train a head until it knows what follows in each text: EAGLE-3's training-time test on (tokens [n], the target's
    states [n, H] per layer). Returns the weights, under the names that ``head`` was given them."""
    trained = {name: w.clone().requires_grad_() for name, w in head.w.items() if w.is_floating_point()}
    head.w |= trained
    head.embedding = head.w.get("embed_tokens.weight", head.embedding)
    head.output = head.w.get("lm_head.weight", head.output)
    inverse = torch.full((head.shape.vocab,), -100)
    inverse[head.target_ids] = torch.arange(len(head.target_ids))
    optimiser = torch.optim.Adam(list(trained.values()), lr=lr)
    rows_of = [len(tokens) - 2 for tokens, _ in texts]
    masks = [[unroll_mask(rows, u) for u in range(unrolls)] for rows in rows_of]
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimiser.zero_grad()
        for (tokens, states), rows, own_masks in zip(texts, rows_of, masks, strict=True):
            features = [head.combine([state[:rows] for state in states])]
            known, wanted = tokens[1:-1], inverse[tokens[2:]]
            loss = torch.zeros(())
            for u in range(unrolls):
                positions = torch.arange(rows).repeat(u + 1)
                logits, given = head.rows(known.repeat(u + 1), torch.cat(features), positions, own_masks[u])
                loss = loss + F.cross_entropy(logits[u * rows + u :], wanted[u:])
                last = given[u * rows :]
                features.append(torch.cat((features[0][:1], last[:-1])))
            torch.autograd.backward(loss)
        optimiser.step()
    return {name: weight.detach() for name, weight in head.w.items()}


def shape_of(target: Any, kind: str, **changes: Any) -> HeadShape:
    """A head for a Transformers model of this shape."""
    config = target.config
    base = HeadShape(kind, config.hidden_size, config.hidden_size, config.vocab_size)
    return replace(base, **changes)
